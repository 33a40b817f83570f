"""The operations of a pass: preparing rows, matrix products and attention, on all threads if there is enough work."""

import numpy as np
from numba import carray, types

from slipstream.backends.native.kernels import attention, products, records, recurrent
from slipstream.backends.native.kernels.attention import MOST_HEADS, parts_of, rows_at
from slipstream.backends.native.kernels.compiled import callback, kernel
from slipstream.backends.native.kernels.memory import address_of, floats, integers, pointer, where
from slipstream.backends.native.kernels.pool import share
from slipstream.backends.native.kernels.processor import PANEL, lanes
from slipstream.backends.native.kernels.products import ALIGN, BAND, NORM, PLAIN, matrix_at, tiles_of
from slipstream.backends.native.kernels.records import BOARD, NOTHING

MIN_SHARED_BYTES = 1 << 15
"""A product with fewer bytes of weights runs on one thread."""

MIN_SHARED_NUMBERS = 1 << 15
"""One thread prepares rows if they have fewer numbers in total."""

NARROW = lanes() < PANEL
"""Whether tiles of every format have at most two panels on this processor."""

MIN_SHARED_SCORES = 1024
"""Attention over fewer scores runs on one thread."""

MIN_SHARED_STATE = 1024
"""Recurrent layers whose heads have smaller states run on one thread."""

MIN_SPLIT_SLOTS = 512
"""If there are fewer heads than threads, a context of this number of slots or more is split among threads."""


_ONE, _NONE, _SINGLE = np.float32(1), np.float32(0), np.int64(1)


@kernel()
def scratch_of(columns):
    """Scratch bytes that a thread needs to prepare a row: see `products.prepare`."""
    return 10 * columns


@kernel()
def attention_scratch(size, width):
    """Scratch bytes of attention over `width` slots, for packed queries or weighted sums, then scores. A thread needs
    this scratch, or, if the context is split, a group."""
    return 4 * MOST_HEADS * (size + width)


@kernel()
def _prepare(board, matrix, sections, count, most, rows, packed):
    """Transform and pack rows for products, with the settings in `board.prepare`. See `_multiply_sections`."""
    job = board.prepare
    job.sections, job.pieces, job.packed = sections, tiles_of(most, matrix.most_rows), packed
    share(board, records.PREPARED, count * job.pieces, rows * matrix.columns > MIN_SHARED_NUMBERS)


