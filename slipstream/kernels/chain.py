"""A few rows of a small decoder in int8, and chains drafted by it, without a runtime in between.

A draft of two million parameters is made of operators more than of arithmetic: its hundred operators for a guess cost
a runtime several times what their numbers do. Here a chain is one call, and a guess is a pass over the weights, at
the speed at which the cache hands them out.

Weights are int8 with a scale for each output channel. A row that meets a matrix is rounded to so many bits that its
products sum up in 32 without overflow (15 bits up to 516 columns): the sums are exact, whatever their order, so a row
comes out the same, bit for bit, whichever rows are beside it. All else is float32, laws are float64.

R rows, d width, H query heads, Hk key/value heads, D head size, I inner width, V vocabulary, L layers, K steps.
What is compiled is kept on disk under this file's time stamp, so all that a kernel calls belongs in this file.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCK = 32
"""Slots in a block of the KV cache."""

LANES = 32
"""Products that one step of `dots` makes of each pair of rows."""

_FAST = {"reassoc", "contract", "arcp", "nsz"}  # not nnan, ninf: what overflowed must be seen
_EXACT = {"contract"}  # where the order of operations is what makes it accurate
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False, "nogil": True, "cache": True}


class Matrix(NamedTuple):
    """A linear weight of every layer, [out, in] in each, and what its rows of activations are rounded to."""

    values: np.ndarray  # int8 [L, out, in]
    scale: np.ndarray  # float32 [L, out]
    most: int  # the greatest integer


def matrix(values: np.ndarray, scale: np.ndarray) -> Matrix:
    """Its rows of activations are rounded as finely as their products surely sum up in 32 bits."""
    most = min(2**15 - 1, (2**31 - 1) // (127 * values.shape[2]))
    return Matrix(np.ascontiguousarray(values), np.ascontiguousarray(scale), most)


class Model(NamedTuple):
    """A decoder like Llama's: RMS norms, rotary positions, gated MLPs with silu, no biases."""

    embed: np.ndarray  # float32 [V, d]
    norms: np.ndarray  # float32 [2 L + 1, d]: of each layer before attention and before the MLP, then the final one
    inv_freq: np.ndarray  # float64 [D/2]
    turn_scale: float
    eps: np.float32
    heads: int
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    head: Matrix  # L = 1


class Cache(NamedTuple):
    """Paged keys and values, float32 [blocks, Hk, BLOCK, D] for each layer, and int64 tables [B, blocks] of who owns
    which block."""

    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    tables: np.ndarray


class Picks(NamedTuple):
    """How tokens are picked (see `Draws`), among the ids below `vocab`."""

    kind: int  # MAXIMUM, UNIFORMS or NOISE
    vocab: int
    heat: np.ndarray  # float64 [B], 1 / temperature
    uniforms: np.ndarray  # float64 [K, B]
    noise: np.ndarray  # float64 [K, B, V]


MAXIMUM, UNIFORMS, NOISE = range(3)


