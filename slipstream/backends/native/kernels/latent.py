"""Latent attention (MLA) in its absorbed form: the cache holds one latent vector per token instead of keys and values.

The score of a head is q . (k_up.T @ latent) = (k_up @ q) . latent. So queries are multiplied by the head's k_up, and
all heads attend to the latent vectors, as to one key/value head of [rotated key, latent]. The weighted sum of latent
vectors is multiplied by the head's v_up. Values equal keys before rotation. The kernels read keys and values in
different orders, so both are stored. R rows, H heads, D = rotated + rank.
"""

import numpy as np

from slipstream.backends.native.kernels import matrices
from slipstream.backends.native.kernels.arithmetic import rms_norm
from slipstream.backends.native.kernels.compiled import kernel
from slipstream.backends.native.kernels.memory import address_of, floats, where
from slipstream.backends.native.kernels.products import PLAIN, copy, matrix_at
from slipstream.backends.native.kernels.records import NOTHING, SECTION

_FLOATS = np.int64(1)
"""Stride of inputs that `gather` locates by the number of their first float."""


@kernel()
def widths(layer):
    """(columns of the heads' matrices, floats in a row of `room.mixed`, floats in a row of `room.up`, bytes of the
    packed vectors of all heads of a row)"""
    part, heads = layer.latent, layer.heads
    k_up, v_up = matrix_at(part.k_up, 0), matrix_at(part.v_up, 0)
    mixed = max(heads * layer.size, part.q_b.outs, layer.qkv.outs)
    up = max(heads * k_up.outs, heads * v_up.outs, layer.qkv.outs)
    return max(k_up.columns, v_up.columns), mixed, up, heads * max(k_up.row_bytes, v_up.row_bytes)


@kernel()
def first_room(board, layer):
    """(address, stride) of the outputs of a layer's first product."""
    room = board.room
    if layer.latent.rank == 0:
        return room.qkv, room.qkv_stride
    if layer.latent.query_rank:
        return room.up, room.up_stride
    return room.mixed, room.mixed_stride


@kernel()
def _multiply_heads(board, model, address, heads, count, stride, each, skipped, gather, sections):
    """room.up [H, count, outs] = the vector of each head and row times the head's matrix. In a row of `room.mixed`, the
    vector of head h begins at h * each + skipped. gather: int64 [H * count], scratch."""
    for h in range(heads):
        sections[h].matrix, sections[h].first, sections[h].rows = where(matrix_at(address, h)), h * count, count
        for r in range(count):
            gather[h * count + r] = r * stride + h * each + skipped
    outs = matrix_at(address, 0).outs
    matrices.multiply_sections(
        board, model, sections, heads, board.room.mixed, _FLOATS, PLAIN, address_of(gather), board.room.up, outs
    )


@kernel()
def absorb(board, model, layer, count, first, stride):
    """Normalise the latent vectors, move them to the keys of `room.qkv`, and multiply the queries of each head by its
    k_up. first, stride: see `first_room`. `attention.write_kv` then joins rotated and multiplied parts of queries."""
    part, room, heads = layer.latent, board.room, layer.heads
    each = part.rotated + part.plain
    before = part.query_rank if part.query_rank else heads * each
    for r in range(count):
        row = floats(first + 4 * stride * r, before + layer.size)
        key = floats(room.qkv + 4 * (room.qkv_stride * r + heads * layer.size), layer.size)
        copy(row[before:], key)
        rms_norm(key[part.rotated :], floats(part.norm, part.rank), part.eps, key[part.rotated :])
        if part.query_rank:
            rms_norm(row[:before], floats(part.q_norm, before), part.eps, row[:before])
    if part.query_rank:
        matrices.linear(board, part.q_b, first, stride, count, room.mixed, room.mixed_stride, NOTHING)
    gather, sections = np.empty(heads * count, np.int64), np.empty(heads, SECTION)
    _multiply_heads(
        board, model, part.k_up, heads, count, room.mixed_stride, each, part.rotated, gather, sections
    )  # fmt: skip


@kernel()
def expand(board, model, layer, count):
    """Replace the weighted sums of latent vectors in `room.mixed` by each head's weighted sum of values."""
    part, room, heads = layer.latent, board.room, layer.heads
    gather, sections = np.empty(heads * count, np.int64), np.empty(heads, SECTION)
    _multiply_heads(
        board, model, part.v_up, heads, count, room.mixed_stride, layer.size, part.rotated, gather, sections
    )  # fmt: skip
    value = layer.o.width // heads
    for r in range(count):
        row = floats(room.mixed + 4 * room.mixed_stride * r, layer.o.width)
        for h in range(heads):
            copy(floats(room.up + 4 * value * (h * count + r), value), row[h * value : (h + 1) * value])
