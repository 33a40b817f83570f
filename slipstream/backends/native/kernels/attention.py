"""Attention of single rows over the paged KV cache, in float32.

Every sum runs over the *visible* slots in order of position, so a row is bitwise the same alone, in a chain, and in a
tree whose branches it does not see: scores are dots over D, each by itself; the softmax is taken over the visible
scores, laid side by side; and in the weighted sum of values the hidden ones count exactly 0.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from slipstream.backends.native.kernels.arithmetic import rms_norm, rotate, soften
from slipstream.backends.native.kernels.compiled import kernel
from slipstream.backends.native.kernels.memory import address_of, call, floats, integers, pointer, put_half
from slipstream.backends.native.kernels.records import NOTHING, ROW
from slipstream.backends.native.kernels.tiles import FLOAT32, PANEL

MOST_HEADS = FLOAT32.most_rows
"""Query heads of one key/value head, over one or several rows, that are worked on together."""

ALL = np.int64(MOST_HEADS)


@kernel()
def rows_at(address, count):
    """ROW [count] at an address."""
    return carray(pointer(address), (count,), ROW)


@kernel()
def _copy(x, address, step, narrow):
    """Write x to every `step`-th number from an address on, as float16 if `narrow`."""
    if narrow:
        for i in range(x.shape[0]):
            put_half(address + 2 * step * i, x[i])
        return
    out = floats(address, step * (x.shape[0] - 1) + 1)
    for i in range(x.shape[0]):
        out[step * i] = x[i]


@kernel()
def place(job, unit, thread):
    """Unit of work: `each` rows. Normalise and rotate query and key heads in place, write keys and values."""
    size, heads, kv_heads = job.size, job.heads, job.kv_heads
    rows, both = rows_at(job.rows, job.count), heads + kv_heads
    bytes = 2 if job.half else 4
    for r in range(unit * job.each, min((unit + 1) * job.each, job.count)):
        row, at = floats(job.qkv + 4 * job.stride * r, (both + kv_heads) * size), rows[r]
        if job.q_norm:
            for h in range(both):
                own = row[h * size : (h + 1) * size]
                rms_norm(own, floats(job.q_norm if h < heads else job.k_norm, size), job.eps, own)
        if job.rotary:
            turn = floats(job.turns + 4 * size * at.position, size)
            rotate(row, both, size, turn[: size // 2], turn[size // 2 :])
        block = integers(job.tables + 8 * job.table_stride * at.sequence, job.table_stride)[at.slot // job.slots]
        slot = at.slot % job.slots
        for g in range(kv_heads):
            start = (block * kv_heads + g) * size * job.slots
            key, value = row[(heads + g) * size :], row[(both + g) * size :]
            _copy(key[:size], job.keys + bytes * (start + slot), job.slots, job.half)
            _copy(value[:size], job.values + bytes * (start + slot * size), 1, job.half)


# --- the slots that a row sees ---------------------------------------------------------------------------------------


@kernel()
def _begin(at, window):
    """The first slot that may be in the window of a row; of those of this pass, `_sees` tells."""
    return max(0, min(at.past, at.position + 1 - window)) if window > 0 else 0


@kernel()
def _sees(job, rows, r, j):
    """Whether row r sees the j-th row of its sequence in this pass. The window counts positions: among the nodes of a
    tree, slots are further apart."""
    at = rows[r]
    if j < job.hidden_stride and carray(pointer(job.hidden + job.hidden_stride * r), (j + 1,), np.bool_)[j]:
        return False
    same = r - (at.slot - at.past)  # the first row of this sequence
    return job.window == 0 or at.position - rows[same + j].position < job.window


@kernel()
def _all_seen(job, rows, r):
    """Whether row r sees every row of its sequence up to its own."""
    at = rows[r]
    return job.hidden_stride == 0 and (job.window == 0 or at.position - at.past < job.window)


@kernel()
def _soften_row(job, rows, r, scores):
    """Scores of row r over slots [0, length) -> its weights of these slots: the softmax over those that it sees, 0 for
    the others."""
    at = rows[r]
    begin, scale = _begin(at, job.window), np.float32(job.size) ** np.float32(-0.5)
    if _all_seen(job, rows, r):
        soften(scores[begin : at.length], scale)
    else:
        end = at.past
        for j in range(at.length - at.past):  # side by side ...
            if _sees(job, rows, r, j):
                scores[end] = scores[at.past + j]
                end += 1
        soften(scores[begin:end], scale)
        for j in range(at.length - at.past - 1, -1, -1):  # ... and back to their slots
            if _sees(job, rows, r, j):
                end -= 1
                scores[at.past + j] = scores[end]
            else:
                scores[at.past + j] = 0
    for t in range(begin):
        scores[t] = 0
    for t in range(at.length, scores.shape[0]):
        scores[t] = 0


# --- the query heads of one key/value head, of some rows of one sequence ---------------------------------------------


@kernel()
def parts_of(heads, kv_heads):
    """How many tiles the query heads of one key/value head fill."""
    return (heads // kv_heads + MOST_HEADS - 1) // MOST_HEADS


@kernel()
def _group(job, group):
    """Of a group of query heads: (first and last row in `place`, key/value head, first query head, heads)."""
    parts, each = parts_of(job.heads, job.kv_heads), job.heads // job.kv_heads
    bundle, g, skipped = group // (job.kv_heads * parts), group // parts % job.kv_heads, group % parts * MOST_HEADS
    starts = integers(job.starts + 8 * bundle, 2)
    return starts[0], starts[1], g, g * each + skipped, min(MOST_HEADS, each - skipped)


@kernel()
def _reach(job, rows, place, first, stop):
    """Of some rows: their block table, the first slot that one of them sees (at the start of a block), and the end."""
    longest, low = 0, rows[place[first]].length
    for a in range(first, stop):
        longest = max(longest, rows[place[a]].length)
        low = min(low, _begin(rows[place[a]], job.window))
    blocks = integers(job.tables + 8 * job.table_stride * rows[place[first]].sequence, job.table_stride)
    return blocks, low // job.slots * job.slots, longest


@kernel()
def _score(job, group, scores, packed, low, high):
    """scores [heads of the group, width] at slots low..high-1, which are multiples of a block."""
    first, stop, g, head, heads = _group(job, group)
    place, rows = integers(job.place, stop), rows_at(job.rows, 1 << 40)
    size, slots, count = job.size, job.slots, (stop - first) * heads
    blocks, begin, longest = _reach(job, rows, place, first, stop)
    for j in range(count):
        row = floats(job.q + 4 * (job.stride * place[first + j // heads] + (head + j % heads) * size), size)
        for i in range(size):
            packed[i * count + j] = row[i]
    queries, bytes = address_of(packed), 2 if job.half else 4
    for t in range(max(low, begin), min(high, longest), slots):
        keys = job.keys + bytes * (blocks[t // slots] * job.kv_heads + g) * size * slots
        call(job.scores, (keys, queries, scores + 4 * t, size, slots, PANEL, 0, job.width, slots, count))


@kernel()
def _soften(job, group, scores, low, high):
    """The weights of heads low..high-1 of a group."""
    first, stop, _g, _head, heads = _group(job, group)
    place, rows = integers(job.place, stop), rows_at(job.rows, 1 << 40)
    _blocks, _begins, longest = _reach(job, rows, place, first, stop)
    width = (longest + job.slots - 1) // job.slots * job.slots
    for j in range(low, min(high, (stop - first) * heads)):
        _soften_row(job, rows, place[first + j // heads], floats(scores + 4 * job.width * j, width))


@kernel()
def _mix(job, group, scores, mixed, low, high):
    """Columns low..high-1 of the values, summed by their weights, into `out`; mixed: room for MOST_HEADS * D."""
    first, stop, g, head, heads = _group(job, group)
    place, rows = integers(job.place, stop), rows_at(job.rows, 1 << 40)
    size, slots, count, wide = job.size, job.slots, (stop - first) * heads, high - low
    blocks, begin, longest = _reach(job, rows, place, first, stop)
    for i in range(count * wide):
        mixed[i] = 0
    sums, bytes = address_of(mixed), 2 if job.half else 4
    for t in range(begin, longest, slots):
        values = job.values + bytes * ((blocks[t // slots] * job.kv_heads + g) * slots * size + low)
        n = min(slots, longest - t)
        call(job.mix, (values, scores + 4 * t, sums, n, size, PANEL, job.width, wide, wide, count))
    for j in range(count):
        out = floats(job.out + 4 * (job.out_stride * (first + j // heads) + (head + j % heads) * size + low), wide)
        for i in range(wide):
            out[i] = mixed[j * wide + i]


# --- units of work ---------------------------------------------------------------------------------------------------


@kernel()
def room_of(size, width):
    """Floats that one group needs: packed queries or mixed values, then scores."""
    return MOST_HEADS * (size + width)


@kernel()
def attend(job, unit, thread):
    """Unit of work: a group of query heads from its scores to its output."""
    room = job.scratch + thread * job.scratch_bytes
    own, scores = floats(room, MOST_HEADS * job.size), room + 4 * MOST_HEADS * job.size
    _score(job, unit, scores, own, NOTHING, job.width)
    _soften(job, unit, scores, NOTHING, ALL)
    _mix(job, unit, scores, own, NOTHING, job.size)


@kernel()
def attend_scores(job, unit, thread):
    """Unit of work: the scores of a group over one of `pieces` stretches of the context."""
    group, piece = unit // job.pieces, unit % job.pieces
    scores = job.scratch + group * job.scratch_bytes + 4 * MOST_HEADS * job.size
    blocks = job.width // job.slots
    low, high = blocks * piece // job.pieces * job.slots, blocks * (piece + 1) // job.pieces * job.slots
    _score(job, group, scores, np.empty(MOST_HEADS * job.size, np.float32), low, high)


@kernel()
def attend_weights(job, unit, thread):
    """Unit of work: the softmax of one query head of a group."""
    group, j = unit // MOST_HEADS, unit % MOST_HEADS
    _soften(job, group, job.scratch + group * job.scratch_bytes + 4 * MOST_HEADS * job.size, j, j + 1)


@kernel()
def attend_values(job, unit, thread):
    """Unit of work: PANEL columns of the output of a group."""
    panels = job.size // PANEL
    group, panel = unit // panels, unit % panels
    scores = job.scratch + group * job.scratch_bytes + 4 * MOST_HEADS * job.size
    _mix(job, group, scores, np.empty(MOST_HEADS * PANEL, np.float32), panel * PANEL, (panel + 1) * PANEL)