def _dots(rows: int, outs: int) -> Any:
    """Dot products of `rows` rows of x, int16, with `outs` rows of w, int8, as one tile that stays in registers."""

    @intrinsic
    def dots(context: Any, w: Any, first_w: Any, x: Any, first_x: Any, n: Any) -> Any:
        """int32 sums over n columns, a multiple of LANES; the rows of w begin at its value first_w, those of x at
        first_x, n apart. Order: row by row of x."""
        del context
        signature = types.UniTuple(types.int32, rows * outs)(w, first_w, x, first_x, n)

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            def vector(bits: int, lanes: int) -> ir.VectorType:
                return ir.VectorType(ir.IntType(bits), lanes)

            def take(v: Any, lanes: range) -> Any:
                index = ir.Constant(vector(32, len(lanes)), list(lanes))
                return b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), index)

            def pointers(kind: Any, array: Any, first: Any, count: int) -> list[Any]:
                data = context.make_array(kind)(context, b, array).data
                return [b.gep(data, [b.add(first, b.mul(n, ir.Constant(n.type, j)))]) for j in range(count)]

            def load(pointer: Any, i: Any, bits: int) -> Any:
                narrow = vector(bits, LANES)
                values = b.load(b.bitcast(b.gep(pointer, [i]), narrow.as_pointer()), align=bits // 8)
                return b.sext(values, vector(32, LANES))

            n = args[4]
            w_rows = pointers(signature.args[0], args[0], args[1], outs)
            x_rows = pointers(signature.args[2], args[2], args[3], rows)
            zero = ir.Constant(vector(32, LANES // 2), [0] * (LANES // 2))
            sums = [cgutils.alloca_once_value(b, zero) for _ in range(rows * outs)]
            start, step = ir.Constant(n.type, 0), ir.Constant(n.type, LANES)
            with cgutils.for_range_slice(b, start, n, step, inc=True) as (i, _):
                xs = [load(pointer, i, 16) for pointer in x_rows]
                for o, pointer in enumerate(w_rows):
                    values = load(pointer, i, 8)
                    for r in range(rows):
                        # Products of neighbours added: what processors have one instruction for (pmaddwd, vpdpwssd).
                        product = b.mul(values, xs[r])
                        pairs = b.add(take(product, range(0, LANES, 2)), take(product, range(1, LANES, 2)))
                        place = sums[r * outs + o]
                        b.store(b.add(b.load(place), pairs), place)
            totals = []
            for place in sums:
                v, width = b.load(place), LANES // 2
                while width > 1:
                    width //= 2
                    v = b.add(take(v, range(width)), take(v, range(width, 2 * width)))
                totals.append(b.extract_element(v, ir.Constant(ir.IntType(32), 0)))
            return context.make_tuple(b, signature.return_type, totals)

        return signature, generate

    return dots


_dots_1x4, _dots_2x4 = _dots(1, 4), _dots(2, 4)

_FACTORIALS = tuple(float(math.factorial(k)) for k in range(12, -1, -1))


@njit(fastmath=_EXACT, **_OPTIONS)
def _exp(x):
    """e^x in float32, to 3e-7; x is kept within -87 and 88 (Cephes, expf)."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1)) * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(fastmath=_EXACT, **_OPTIONS)
def _exp_double(x):
    """e^x in float64 for x <= 0, to 3e-16, 0 below -708: the series of e^r to its 14th term, |r| <= log(2) / 2."""
    n = np.floor(x * 1.4426950408889634 + 0.5)
    r = x - n * 6.93145751953125e-1
    r = r - n * 1.42860682030941723212e-6
    p = 1.0 / 6227020800
    for divisor in _FACTORIALS:
        p = p * r + 1.0 / divisor
    scale = np.int64((np.int64(np.int32(max(n, -1022.0))) + 1023) << 52).view(np.float64)
    return p * scale if x >= -708 else 0.0


@njit(fastmath=_FAST, **_OPTIONS)
def _quantise(x, most, out):
    """Round a row to int16 in [-most, most], most at its greatest; returns the scale of a unit."""
    top = np.float32(0)
    for i in range(x.shape[0]):
        top = max(top, abs(x[i]))
    factor = np.float32(most) / max(top, np.float32(1e-30))
    for i in range(x.shape[0]):
        out[i] = np.int16(np.floor(x[i] * factor + np.float32(0.5)))
    return top / np.float32(most)


@njit(**_OPTIONS)
def _copy(x, out):
    for i in range(out.shape[0]):
        out[i] = x[i]


@njit(**_OPTIONS)
def _add(x, out):
    for i in range(out.shape[0]):
        out[i] += x[i]


@njit(fastmath=_FAST, **_OPTIONS)
def _norm(x, weight, eps, out):
    """RMS norm of a row; returns whether the row is finite."""
    square = np.float32(0)
    for i in range(x.shape[0]):
        square += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(square / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = weight[i] * (x[i] * factor)
    return np.isfinite(square)


@njit(**_OPTIONS)
def _multiply(matrix, layer, x, unit, rows, y):
    """y[r] = x[r] @ w.T for rows of int16, one behind the other in x, in units of unit[r]; w of this layer."""
    w, scale = matrix.values, matrix.scale[layer]
    outs, n = w.shape[1], w.shape[2]
    for o in range(0, outs, 4):
        first = (layer * outs + o) * n
        r = 0
        while r + 2 <= rows:
            two = _dots_2x4(w, first, x, r * n, n)
            for j in range(4):
                y[r, o + j] = np.float32(two[j]) * (scale[o + j] * unit[r])
                y[r + 1, o + j] = np.float32(two[4 + j]) * (scale[o + j] * unit[r + 1])
            r += 2
        if r < rows:
            one = _dots_1x4(w, first, x, r * n, n)
            for j in range(4):
                y[r, o + j] = np.float32(one[j]) * (scale[o + j] * unit[r])


@njit(fastmath=_FAST, **_OPTIONS)
def _turn(x, heads, size, cos, sin):
    """Rotate pairs (j, j + D/2) of each head in x [heads * D]."""
    half = size // 2
    for h in range(heads):
        for j in range(half):
            a, b = x[h * size + j], x[h * size + half + j]
            x[h * size + j] = a * cos[j] - b * sin[j]
            x[h * size + half + j] = b * cos[j] + a * sin[j]


@njit(fastmath=_FAST, **_OPTIONS)
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


@njit(fastmath=_FAST, **_OPTIONS)
def _mix(weights, values, count, out):
    """out += weights[t] * values[t] over the first `count` of values [32, D]."""
    size = out.shape[0]
    t = 0
    while t + 4 <= count:  # four at a time: out is loaded and stored once for them
        a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for i in range(size):
            out[i] += (a * values[t, i] + b * values[t + 1, i]) + (c * values[t + 2, i] + d * values[t + 3, i])
        t += 4
    while t < count:
        a = weights[t]
        for i in range(size):
            out[i] += a * values[t, i]
        t += 1


@njit(fastmath=_FAST, **_OPTIONS)
def _attend(q, keys, values, table, length, heads, scores, out):
    """One row q [H * D] over the first `length` slots of its sequence, whose blocks are table [..]; out [H * D]."""
    kv_heads, size = keys.shape[1], keys.shape[3]
    scale = np.float32(size) ** np.float32(-0.5)
    for h in range(heads):
        g = h // (heads // kv_heads)
        own, mixed = q[h * size : (h + 1) * size], out[h * size : (h + 1) * size]
        for b in range(0, length, BLOCK):
            _score(own, keys[table[b // BLOCK], g], min(BLOCK, length - b), scores[b:])
        top = scores[0]
        for t in range(length):
            top = max(top, scores[t])
        total = np.float32(0)
        for t in range(length):
            scores[t] = _exp((scores[t] - top) * scale)
            total += scores[t]
        for i in range(size):
            mixed[i] = 0
        for b in range(0, length, BLOCK):
            _mix(scores[b:], values[table[b // BLOCK], g], min(BLOCK, length - b), mixed)
        for i in range(size):
            mixed[i] /= total


@njit(fastmath=_FAST, **_OPTIONS)
def _gate(x, inner, out):
    """silu(gate) * up of a row [gate, up]: [2 * inner] -> [inner] (Shazeer 2020, GLU variants)."""
    for i in range(inner):
        out[i] = x[i] / (np.float32(1) + _exp(-x[i])) * x[inner + i]


@njit(fastmath=_FAST, **_OPTIONS)
def _gated(x, out):
    """silu(gate) * up of a row [gate, up]: [2 I] -> [I] (Shazeer, 2002.05202)."""
    inner = out.shape[0]
    for i in range(inner):
        out[i] = x[i] / (np.float32(1) + _exp(-x[i])) * x[inner + i]


@njit(**_OPTIONS)
def _rows(model, cache, tokens, sequence, slots, wanted, logits):
    """Run R rows through the model: keys and values into the cache, logits [A, V] of the rows `wanted` [A].

    tokens, sequence, slots [R]: each row's id, its sequence's row in the block tables, and its slot, which is its
    position too. Returns whether the residual stream is finite.
    """
    rows, width, size = tokens.shape[0], model.embed.shape[1], 2 * model.inv_freq.shape[0]
    depth, heads, kv_heads = model.qkv.scale.shape[0], model.heads, cache.keys[0].shape[1]
    inner = model.down.values.shape[2]
    turned = (heads + kv_heads) * size
    x = np.empty((rows, width), np.float32)
    qkv = np.empty((rows, turned + kv_heads * size), np.float32)
    wide = np.empty((rows, 2 * inner), np.float32)
    row = np.empty(max(width, inner, heads * size), np.float32)
    flat, attended, gated = row[:width], row[: heads * size], row[:inner]
    narrow = np.empty(rows * row.shape[0], np.int16)
    unit = np.empty(rows, np.float32)
    cos, sin = np.empty((rows, size // 2), np.float32), np.empty((rows, size // 2), np.float32)
    longest = 0
    for r in range(rows):
        _copy(model.embed[tokens[r]], x[r])
        longest = max(longest, slots[r] + 1)
        for j in range(size // 2):
            angle = slots[r] * model.inv_freq[j]
            cos[r, j], sin[r, j] = np.cos(angle) * model.turn_scale, np.sin(angle) * model.turn_scale
    scores = np.empty(longest, np.float32)
    place = np.arange(rows)  # of each row that goes on
    for layer in range(depth):
        for r in range(rows):
            _norm(x[r], model.norms[2 * layer], model.eps, flat)
            unit[r] = _quantise(flat, model.qkv.most, narrow[r * width : (r + 1) * width])
        _multiply(model.qkv, layer, narrow, unit, rows, qkv)
        for r in range(rows):
            _turn(qkv[r], heads + kv_heads, size, cos[r], sin[r])
            block, slot = cache.tables[sequence[r], slots[r] // BLOCK], slots[r] % BLOCK
            for g in range(kv_heads):
                k, v = (heads + g) * size, turned + g * size
                _copy(qkv[r, k : k + size], cache.keys[layer][block, g, slot])
                _copy(qkv[r, v : v + size], cache.values[layer][block, g, slot])
        if layer == depth - 1:  # of the others, keys and values were all that was wanted
            place = wanted
            for a in range(len(wanted)):
                _copy(x[wanted[a]], x[a])  # wanted[a] >= a
        count = len(place)
        for a in range(count):
            r = place[a]
            keys, values, table = cache.keys[layer], cache.values[layer], cache.tables[sequence[r]]
            _attend(qkv[r, : heads * size], keys, values, table, slots[r] + 1, heads, scores, attended)
            unit[a] = _quantise(attended, model.o.most, narrow[a * heads * size : (a + 1) * heads * size])
        _multiply(model.o, layer, narrow, unit, count, wide)
        for a in range(count):
            _add(wide[a], x[a])
            _norm(x[a], model.norms[2 * layer + 1], model.eps, flat)
            unit[a] = _quantise(flat, model.gate_up.most, narrow[a * width : (a + 1) * width])
        _multiply(model.gate_up, layer, narrow, unit, count, wide)
        for a in range(count):
            _gated(wide[a], gated)
            unit[a] = _quantise(gated, model.down.most, narrow[a * inner : (a + 1) * inner])
        _multiply(model.down, layer, narrow, unit, count, wide)
        for a in range(count):
            _add(wide[a], x[a])
    sound = True
    for a in range(len(wanted)):
        sound &= _norm(x[a], model.norms[2 * depth], model.eps, flat)
        unit[a] = _quantise(flat, model.head.most, narrow[a * width : (a + 1) * width])
    _multiply(model.head, 0, narrow, unit, len(wanted), logits)
    return sound


@njit(fastmath=_FAST, **_OPTIONS)
def _law(logits, heat, law):
    """softmax(logits * heat) in float64 over the ids that law [V'] has room for."""
    top = logits[0]
    for i in range(law.shape[0]):
        top = max(top, logits[i])
    total = 0.0
    for i in range(law.shape[0]):
        law[i] = _exp_double((np.float64(logits[i]) - np.float64(top)) * heat)
        total += law[i]
    for i in range(law.shape[0]):
        law[i] /= total


@njit(**_OPTIONS)
def _first_above(law, u):
    """The first id whose cumulated law exceeds u in [0, 1); never one that the law excludes."""
    end = 0.0
    for i in range(law.shape[0]):
        end += law[i]
    total, last = 0.0, 0
    for i in range(law.shape[0]):
        if law[i] > 0:
            last = i
            total += law[i]
            if total > u * end:
                break
    return last


@njit(**_OPTIONS)
def _first_maximum(logits, heat, noise):
    """The first maximum of logits * heat + noise over the ids that noise [V'] has."""
    best, top = 0, -np.inf
    for i in range(noise.shape[0]):
        value = np.float64(logits[i]) * heat + noise[i]
        if value > top:
            best, top = i, value
    return best


@njit(**_OPTIONS)
def draft(model, cache, tokens, sequence, slots, last, draws, drawn, logits, laws):
    """Draft K tokens for each of B sequences: pending tokens first, then a row a sequence, each fed with the last.

    tokens, sequence, slots [M]  the pending rows, as in `_rows`; last [B]: the last one of each sequence
    draws    `Picks`: how
    drawn    [K, B] gains the tokens, logits [K, B, V] the raw logits, and laws [K, B, V], in float64, what each was
             drawn from; of the kind MAXIMUM they stay as they are
    Returns whether all was finite.
    """
    steps, count = drawn.shape
    each, behind, sound = np.arange(count), np.empty(count, np.int64), True
    for j in range(steps):
        if j > 0:
            for b in range(count):
                behind[b] = (slots[last[b]] if j == 1 else behind[b]) + 1
            tokens, slots, sequence, last = drawn[j - 1], behind, each, each
        sound &= _rows(model, cache, tokens, sequence, slots, last, logits[j])
        for b in range(count):
            if draws.kind == MAXIMUM:
                drawn[j, b] = np.argmax(logits[j, b, : draws.vocab])
                continue
            law = laws[j, b, : draws.vocab]
            _law(logits[j, b], draws.heat[b], law)
            laws[j, b, draws.vocab :] = 0
            if draws.kind == UNIFORMS:
                drawn[j, b] = _first_above(law, draws.uniforms[j, b])
            else:
                drawn[j, b] = _first_maximum(logits[j, b], draws.heat[b], draws.noise[j, b, : draws.vocab])
    return sound
