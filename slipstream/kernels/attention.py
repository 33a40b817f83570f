"""Attention of single rows over a paged cache, float32."""

from __future__ import annotations

import numpy as np
from numba import prange

from slipstream.kernels.arithmetic import exp, greatest
from slipstream.kernels.compiled import FAST, kernel
from slipstream.kernels.tiles import MOST_ROWS, PANEL, grab, outer, tiles_of

WORTH_SHARING = 1024
"""Scores from which on threads are worth their waking."""

HIDDEN = np.float32(-1e30)
"""Score of a slot that a row does not see: its weight is below what a float32 sum can notice."""


_scores, _mixed = outer(packed=True, more=False, widest=2), outer(packed=False, more=True, widest=2, odd=True)


@kernel()
def _begin(rows, r, window):
    """The first slot that may be in the window of row r; of those of this pass, `_hide` tells."""
    return max(0, min(rows.past[r], rows.position[r] + 1 - window)) if window > 0 else 0


@kernel()
def _hide(scores, rows, r, window):
    """From row r hide those of the same pass that are on another branch or have left the window, which counts
    positions: among the nodes of a tree, slots are further apart."""
    past, hidden = rows.past[r], rows.hidden[r]
    count = rows.length[r] - past
    for j in range(min(hidden.shape[0], count)):
        if hidden[j]:
            scores[past + j] = HIDDEN
    if window > 0 and rows.position[r] - past >= window:
        same = r - (rows.slots[r] - past)  # the first row of this sequence
        for j in range(count):
            if rows.position[r] - rows.position[same + j] >= window:
                scores[past + j] = HIDDEN


@kernel(fastmath=FAST)
def _softmax(scores, scale):
    """In place, the softmax of scores * scale."""
    top, total = greatest(scores, scores.shape[0]), np.float32(0)
    for t in range(scores.shape[0]):
        scores[t] = exp((scores[t] - top) * scale)
        total += scores[t]
    for t in range(scores.shape[0]):
        scores[t] /= total


@kernel()
def _attend(q, keys, values, table, g, rows, place, first, stop, head, heads, window, out):
    """`heads` query heads from `head` on, which all look at the key/value head g, of rows place[first..stop-1] of one
    sequence, whose blocks are table [..]: all of them at once, for what a block costs is its keys and values."""
    kv_heads, block, size = values.shape[1:]
    count, longest, low = (stop - first) * heads, 0, rows.length[place[first]]
    for a in range(first, stop):
        longest, low = max(longest, rows.length[place[a]]), min(low, _begin(rows, place[a], window))
    low = low // block * block
    width = (longest + block - 1) // block * block
    packed, scores = np.empty(size * count, np.float32), np.empty((count, width), np.float32)
    for j in range(count):
        row = q[place[first + j // heads]]
        for i in range(size):
            packed[i * count + j] = row[(head + j % heads) * size + i]
    for t in range(low, longest, block):
        at = (table[t // block] * kv_heads + g) * size * block
        _scores(keys, at, block, PANEL, packed, 0, 0, size, scores, t, width, count, block)
    for j in range(count):
        r = place[first + j // heads]
        begin, end = _begin(rows, r, window), rows.length[r]
        _hide(scores[j], rows, r, window)
        _softmax(scores[j, begin:end], np.float32(size) ** np.float32(-0.5))
        for t in range(low, begin):
            scores[j, t] = 0
        for t in range(end, width):
            scores[j, t] = 0
    mixed = np.zeros((count, size), np.float32)
    for t in range(low, longest, block):
        at, slots = (table[t // block] * kv_heads + g) * block * size, min(block, longest - t)
        _mixed(values, at, size, PANEL, scores, t, width, slots, mixed, 0, size, count, size)
    for j in range(count):
        to = (head + j % heads) * size
        for i in range(size):
            out[first + j // heads, to + i] = mixed[j, i]


@kernel()
def _one(unit, q, keys, values, tables, rows, place, starts, heads, window, out):
    """Unit of work: the query heads of one key/value head, or MOST_ROWS of them, of one group of rows."""
    kv_heads = values.shape[1]
    each = heads // kv_heads  # query heads of a key/value head
    parts = tiles_of(each)
    group, g, part = unit // (kv_heads * parts), unit // parts % kv_heads, unit % parts
    first, stop, skipped = starts[group], starts[group + 1], part * MOST_ROWS
    table, count = tables[rows.sequence[place[first]]], min(MOST_ROWS, each - skipped)
    _attend(q, keys, values, table, g, rows, place, first, stop, g * each + skipped, count, window, out)


@kernel(parallel=True)
def _shared(units, q, keys, values, tables, rows, place, starts, heads, window, out, threads):
    taken = np.zeros(1, np.int64)
    for _ in prange(threads):
        unit = grab(taken)
        while unit < units:  # the rows of a prompt look at ever more slots
            _one(unit, q, keys, values, tables, rows, place, starts, heads, window, out)
            unit = grab(taken)


@kernel()
def attend(q, keys, values, tables, rows, place, heads, window, out, threads):
    """out[a] = attention of row place[a], whose query heads q[place[a]] begins with: q [R, >= H * D], out [A, H * D].

    keys [blocks, Hk, D, slots], values [blocks, Hk, slots, D], tables [B, blocks]: the paged cache of this layer;
    rows: `decoder.Rows`; window: 0, or how many positions a row looks at, its own being the last. D is a multiple
    of PANEL, the slots of a block of two.
    """
    kv_heads, longest, groups = values.shape[1], 0, 0
    each = heads // kv_heads
    starts = np.empty(place.shape[0] + 1, np.int64)  # of groups of rows of one sequence, whose query heads fill a tile
    for a in range(place.shape[0]):
        longest = max(longest, rows.length[place[a]])
        full = groups > 0 and (a + 1 - starts[groups - 1]) * each > MOST_ROWS
        if a == 0 or full or rows.sequence[place[a]] != rows.sequence[place[a - 1]]:
            starts[groups] = a
            groups += 1
    starts[groups] = place.shape[0]
    units = groups * kv_heads * tiles_of(each)
    if threads > 1 and place.shape[0] * heads * longest > WORTH_SHARING:
        _shared(units, q, keys, values, tables, rows, place, starts, heads, window, out, threads)
        return
    for unit in range(units):
        _one(unit, q, keys, values, tables, rows, place, starts, heads, window, out)