@kernel()
def _multiply_sections(board, matrix, sections, count, most, rows, y, y_stride, add, scale, cap):
    """Prepare the rows of SECTIONs with the settings in `board.prepare`, and multiply them.

    matrix      matrix of one section; the matrices of other sections have the same shape and format
    sections    address of `count` SECTIONs
    most, rows  number of rows of the largest section, and of all sections
    scale, cap  scale and soft cap of the outputs; 1 and 0 for none
    """
    job, packed = board.product, board.room.packed
    _prepare(board, matrix, sections, count, most, rows, packed)
    bands, outputs, outs = 1, ALIGN, count * matrix.outs
    if count == 1:
        bands = max(1, min(tiles_of(most, matrix.most_rows), most // BAND))
    if outs < 4 * ALIGN * board.threads and most > 2:
        outputs = PANEL  # few outputs for many threads: narrow tiles, which are efficient with several rows
    elif outs * bands < 16 * ALIGN * board.threads and (matrix.group > 0 or NARROW):
        outputs = 2 * PANEL  # small units, so that threads end at about the same time; tiles have at most two panels
    job.sections, job.packed, job.scale, job.cap = sections, packed, scale, cap
    job.y, job.stride, job.add, job.share, job.bands = y, y_stride, add, outputs, bands
    job.pieces = (matrix.outs + outputs - 1) // outputs * bands
    share(board, records.PRODUCTS, count * job.pieces, outs * matrix.out_bytes > MIN_SHARED_BYTES)


@kernel()
def _multiply(board, matrix, inputs, stride, rows, y, y_stride, add, scale, cap):
    """Multiply all rows by one matrix."""
    board.prepare.inputs, board.prepare.stride, whole = inputs, stride, board.whole
    whole.matrix, whole.first, whole.rows = where(matrix), NOTHING, rows
    _multiply_sections(board, matrix, where(whole), _SINGLE, rows, rows, y, y_stride, add, scale, cap)
    if matrix.factors:
        factors = floats(matrix.factors, matrix.outs)
        for r in range(rows):
            out = floats(y + 4 * y_stride * r, matrix.outs)
            for i in range(matrix.outs):
                out[i] *= factors[i]


@kernel()
def pack_alone(board, model, matrix, rows, norm, bias, sections):
    """Normalise the first rows of the residual stream, and pack them for the matrices of experts. Each row becomes a
    tile of its own in `board.room.alone`. sections: SECTION [>= rows], scratch."""
    job, room = board.prepare, board.room
    for r in range(rows):
        sections[r].matrix, sections[r].first, sections[r].rows = where(matrix), r, 1
    job.model, job.mode, job.weight, job.bias, job.gather = where(model), NORM if norm else PLAIN, norm, bias, NOTHING
    job.inputs, job.stride = room.x, room.stride
    _prepare(board, matrix, address_of(sections), rows, _SINGLE, rows, room.alone)


@kernel()
def multiply_sections(board, model, sections, count, inputs, stride, mode, gather, y, y_stride):
    """y = rows of the first `count` SECTIONs times their matrices, which have the same shape and format. mode, gather:
    see `products.prepare`."""
    job, most, rows = board.prepare, 0, 0
    for g in range(count):
        most, rows = max(most, sections[g].rows), rows + sections[g].rows
    job.model, job.mode, job.weight, job.bias, job.gather = where(model), mode, NOTHING, NOTHING, gather
    job.inputs, job.stride, matrix = inputs, stride, matrix_at(sections[0].matrix, 0)
    _multiply_sections(board, matrix, address_of(sections), count, most, rows, y, y_stride, NOTHING, _ONE, _NONE)


@kernel()
def linear(board, matrix, inputs, stride, rows, y, y_stride, add):
    """y[r] = (add ? y[r] : 0) + x[r] @ w.T + bias for rows at `inputs`, `stride` apart; y float32 [rows, y_stride],
    y_stride >= padded outs. The rows are packed in `board.room`."""
    board.prepare.mode, board.prepare.gather = PLAIN, NOTHING
    _multiply(board, matrix, inputs, stride, rows, y, y_stride, add, _ONE, _NONE)


@kernel()
def transformed(board, model, matrix, inputs, stride, rows, mode, norm, bias, y, y_stride, add):
    """As `linear`, for rows that are transformed by `mode` first: see `products.prepare`."""
    job = board.prepare
    job.model, job.mode, job.weight, job.bias, job.gather = where(model), mode, norm, bias, NOTHING
    _multiply(board, matrix, inputs, stride, rows, y, y_stride, add, _ONE, _NONE)


@kernel()
def logits_of(board, model, inputs, stride, rows, mode, gather, y, y_stride):
    """y = the logits of rows, computed by the model's final norm and output matrix."""
    job = board.prepare
    job.model, job.mode, job.weight, job.bias, job.gather = where(model), mode, model.norm, model.norm_bias, gather
    scale, cap = model.logits_scale, model.logits_cap
    _multiply(board, model.head, inputs, stride, rows, y, y_stride, NOTHING, scale, cap)


@kernel()
def merge(board, model, norm, y, y_stride, rows, scale, factor):
    """Add rows at y to the residual stream: see `products.merge`."""
    job, room = board.merge, board.room
    job.x, job.stride, job.y, job.y_stride = room.x, room.stride, y, y_stride
    job.width, job.rows, job.each, job.norm, job.scale, job.eps = model.width, rows, 8, norm, scale, model.out_eps
    job.factor = factor
    share(board, records.MERGED, (rows + 7) // 8, rows * model.width > MIN_SHARED_NUMBERS)


@kernel()
def write_kv(board, model, layer, cache, rows, qkv, stride):
    """Normalise and rotate the heads of R rows, and write keys and values to the cache of a layer."""
    job, count = board.write_kv, rows.count
    pair = integers(cache.layers + 16 * layer.kv, 2)
    job.layer, job.qkv, job.stride = where(layer), qkv, stride
    job.rows, job.count, job.positions = rows.at, count, rows.tables
    job.keys, job.values, job.bytes = pair[0], pair[1], cache.bytes
    job.tables, job.table_stride, job.slots = cache.tables, cache.stride, cache.slots
    job.queries, job.queries_stride, job.up = board.room.mixed, board.room.mixed_stride, board.room.up
    job.eps, job.each = model.eps, 8
    share(board, records.KV_WRITTEN, (count + 7) // 8, count * stride > MIN_SHARED_NUMBERS)


@kernel()
def group_rows(rows, active, each, starts):
    """Bundle active rows of one sequence so that their query heads (`each` per row) fill a tile. Bundle i starts at
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
def attend(board, layer, cache, rows, active, starts, bundles, longest, q, stride, out, out_stride):
    """out[a] = attention of row active[a] in a layer; q: query heads of all rows, `stride` apart."""
    job, threads = board.attend, board.threads
    pair = integers(cache.layers + 16 * layer.kv, 2)
    job.q, job.stride, job.out, job.out_stride = q, stride, out, out_stride
    job.keys, job.values, job.bytes = pair[0], pair[1], cache.bytes
    job.tables, job.table_stride, job.slots = cache.tables, cache.stride, cache.slots
    job.rows, job.hidden, job.hidden_stride = rows.at, rows.hidden, rows.stride
    job.active, job.starts = address_of(active), address_of(starts)
    job.heads, job.kv_heads, job.size = layer.heads, layer.kv_heads, layer.size
    job.window, job.causal, job.scale = layer.window, layer.causal, layer.scale
    job.cap, job.sinks, job.gate = layer.cap, layer.sinks, NOTHING
    if layer.gate:  # the gates follow queries, keys and values in a row
        job.gate, job.gate_each = q + 4 * (layer.heads + 2 * layer.kv_heads * layer.writes) * layer.size, layer.gate
    job.width = (longest + cache.slots - 1) // cache.slots * cache.slots
    job.scores, job.mix = cache.scores, cache.mix
    groups = bundles * layer.kv_heads * parts_of(layer.heads, layer.kv_heads)
    shared = active.shape[0] * layer.heads * longest > MIN_SHARED_SCORES
    fits = attention_scratch(layer.size, job.width) <= job.scratch_bytes
    if threads > 1 and groups < 2 * threads and longest >= MIN_SPLIT_SLOTS and fits:
        job.pieces = max(1, min(longest // 256, 4 * threads // groups))
        share(board, records.SCORED, groups * job.pieces, shared)
        share(board, records.SOFTMAX, groups * MOST_HEADS, shared)
        share(board, records.MIXED, groups * (layer.size // PANEL), shared)
        return
    share(board, records.ATTENDED, groups, shared)


@kernel()
def recur(board, part, cache, rows, inputs, stride, out, out_stride):
    """out = the output of a recurrent layer for R rows of inputs, before its output product."""
    job, count = board.recur, rows.count
    job.part, job.rows, job.stride, job.at = where(part), inputs, stride, rows.at
    job.states, job.ring, job.out, job.out_stride = cache.states, cache.ring, out, out_stride
    job.scratch, job.scratch_bytes = board.prepare.scratch, board.prepare.scratch_bytes
    shared = count * part.kept > MIN_SHARED_NUMBERS
    if part.kind == records.CONVOLUTION:
        share(board, records.INPUTS_GATED, count, shared)
    else:
        share(board, records.RECURRED, cache.sequences * part.heads, part.key * part.value > MIN_SHARED_STATE)
    share(board, records.FINISHED, count, shared)
    share(board, records.REMEMBERED, cache.sequences, shared)


@callback(types.void(types.int64, types.int64, types.int64))
def run_unit(address, unit, thread):
    """Do one unit of the work that the BOARD at `address` describes. This is a callback, because a kernel that calls
    another kernel by name contains all of its code."""
    board = carray(pointer(address), (1,), BOARD)[0]
    op = board.op
    if op == records.PRODUCTS:
        products.product(board.product, unit, thread)
    elif op == records.ATTENDED:
        attention.attend(board.attend, unit, thread)
    elif op == records.PREPARED:
        products.prepare(board.prepare, unit, thread)
    elif op == records.MERGED:
        products.merge(board.merge, unit, thread)
    elif op == records.KV_WRITTEN:
        attention.write_kv(board.write_kv, unit, thread)
    elif op == records.SCORED:
        attention.attend_scores(board.attend, unit, thread)
    elif op == records.SOFTMAX:
        attention.attend_weights(board.attend, unit, thread)
    elif op == records.MIXED:
        attention.attend_values(board.attend, unit, thread)
    elif op == records.RECURRED:
        recurrent.recur(board.recur, unit, thread)
    elif op == records.FINISHED:
        recurrent.finish(board.recur, unit, thread)
    elif op == records.INPUTS_GATED:
        recurrent.gate_inputs(board.recur, unit, thread)
    elif op == records.REMEMBERED:
        recurrent.remember(board.recur, unit, thread)
