"""Attention of single rows over the paged KV cache, in float32.

Every sum runs over the *visible* slots in order of position. So a row is bitwise the same alone, in a chain, and in a
tree with branches that the row does not see. Scores are independent dot products over D. Visible scores are moved next
to each other for the softmax. In the weighted sum of values, hidden slots have weight exactly 0. If the sum is not
finite, it is computed again without the hidden slots, because a hidden Inf times 0 would be NaN.
"""

import numpy as np
from numba import carray

from slipstream.backends.native.kernels.arithmetic import (
    cap_in_place,
    is_finite,
    max_abs,
    rms_norm,
    rotate,
    sigmoid,
    softmax_in_place,
)
from slipstream.backends.native.kernels.compiled import kernel
from slipstream.backends.native.kernels.formats import FLOAT32, Q8_0
from slipstream.backends.native.kernels.memory import address_of, call, floats, half, integers, pointer, put_half, small
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.kernels.records import LAYER, NOTHING, ROW

MOST_HEADS = FLOAT32.most_rows
"""Most query heads that are processed together. They share a key/value head, and belong to one or several rows."""

ALL = np.int64(MOST_HEADS)
SPAN = np.int64(Q8_0.span)


@kernel()
def rows_at(address, count):
    """The array ROW [count] at an address."""
    return carray(pointer(address), (count,), ROW)


@kernel()
def spans_of(size):
    return (size + SPAN - 1) // SPAN


@kernel()
def head_bytes(job, size):
    """Bytes of the keys of one head in a block, or of its values. In the format of 8 bits, scales follow the
    numbers."""
    return (job.bytes * size + (2 * spans_of(size) if job.bytes == 1 else 0)) * job.slots


