"""Medusa heads (see `heads.medusa`): the logits of all heads in one call."""

from __future__ import annotations

import numpy as np
from numba import carray

from slipstream.backends.native.kernels.arithmetic import add_silu
from slipstream.backends.native.kernels.compiled import entry, kernel
from slipstream.backends.native.kernels.layer import FINE, copy
from slipstream.backends.native.kernels.matrices import linear, scratch_of
from slipstream.backends.native.kernels.memory import address_of, pointer
from slipstream.backends.native.kernels.records import MATRIX, NOTHING


@kernel()
def _matrix(address, number):
    return carray(pointer(address), (number + 1,), MATRIX)[number]


@entry
def draft(boards, heads, hidden, states, logits, arena, threads):
    """hidden [B, d] -> logits [K, B, padded V]; states [K, B, d] is scratch. Returns FINE, or -n: n bytes of arena are
    needed."""
    board, head = boards[0], heads[0]
    board.threads = threads
    count, rows, width = states.shape
    columns, bytes, together = head.first.columns, head.first.row_bytes, count // head.outs * rows
    for number in range(head.laters):
        bytes = max(bytes, _matrix(head.later, number).row_bytes)
    for number in range(head.outs):
        bytes, columns = (
            max(bytes, _matrix(head.out, number).row_bytes),
            max(columns, _matrix(head.out, number).columns),
        )
    scratch = (scratch_of(columns) + 63) // 64 * 64
    base = (address_of(arena) + 63) // 64 * 64
    packed = base + board.size * scratch
    end = packed + max(rows, together) * bytes
    if end - address_of(arena) > arena.shape[0]:
        return address_of(arena) - end
    board.prepare.scratch, board.prepare.scratch_bytes = base, scratch
    wide = np.empty((rows, head.first.outs), np.float32)
    linear(board, head.first, address_of(hidden), width, rows, packed, address_of(wide), wide.shape[1], NOTHING)
    for k in range(count):
        for r in range(rows):
            copy(hidden[r], states[k, r])
            add_silu(wide[r, k * width : (k + 1) * width], states[k, r])
    for number in range(head.laters):
        state, matrix = states[number % count], _matrix(head.later, number)
        linear(board, matrix, address_of(state), width, rows, packed, address_of(wide), wide.shape[1], NOTHING)
        for r in range(rows):
            add_silu(wide[r, :width], state[r])
    for part in range(head.outs):  # a matrix that all heads share is read once
        given, made = states[part * (count // head.outs)], logits[part * (count // head.outs)]
        linear(
            board, _matrix(head.out, part), address_of(given), width, together, packed, address_of(made),
            logits.shape[2], NOTHING,
        )  # fmt: skip
    return FINE
