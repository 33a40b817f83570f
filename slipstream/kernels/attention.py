"""Attention of single rows over a paged cache, float32."""

from __future__ import annotations

import numpy as np
from numba import prange

from slipstream.kernels.arithmetic import exp, greatest
from slipstream.kernels.compiled import FAST, kernel
from slipstream.kernels.tiles import MOST_ROWS, PANEL, grab, outer

WORTH_SHARING = 1024
"""Scores from which on threads are worth their waking."""

HIDDEN = np.float32(-1e30)
"""Score of a slot that a row does not see: its weight is below what a float32 sum can notice."""


_scores, _mixed = outer(more=False), outer(more=True)


@kernel(fastmath=FAST)
def _group(q, first, heads, keys, values, g, table, length, past, hidden, out, to):
    """`heads` query heads of one row, which begin at the value `first` of q, over the first `length` slots of its
    sequence, whose blocks are table [..], in the key/value head g; slot past + j is not seen where hidden[j]. Their
    results go to the value `to` of out and what follows."""
    kv_heads, block, size = values.shape[1:]
    width = (length + block - 1) // block * block
    scores, scale = np.empty((heads, width), np.float32), np.float32(size) ** np.float32(-0.5)
    for t in range(0, length, block):
        at = (table[t // block] * kv_heads + g) * size * block
        _scores(keys, at, block, PANEL, q, first, size, size, scores, t, width, heads, block)
    flat = out.reshape(-1)
    for h in range(heads):
        own = scores[h]
        for j in range(min(hidden.shape[0], length - past)):
            if hidden[j]:
                own[past + j] = HIDDEN
        top, total = greatest(own, length), np.float32(0)
        for t in range(length):
            own[t] = exp((own[t] - top) * scale)
            total += own[t]
        for t in range(length):
            own[t] /= total
        for i in range(size):
            flat[to + h * size + i] = 0
    for t in range(0, length, block):
        at, count = (table[t // block] * kv_heads + g) * block * size, min(block, length - t)
        _mixed(values, at, size, PANEL, scores, t, width, count, out, to, size, heads, size)


@kernel()
def _one(unit, q, keys, values, tables, rows, place, heads, out):
    """Unit of work: the query heads of one key/value head, or MOST_ROWS of them, of one of the rows `place`."""
    kv_heads, size = values.shape[1], values.shape[3]
    each = heads // kv_heads  # query heads of a key/value head
    parts = (each + MOST_ROWS - 1) // MOST_ROWS
    a, g, part = unit // (kv_heads * parts), unit // parts % kv_heads, unit % parts
    h, r = g * each + part * MOST_ROWS, place[a]
    count = min(MOST_ROWS, each - part * MOST_ROWS)
    table, hidden = tables[rows.sequence[r]], rows.hidden[r]
    first, to = r * q.shape[1] + h * size, (a * heads + h) * size
    _group(q, first, count, keys, values, g, table, rows.length[r], rows.past[r], hidden, out, to)


@kernel(parallel=True)
def _shared(units, q, keys, values, tables, rows, place, heads, out, threads):
    taken = np.zeros(1, np.int64)
    for _ in prange(threads):
        unit = grab(taken)
        while unit < units:  # the rows of a prompt look at ever more slots
            _one(unit, q, keys, values, tables, rows, place, heads, out)
            unit = grab(taken)


@kernel()
def attend(q, keys, values, tables, rows, place, heads, out, threads):
    """out[a] = attention of row place[a], whose query heads q[place[a]] begins with: q [R, >= H * D], out [A, H * D].

    keys [blocks, Hk, D, slots], values [blocks, Hk, slots, D], tables [B, blocks]: the paged cache of this layer;
    rows: `decoder.Rows`. D and the slots of a block are multiples of PANEL.
    """
    kv_heads, longest = values.shape[1], 0
    units = place.shape[0] * kv_heads * ((heads // kv_heads + MOST_ROWS - 1) // MOST_ROWS)
    for a in range(place.shape[0]):
        longest = max(longest, rows.length[place[a]])
    if threads > 1 and place.shape[0] * heads * longest > WORTH_SHARING:
        _shared(units, q, keys, values, tables, rows, place, heads, out, threads)
        return
    for unit in range(units):
        _one(unit, q, keys, values, tables, rows, place, heads, out)
