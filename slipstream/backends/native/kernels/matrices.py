"""What a pass is made of: rows prepared, multiplied and attended to, by all threads where it is worth it."""

from __future__ import annotations

import numpy as np

from slipstream.backends.native.kernels.attention import MOST_HEADS, parts_of, room_of, rows_at
from slipstream.backends.native.kernels.compiled import kernel
from slipstream.backends.native.kernels.memory import address_of, integers
from slipstream.backends.native.kernels.pool import share
from slipstream.backends.native.kernels.products import ALIGN, BAND
from slipstream.backends.native.kernels.records import (
    ATTENDED,
    MIXED,
    NOTHING,
    PLACED,
    PREPARED,
    PRODUCTS,
    SCORED,
    SOFTENED,
)  # fmt: skip
from slipstream.backends.native.kernels.rows import PLAIN, tiles_of
from slipstream.backends.native.kernels.tiles import PANEL

_NO_EPS = np.float32(0)

WORTH_BYTES = 1 << 15
"""Bytes of weights from which on a product is worth waking threads."""

WORTH_NUMBERS = 1 << 15
"""Numbers to prepare from which on threads are worth their waking."""

WORTH_SCORES = 1024
"""Scores from which on they are for attention, ..."""

LONG = 512
"""... and slots from which on the context itself is divided, where there are fewer heads than threads need."""


@kernel()
def scratch_of(columns):
    """Bytes that a thread needs to prepare a row: see `rows.prepare`."""
    return 10 * columns


@kernel()
def prepare(board, matrix, source, stride, rows, mode, norm, bias, layer_norm, activation, eps, gather, packed):
    """Transform rows (see `rows.prepare`) and pack them for a product with this matrix."""
    job = board.prepare
    job.source, job.stride, job.gather, job.rows, job.width = source, stride, gather, rows, matrix.width
    job.mode, job.weight, job.bias, job.layer_norm, job.activation, job.eps = (
        mode, norm, bias, layer_norm, activation, eps,
    )  # fmt: skip
    job.packed, job.form, job.most_rows, job.columns = packed, matrix.form, matrix.most_rows, matrix.columns
    job.group, job.row_bytes = matrix.group, matrix.row_bytes
    units = tiles_of(rows, matrix.most_rows)
    share(board, PREPARED, units, rows * matrix.columns > WORTH_NUMBERS)


@kernel()
def multiply(board, matrix, rows, packed, y, stride, add):
    """y[r] = (add ? y[r] : 0) + x[r] @ w.T + bias for packed rows; y float32 [rows, stride], stride >= padded outs."""
    job = board.product
    job.tile, job.weights, job.scales, job.bias, job.packed, job.y = (
        matrix.tile, matrix.weights, matrix.scales, matrix.bias, packed, y,
    )  # fmt: skip
    job.columns, job.group, job.outs, job.out_bytes = matrix.columns, matrix.group, matrix.outs, matrix.out_bytes
    job.row_bytes, job.rows, job.most_rows, job.stride, job.add = (
        matrix.row_bytes, rows, matrix.most_rows, stride, add,
    )  # fmt: skip
    threads, share_of = board.threads, ALIGN
    if matrix.outs < 4 * ALIGN * threads and rows > 2:
        share_of = PANEL  # few outputs for many threads: rows make up for narrow tiles
    tiles = tiles_of(rows, matrix.most_rows)
    job.share, job.bands = share_of, max(1, min(tiles, rows // BAND))
    units = (matrix.outs + share_of - 1) // share_of * job.bands
    share(board, PRODUCTS, units, matrix.outs * matrix.out_bytes > WORTH_BYTES)


@kernel()
def linear(board, matrix, source, stride, rows, packed, y, y_stride, add):
    """Rows as they are times a matrix."""
    prepare(board, matrix, source, stride, rows, PLAIN, NOTHING, NOTHING, NOTHING, NOTHING, _NO_EPS, NOTHING, packed)
    multiply(board, matrix, rows, packed, y, y_stride, add)


@kernel()
def place(board, model, layer, cache, number, rows, qkv, stride):
    """Keys and values of R rows into the cache of layer `number`; heads are normalised and rotated first."""
    job, count = board.place, rows.count
    both = integers(cache.layers + 16 * number, 2)
    job.qkv, job.stride, job.rows, job.count, job.turns = qkv, stride, rows.at, count, rows.turns
    job.keys, job.values, job.half = both[0], both[1], cache.half
    job.tables, job.table_stride, job.slots = cache.tables, cache.stride, cache.slots
    job.heads, job.kv_heads, job.size, job.rotary = model.heads, model.kv_heads, model.size, model.rotary
    job.q_norm, job.k_norm, job.eps, job.each = layer.q_norm, layer.k_norm, model.eps, 8
    share(board, PLACED, (count + 7) // 8, count * stride > WORTH_NUMBERS)


@kernel()
def group_rows(rows, going, each, starts):
    """Bundles of rows of one sequence whose query heads fill a tile, `each` of a row: starts[i] is the first of bundle
    i, as an index of `going`. Returns (bundles, the longest context)."""
    longest, bundles, at = 0, 0, rows_at(rows.at, rows.count)
    for a in range(going.shape[0]):
        longest = max(longest, at[going[a]].length)
        full = bundles > 0 and (a + 1 - starts[bundles - 1]) * each > MOST_HEADS
        if a == 0 or full or at[going[a]].sequence != at[going[a - 1]].sequence:
            starts[bundles] = a
            bundles += 1
    starts[bundles] = going.shape[0]
    return bundles, longest


@kernel()
def attend(board, model, layer, cache, number, rows, going, starts, bundles, longest, q, stride, out, out_stride):
    """out[a] = attention of row going[a] in layer `number`; q: query heads of all rows, `stride` apart."""
    job, threads = board.attend, board.threads
    both = integers(cache.layers + 16 * number, 2)
    job.q, job.stride, job.out, job.out_stride = q, stride, out, out_stride
    job.keys, job.values, job.half = both[0], both[1], cache.half
    job.tables, job.table_stride, job.slots = cache.tables, cache.stride, cache.slots
    job.rows, job.hidden, job.hidden_stride = rows.at, rows.hidden, rows.stride
    job.place, job.starts = address_of(going), address_of(starts)
    job.heads, job.kv_heads, job.size, job.window = model.heads, model.kv_heads, model.size, layer.window
    job.width = (longest + cache.slots - 1) // cache.slots * cache.slots
    job.scores, job.mix = cache.scores, cache.mix
    groups = bundles * model.kv_heads * parts_of(model.heads, model.kv_heads)
    worth = going.shape[0] * model.heads * longest > WORTH_SCORES
    if (
        threads > 1
        and groups < 2 * threads
        and longest >= LONG
        and job.width <= room_for(job.scratch_bytes, model.size)
    ):
        job.pieces = max(1, min(longest // 256, 4 * threads // groups))
        share(board, SCORED, groups * job.pieces, worth)
        share(board, SOFTENED, groups * MOST_HEADS, worth)
        share(board, MIXED, groups * (model.size // PANEL), worth)
        return
    share(board, ATTENDED, groups, worth)


@kernel()
def room_for(bytes, size):
    """Slots whose scores fit in so many bytes of scratch: see `attention.room_of`."""
    return bytes // (4 * MOST_HEADS) - size


@kernel()
def attention_scratch(size, width):
    """Bytes that attention over `width` slots needs: for each thread, or for each group where the context is
    divided."""
    return 4 * room_of(size, width)
