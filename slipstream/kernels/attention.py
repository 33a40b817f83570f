"""Attention of single rows over a paged cache, float32."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from slipstream.kernels.arithmetic import FAST, OPTIONS, exp, greatest
from slipstream.kernels.tiles import PANEL, grab, weighted

BLOCK = 32
"""Slots in a block of the KV cache."""

WORTH_SHARING = 1024
"""Scores from which on threads are worth their waking."""

HIDDEN = np.float32(-1e30)
"""Score of a slot that a row does not see: its weight is below what a float32 sum can notice."""


_weighted_64, _weighted_16 = weighted(64), weighted(PANEL)


@njit(fastmath=FAST, **OPTIONS)
def _score(q, keys, count, scores):
    """scores[t] = q . keys[t] for the first `count` of keys [32, D]."""
    size = q.shape[0]
    t = 0
    while t + 4 <= count:  # four at a time: a row of q is loaded once for them
        a = b = c = d = np.float32(0)
        for i in range(size):
            a += q[i] * keys[t, i]
            b += q[i] * keys[t + 1, i]
            c += q[i] * keys[t + 2, i]
            d += q[i] * keys[t + 3, i]
        scores[t], scores[t + 1], scores[t + 2], scores[t + 3] = a, b, c, d
        t += 4
    while t < count:
        a = np.float32(0)
        for i in range(size):
            a += q[i] * keys[t, i]
        scores[t] = a
        t += 1


@njit(fastmath=FAST, **OPTIONS)
def _head(q, keys, values, g, table, length, past, hidden, out):
    """One head q [D] of one row over the first `length` slots of its sequence, whose blocks are table [..], in the
    key/value head g; slot past + j is not seen where hidden[j]. out [D]."""
    scores, scale = np.empty(length, np.float32), np.float32(q.shape[0]) ** np.float32(-0.5)
    for t in range(0, length, BLOCK):
        _score(q, keys[table[t // BLOCK], g], min(BLOCK, length - t), scores[t:])
    for j in range(hidden.shape[0]):
        if hidden[j] and past + j < length:
            scores[past + j] = HIDDEN
    top = greatest(scores, length)
    total = np.float32(0)
    for t in range(length):
        scores[t] = exp((scores[t] - top) * scale)
        total += scores[t]
    size = out.shape[0]
    for i in range(size):
        out[i] = 0
    for t in range(0, length, BLOCK):
        at, count = (table[t // BLOCK] * values.shape[1] + g) * BLOCK * size, min(BLOCK, length - t)
        if size % 64 == 0:
            for i in range(0, size, 64):
                _weighted_64(scores, t, values, at + i, size, count, out, i)
        else:
            for i in range(0, size, PANEL):
                _weighted_16(scores, t, values, at + i, size, count, out, i)
    for i in range(size):
        out[i] /= total


@njit(**OPTIONS)
def _one(unit, q, keys, values, tables, rows, place, heads, out):
    """Head `unit` of all heads of the rows `place`."""
    size = keys.shape[3]
    a, h = unit // heads, unit % heads
    r, g = place[a], h // (heads // keys.shape[1])
    table, hidden = tables[rows.sequence[r]], rows.hidden[r]
    own, mixed = q[r, h * size : (h + 1) * size], out[a, h * size : (h + 1) * size]
    _head(own, keys, values, g, table, rows.length[r], rows.past[r], hidden, mixed)


@njit(parallel=True, **OPTIONS)
def _shared(q, keys, values, tables, rows, place, heads, out, threads):
    units, taken = place.shape[0] * heads, np.zeros(1, np.int64)
    for _ in prange(threads):
        unit = grab(taken)
        while unit < units:  # the rows of a prompt look at ever more slots
            _one(unit, q, keys, values, tables, rows, place, heads, out)
            unit = grab(taken)


@njit(**OPTIONS)
def attend(q, keys, values, tables, rows, place, heads, out, threads):
    """out[a] = attention of row place[a], whose query heads q[place[a]] begins with: q [R, >= H * D], out [A, H * D].

    keys, values [blocks, Hk, BLOCK, D], tables [B, blocks]: the paged cache of this layer; rows: `decoder.Rows`.
    """
    units, longest = place.shape[0] * heads, 0
    for a in range(place.shape[0]):
        longest = max(longest, rows.length[place[a]])
    if threads > 1 and units * longest > WORTH_SHARING:
        _shared(q, keys, values, tables, rows, place, heads, out, threads)
        return
    for unit in range(units):
        _one(unit, q, keys, values, tables, rows, place, heads, out)