@kernel()
def _copy(x, address, step, bytes, scales):
    """Write x with stride `step` to an address, in numbers of `bytes` bytes. Numbers of 8 bits have a scale for each
    span of x; scales are written to address `scales`, with stride `step`, too."""
    if bytes == 4:
        out = floats(address, step * (x.shape[0] - 1) + 1)
        for i in range(x.shape[0]):
            out[step * i] = x[i]
    elif bytes == 2:
        for i in range(x.shape[0]):
            put_half(address + 2 * step * i, x[i])
    else:
        for i in range(0, x.shape[0], SPAN):
            _quantise(x[i : i + SPAN], address + step * i, step, scales + 2 * step * (i // SPAN))


@kernel()
def _quantise(x, address, step, scale_address):
    """Write x as int8 times a scale. If x is not finite, the integers are 0 and the scale is not finite, so products
    are NaN."""
    put_half(scale_address, max_abs(x) / np.float32(127))
    scale, most = half(scale_address), np.float32(127)
    out, usable = small(address, step * (x.shape[0] - 1) + 1), 0 < scale < np.inf
    for i in range(x.shape[0]):
        number = np.rint(x[i] / scale) if usable else np.float32(0)
        out[step * i] = np.int8(min(max(number, -most), most))


@kernel()
def _norm_heads(layer, row, heads, weight, eps):
    """Apply the RMS norm to `heads` heads of a row: to each head, or with `wide_norm` to all heads together."""
    size, count = layer.size, heads
    if layer.wide_norm:
        size, count = layer.size * heads, 1
    for h in range(count):
        vector = row[h * size : (h + 1) * size]
        rms_norm(vector, floats(weight, size), eps, vector)


@kernel()
def _norm_queries_and_keys(layer, row, eps):
    _norm_heads(layer, row, layer.heads, layer.q_norm, eps)
    if layer.writes:
        keys = row[layer.heads * layer.size :]
        _norm_heads(layer, keys, layer.kv_heads, layer.k_norm, eps)


@kernel()
def _join_queries(job, layer, r, row):
    """Fill the queries of row r in latent attention: for each head its rotated dimensions, then its plain dimensions
    times k_up (see `latent`)."""
    part, size = layer.latent, layer.size
    each = part.rotated + part.plain
    queries = floats(job.queries + 4 * job.queries_stride * r, layer.heads * each)
    for h in range(layer.heads):
        up = floats(job.up + 4 * part.rank * (h * job.count + r), part.rank)
        for i in range(part.rotated):
            row[h * size + i] = queries[h * each + i]
        for i in range(part.rank):
            row[h * size + part.rotated + i] = up[i]


@kernel()
def write_kv(job, unit, thread):
    """Unit of work: `each` rows. Normalise and rotate query and key heads in place; write keys and values to the
    cache."""
    layer = carray(pointer(job.layer), (1,), LAYER)[0]
    size, heads, kv_heads = layer.size, layer.heads, layer.kv_heads if layer.writes else 0
    rows, rotated = rows_at(job.rows, job.count), heads + kv_heads
    tables = integers(job.positions, layer.rotary + layer.growth)
    for r in range(unit * job.each, min((unit + 1) * job.each, job.count)):
        row, at = floats(job.qkv + 4 * job.stride * r, (rotated + kv_heads) * size), rows[r]
        if layer.latent.rank:
            _join_queries(job, layer, r, row)
        if layer.key_is_value:
            for i in range(kv_heads * size):
                row[rotated * size + i] = row[heads * size + i]
        if layer.value_norm:
            for h in range(rotated, rotated + kv_heads):
                vector = row[h * size : (h + 1) * size]
                rms_norm(vector, floats(layer.value_norm, size), job.eps, vector)
        if layer.q_norm and not layer.late_norm:
            _norm_queries_and_keys(layer, row, job.eps)
        if layer.rotary:
            turned = layer.rotated
            cos_sin = floats(tables[layer.rotary - 1] + 4 * turned * at.position, turned)
            rotate(row, rotated, size, cos_sin[: turned // 2], cos_sin[turned // 2 :])
        if layer.q_norm and layer.late_norm:
            _norm_queries_and_keys(layer, row, job.eps)
        if layer.growth:
            factor = floats(tables[layer.growth - 1], at.position + 1)[at.position]
            for i in range(heads * size):
                row[i] *= factor
        block = integers(job.tables + 8 * job.table_stride * at.sequence, job.table_stride)[at.slot // job.slots]
        slot = at.slot % job.slots
        for g in range(kv_heads):
            start = (block * kv_heads + g) * head_bytes(job, size)
            scales = start + job.slots * size
            key, value = row[(heads + g) * size :], row[(rotated + g) * size :]
            keys, values = job.keys + start + job.bytes * slot, job.values + start + job.bytes * slot * size
            _copy(key[:size], keys, job.slots, job.bytes, job.keys + scales + 2 * slot)
            _copy(value[:size], values, 1, job.bytes, job.values + scales + 2 * slot * spans_of(size))


# --- the slots that a row sees ---------------------------------------------------------------------------------------


@kernel()
def _window_at(job, position):
    """Number of positions, up to its own, that a row at `position` sees; 0: all. A negative `job.window` is minus the
    length of chunks."""
    return job.window if job.window >= 0 else position % -job.window + 1


@kernel()
def _window_start(job, rows, r):
    """The first slot from earlier passes in the window of row r. `_sees` decides about the slots of this pass."""
    at = rows[r]
    first = rows[r - (at.slot - at.past)].position  # first position of this pass; slots of a head may begin later
    window = _window_at(job, at.position)
    return max(0, min(at.past, at.past - first + at.position + 1 - window)) if window > 0 else 0


@kernel()
def _sees(job, rows, r, j):
    """Return whether row r sees the j-th row of its sequence in this pass. The window is in positions, because the
    nodes of a tree have more slots than positions."""
    at = rows[r]
    if j < job.hidden_stride and carray(pointer(job.hidden + job.hidden_stride * r), (j + 1,), np.bool_)[j]:
        return False
    if job.causal and j > at.slot - at.past:
        return False
    same, window = r - (at.slot - at.past), _window_at(job, at.position)  # the first row of this sequence
    return window == 0 or abs(at.position - rows[same + j].position) < window


@kernel()
def _all_seen(job, rows, r):
    """Return whether row r sees at least every row of its sequence up to row r."""
    at, window = rows[r], _window_at(job, rows[r].position)
    return job.hidden_stride == 0 and job.causal == 0 and (window == 0 or at.position - at.past < window)


@kernel()
def _weights_of(job, scores, head):
    """Replace the visible scores of a query head by attention weights."""
    scale, sink = job.scale, np.float32(-np.inf)
    if job.cap > 0:
        cap_in_place(scores, scale, job.cap)
        scale = np.float32(1)
    if job.sinks:
        sink = floats(job.sinks, head + 1)[head]
    softmax_in_place(scores, scale, sink)


@kernel()
def _softmax_row(job, rows, r, head, scores):
    """Replace the scores of row r over slots [0, length) by attention weights: the softmax over the slots that the row
    sees, and 0 for hidden slots."""
    at = rows[r]
    begin = _window_start(job, rows, r)
    if _all_seen(job, rows, r):
        _weights_of(job, scores[begin : at.length], head)
    else:
        end = at.past
        for j in range(at.length - at.past):  # move the visible scores next to each other ...
            if _sees(job, rows, r, j):
                scores[end] = scores[at.past + j]
                end += 1
        _weights_of(job, scores[begin:end], head)
        for j in range(at.length - at.past - 1, -1, -1):  # ... and the weights back to their slots
            if _sees(job, rows, r, j):
                end -= 1
                scores[at.past + j] = scores[end]
            else:
                scores[at.past + j] = 0
    for t in range(begin):
        scores[t] = 0
    for t in range(at.length, scores.shape[0]):
        scores[t] = 0


# --- groups: query heads of one key/value head, from rows of one sequence --------------------------------------------


@kernel()
def parts_of(heads, kv_heads):
    """Number of tiles for the query heads of one key/value head."""
    return (heads // kv_heads + MOST_HEADS - 1) // MOST_HEADS


@kernel()
def _group(job, group):
    """Describe a group of query heads: (first and end index of its rows in `active`, key/value head, first query head,
    number of query heads)."""
    parts, each = parts_of(job.heads, job.kv_heads), job.heads // job.kv_heads
    bundle, g, skipped = group // (job.kv_heads * parts), group // parts % job.kv_heads, group % parts * MOST_HEADS
    starts = integers(job.starts + 8 * bundle, 2)
    return starts[0], starts[1], g, g * each + skipped, min(MOST_HEADS, each - skipped)


@kernel()
def _slot_range(job, rows, active, first, stop):
    """(block table, first slot, end) of the slots that the rows active[first:stop] of one sequence see. The first slot
    is the start of a block."""
    longest, low = 0, rows[active[first]].length
    for a in range(first, stop):
        longest = max(longest, rows[active[a]].length)
        low = min(low, _window_start(job, rows, active[a]))
    blocks = integers(job.tables + 8 * job.table_stride * rows[active[first]].sequence, job.table_stride)
    return blocks, low // job.slots * job.slots, longest


@kernel()
def _score(job, group, scores, packed, low, high):
    """Compute scores [heads of the group, width] for slots low..high-1, in whole blocks."""
    first, stop, g, head, heads = _group(job, group)
    active, rows = integers(job.active, stop), rows_at(job.rows, 1 << 40)
    size, slots, count = job.size, job.slots, (stop - first) * heads
    blocks, begin, longest = _slot_range(job, rows, active, first, stop)
    for j in range(count):
        row = floats(job.q + 4 * (job.stride * active[first + j // heads] + (head + j % heads) * size), size)
        for i in range(size):
            packed[i * count + j] = row[i]
    queries, bytes = address_of(packed), head_bytes(job, job.size)
    for t in range(max(low, begin), min(high, longest), slots):
        keys = job.keys + (blocks[t // slots] * job.kv_heads + g) * bytes
        scales = keys + size * slots
        call(job.scores, (keys, scales, queries, scores + 4 * t, size, slots, PANEL, 0, job.width, slots, count))


@kernel()
def _softmax(job, group, scores, low, high):
    """Replace the scores of heads low..high-1 of a group by attention weights."""
    first, stop, _g, head, heads = _group(job, group)
    active, rows = integers(job.active, stop), rows_at(job.rows, 1 << 40)
    _blocks, _begins, longest = _slot_range(job, rows, active, first, stop)
    width = (longest + job.slots - 1) // job.slots * job.slots
    for j in range(low, min(high, (stop - first) * heads)):
        row = floats(scores + 4 * job.width * j, width)
        _softmax_row(job, rows, active[first + j // heads], head + j % heads, row)


@kernel()
def _values_at(job, block, g, slot, low):
    """Addresses of column `low` of a slot's values, and of the column's scale."""
    head = job.values + (block * job.kv_heads + g) * head_bytes(job, job.size)
    scales = head + job.slots * job.size + 2 * (slot * spans_of(job.size) + low // SPAN)
    return head + job.bytes * (slot * job.size + low), scales


@kernel()
def _visible_sum(job, rows, r, g, weights, sums, low):
    """sums = weighted sum of the values that row r sees, for columns low, low + 1, ... of key/value head g, in the
    order of slots. `_weighted_sum` computes the same if all hidden values are finite. This is slow, and is used only
    for rows whose sum is not finite."""
    at, size, slots, wide = rows[r], job.size, job.slots, sums.shape[0]
    blocks = integers(job.tables + 8 * job.table_stride * at.sequence, job.table_stride)
    every = _all_seen(job, rows, r)
    for i in range(wide):
        sums[i] = 0
    for t in range(_window_start(job, rows, r), at.length):
        if t < at.past or every or _sees(job, rows, r, t - at.past):
            values, scales = _values_at(job, blocks[t // slots], g, t % slots, low)
            call(job.mix, (values, scales, weights + 4 * t, address_of(sums), 1, size, PANEL, job.width, wide, wide, 1))


@kernel()
def _weighted_sum(job, group, scores, mixed, low, high):
    """job.out = weighted sum of columns low..high-1 of the values. mixed: scratch for MOST_HEADS * D floats."""
    first, stop, g, head, heads = _group(job, group)
    active, rows = integers(job.active, stop), rows_at(job.rows, 1 << 40)
    size, slots, count, wide = job.size, job.slots, (stop - first) * heads, high - low
    blocks, begin, longest = _slot_range(job, rows, active, first, stop)
    for i in range(count * wide):
        mixed[i] = 0
    sums = address_of(mixed)
    for t in range(begin, longest, slots):
        values, scales = _values_at(job, blocks[t // slots], g, NOTHING, low)
        n = min(slots, longest - t)
        call(job.mix, (values, scales, scores + 4 * t, sums, n, size, PANEL, job.width, wide, wide, count))
    for j in range(count):
        output = mixed[j * wide : (j + 1) * wide]
        if not is_finite(output):
            _visible_sum(job, rows, active[first + j // heads], g, scores + 4 * job.width * j, output, low)
        number = (head + j % heads) * size + low  # index of the first output
        out = floats(job.out + 4 * (job.out_stride * (first + j // heads) + number), wide)
        for i in range(wide):
            out[i] = output[i]
        if job.gate:
            first_gate = number // job.gate_each
            gates = floats(job.gate + 4 * (job.stride * active[first + j // heads] + first_gate), wide)
            for i in range(wide):
                out[i] *= sigmoid(gates[i // job.gate_each])


# --- units of work ---------------------------------------------------------------------------------------------------


@kernel()
def attend(job, unit, thread):
    """Unit of work: compute attention for a group of query heads."""
    room = job.scratch + thread * job.scratch_bytes
    queries, scores = floats(room, MOST_HEADS * job.size), room + 4 * MOST_HEADS * job.size
    _score(job, unit, scores, queries, NOTHING, job.width)
    _softmax(job, unit, scores, NOTHING, ALL)
    _weighted_sum(job, unit, scores, queries, NOTHING, job.size)


@kernel()
def attend_scores(job, unit, thread):
    """Unit of work: compute the scores of a group over one of `pieces` parts of the context."""
    group, piece = unit // job.pieces, unit % job.pieces
    scores = job.scratch + group * job.scratch_bytes + 4 * MOST_HEADS * job.size
    blocks = job.width // job.slots
    low, high = blocks * piece // job.pieces * job.slots, blocks * (piece + 1) // job.pieces * job.slots
    _score(job, group, scores, np.empty(MOST_HEADS * job.size, np.float32), low, high)


@kernel()
def attend_weights(job, unit, thread):
    """Unit of work: compute the softmax for one query head of a group."""
    group, j = unit // MOST_HEADS, unit % MOST_HEADS
    _softmax(job, group, job.scratch + group * job.scratch_bytes + 4 * MOST_HEADS * job.size, j, j + 1)


@kernel()
def attend_values(job, unit, thread):
    """Unit of work: compute PANEL columns of the output of a group."""
    panels = job.size // PANEL
    group, panel = unit // panels, unit % panels
    scores = job.scratch + group * job.scratch_bytes + 4 * MOST_HEADS * job.size
    _weighted_sum(job, group, scores, np.empty(MOST_HEADS * PANEL, np.float32), panel * PANEL, (panel + 1) * PANEL)
