"""The operations of a pass: preparing rows, matrix products and attention, on all threads if there is enough work."""

from __future__ import annotations

import numpy as np

from slipstream.backends.native.kernels.attention import MOST_HEADS, parts_of, rows_at, scratch_floats
from slipstream.backends.native.kernels.compiled import kernel
from slipstream.backends.native.kernels.memory import address_of, integers
from slipstream.backends.native.kernels.pool import share
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.kernels.products import ALIGN, BAND
from slipstream.backends.native.kernels.records import (
    ATTENDED,
    KV_WRITTEN,
    MIXED,
    NOTHING,
    PREPARED,
    PRODUCTS,
    SCORED,
    SOFTMAX,
)  # fmt: skip
from slipstream.backends.native.kernels.rows import PLAIN, tiles_of

_NO_EPS = np.float32(0)

MIN_SHARED_BYTES = 1 << 15
"""Smaller products, in bytes of weights, run on one thread."""

MIN_SHARED_NUMBERS = 1 << 15
"""Fewer numbers are prepared on one thread."""

MIN_SHARED_SCORES = 1024
"""Attention over fewer scores runs on one thread."""

MIN_SPLIT_SLOTS = 512
"""From this number of slots on, the context is split among threads if there are too few heads for all threads."""


@kernel()
def scratch_of(columns):
    """Scratch bytes that a thread needs to prepare a row: see `rows.prepare`."""
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
    share(board, PREPARED, units, rows * matrix.columns > MIN_SHARED_NUMBERS)


@kernel()
def multiply(board, matrix, rows, packed, y, stride, add):
    """y[r] = (add ? y[r] : 0) + x[r] @ w.T + bias for packed rows; y float32 [rows, stride], stride >= padded outs."""
    job = board.product
    job.tile, job.weights, job.scales, job.bias, job.packed, job.y = (
        matrix.tile, matrix.weights, matrix.scales, matrix.bias, packed, y,
    )  # fmt: skip
    job.columns, job.outs, job.out_bytes = matrix.columns, matrix.outs, matrix.out_bytes
    job.row_bytes, job.rows, job.most_rows, job.stride, job.add = (
        matrix.row_bytes, rows, matrix.most_rows, stride, add,
    )  # fmt: skip
    threads, share_of = board.threads, ALIGN
    if matrix.outs < 4 * ALIGN * threads and rows > 2:
        share_of = PANEL  # few outputs for many threads: narrow tiles, which are efficient with several rows
    tiles = tiles_of(rows, matrix.most_rows)
    job.share, job.bands = share_of, max(1, min(tiles, rows // BAND))
    units = (matrix.outs + share_of - 1) // share_of * job.bands
    share(board, PRODUCTS, units, matrix.outs * matrix.out_bytes > MIN_SHARED_BYTES)


@kernel()
def linear(board, matrix, source, stride, rows, packed, y, y_stride, add):
    """y = x @ w.T + bias for rows without a transformation; see `multiply`."""
    prepare(board, matrix, source, stride, rows, PLAIN, NOTHING, NOTHING, NOTHING, NOTHING, _NO_EPS, NOTHING, packed)
    multiply(board, matrix, rows, packed, y, y_stride, add)


@kernel()
def write_kv(board, model, layer, cache, number, rows, qkv, stride):
    """Write keys and values of R rows to the cache of layer `number`; heads are normalised and rotated first."""
    job, count = board.write_kv, rows.count
    both = integers(cache.layers + 16 * number, 2)
    job.qkv, job.stride, job.rows, job.count, job.cos_sin = qkv, stride, rows.at, count, rows.cos_sin
    job.keys, job.values, job.half = both[0], both[1], cache.half
    job.tables, job.table_stride, job.slots = cache.tables, cache.stride, cache.slots
    job.heads, job.kv_heads, job.size, job.rotary = model.heads, model.kv_heads, model.size, model.rotary
    job.q_norm, job.k_norm, job.eps, job.each = layer.q_norm, layer.k_norm, model.eps, 8
    share(board, KV_WRITTEN, (count + 7) // 8, count * stride > MIN_SHARED_NUMBERS)


@kernel()
def group_rows(rows, active, each, starts):
    """Group active rows of one sequence so that their query heads, `each` per row, fill a tile. Bundle i starts at
    index starts[i] of `active`. Returns (number of bundles, longest context)."""
    longest, bundles, at = 0, 0, rows_at(rows.at, rows.count)
    for a in range(active.shape[0]):
        longest = max(longest, at[active[a]].length)
        full = bundles > 0 and (a + 1 - starts[bundles - 1]) * each > MOST_HEADS
        if a == 0 or full or at[active[a]].sequence != at[active[a - 1]].sequence:
            starts[bundles] = a
            bundles += 1
    starts[bundles] = active.shape[0]
    return bundles, longest


@kernel()
def attend(board, model, layer, cache, number, rows, active, starts, bundles, longest, q, stride, out, out_stride):
    """out[a] = attention of row going[a] in layer `number`; q: query heads of all rows, `stride` apart."""
    job, threads = board.attend, board.threads
    both = integers(cache.layers + 16 * number, 2)
    job.q, job.stride, job.out, job.out_stride = q, stride, out, out_stride
    job.keys, job.values, job.half = both[0], both[1], cache.half
    job.tables, job.table_stride, job.slots = cache.tables, cache.stride, cache.slots
    job.rows, job.hidden, job.hidden_stride = rows.at, rows.hidden, rows.stride
    job.active, job.starts = address_of(active), address_of(starts)
    job.heads, job.kv_heads, job.size, job.window = model.heads, model.kv_heads, model.size, layer.window
    job.width = (longest + cache.slots - 1) // cache.slots * cache.slots
    job.scores, job.mix = cache.scores, cache.mix
    groups = bundles * model.kv_heads * parts_of(model.heads, model.kv_heads)
    shared = active.shape[0] * model.heads * longest > MIN_SHARED_SCORES
    if (
        threads > 1
        and groups < 2 * threads
        and longest >= MIN_SPLIT_SLOTS
        and job.width <= slots_in(job.scratch_bytes, model.size)
    ):
        job.pieces = max(1, min(longest // 256, 4 * threads // groups))
        share(board, SCORED, groups * job.pieces, shared)
        share(board, SOFTMAX, groups * MOST_HEADS, shared)
        share(board, MIXED, groups * (model.size // PANEL), shared)
        return
    share(board, ATTENDED, groups, shared)


@kernel()
def slots_in(bytes, size):
    """Number of slots whose scores fit in `bytes` of scratch: see `attention.scratch_floats`."""
    return bytes // (4 * MOST_HEADS) - size


@kernel()
def attention_scratch(size, width):
    """Scratch bytes of attention over `width` slots: per thread, or per group if the context is split."""
    return 4 * scratch_floats(size, width)
