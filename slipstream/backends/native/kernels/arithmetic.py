"""Operations on single rows, and the choice of a token from logits. Everything here runs on one thread. Distributions
are computed in float64, everything else in float32.
"""

import math
from typing import NamedTuple

import numpy as np

from slipstream.backends.native.kernels.compiled import EXACT, FAST, kernel
from slipstream.backends.native.kernels.memory import address_of
from slipstream.backends.native.kernels.records import GELU, GELU_TANH, RELU, RELU_SQUARED, SILU, SWIGLU
from slipstream.backends.native.kernels.tiles import sum_of, sum_of_squares
from slipstream.core.decode_steps import ARGMAX_INV_TEMPERATURE

_FACTORIALS = tuple(float(math.factorial(k)) for k in range(12, -1, -1))


@kernel(fastmath=EXACT)
def exp(x):
    """e^x in float32 with an error of 3e-7; x is limited to -87..88 (Cephes, expf)."""
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


@kernel(fastmath=EXACT)
def exp_double(x):
    """e^x in float64 for x <= 0 with an error of 3e-16, 0 below -708: 14 terms of the series of e^r,
    |r| <= log(2) / 2."""
    n = np.floor(x * 1.4426950408889634 + 0.5)
    r = x - n * 6.93145751953125e-1
    r = r - n * 1.42860682030941723212e-6
    p = 1.0 / 6227020800
    for divisor in _FACTORIALS:
        p = p * r + 1.0 / divisor
    scale = np.int64((np.int64(np.int32(max(n, -1022.0))) + 1023) << 52).view(np.float64)
    return p * scale if x >= -708 else 0.0


@kernel()
def _order(bits):
    """Map the bits of a float32 to an integer with the same order, and back. Compilers vectorise the maximum of
    integers, but not of floats."""
    return np.int32(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF)))


@kernel()
def maximum(x, n):
    """The maximum of the first n values. Undefined for NaN, which the caller detects elsewhere."""
    bits, top = x.view(np.int32), np.int32(-(2**31))
    for i in range(n):
        top = max(top, _order(bits[i]))
    return np.int32(_order(top)).view(np.float32)


@kernel()
def max_abs(x):
    """The largest absolute value of x; NaN if x contains a NaN."""
    bits, top = x.view(np.int32), np.int32(0)
    for i in range(x.shape[0]):
        top = max(top, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return np.int32(top).view(np.float32)


@kernel()
def argmax(x, n):
    """Index of the first maximum of n values; 0 if all are NaN."""
    top = maximum(x, n)
    for start in range(0, n, 64):
        stop, reached = min(start + 64, n), False
        for i in range(start, stop):
            reached |= x[i] == top
        if reached:
            for i in range(start, stop):
                if x[i] == top:
                    return i
    return 0


@kernel(fastmath=EXACT)
def rms_norm(x, weight, eps, out):
    """RMS norm of a row."""
    n = x.shape[0]
    factor = np.float32(1) / np.sqrt(sum_of_squares(address_of(x), n) / np.float32(n) + eps)
    for i in range(n):
        out[i] = weight[i] * (x[i] * factor)


@kernel(fastmath=EXACT)
def layer_norm(x, weight, bias, eps, out):
    """LayerNorm of a row; `out` must be another array than x."""
    n = x.shape[0]
    mean = sum_of(address_of(x), n) / np.float32(n)
    for i in range(n):
        out[i] = x[i] - mean
    factor = np.float32(1) / np.sqrt(sum_of_squares(address_of(out), n) / np.float32(n) + eps)
    for i in range(n):
        out[i] = out[i] * factor * weight[i] + bias[i]


@kernel()
def is_finite(x):
    """Return whether all values of a row are finite."""
    return max_abs(x) < np.inf


@kernel(fastmath=FAST)
def rotate(x, heads, size, cos, sin):
    """Rotate pairs (j, j + n/2) of the first n dimensions of each head in x [heads * D]."""
    half = cos.shape[0]
    for h in range(heads):
        for j in range(half):
            a, b = x[h * size + j], x[h * size + half + j]
            x[h * size + j] = a * cos[j] - b * sin[j]
            x[h * size + half + j] = b * cos[j] + a * sin[j]


@kernel(fastmath=EXACT)
def sigmoid(x):
    return np.float32(1) / (np.float32(1) + exp(-x))


@kernel(fastmath=EXACT)
def tanh(x):
    """tanh with an absolute and relative error of 2e-7; small values use its series up to x^9."""
    y = x * x
    near = np.float32(62.0 / 2835.0) * y - np.float32(17.0 / 315.0)
    near = x + x * y * (((near * y) + np.float32(2.0 / 15.0)) * y - np.float32(1.0 / 3.0))
    far = np.float32(1) - np.float32(2) / (np.float32(1) + exp(np.float32(2) * x))
    return near if y < np.float32(0.1) else far


@kernel(fastmath=EXACT)
def cap_in_place(x, scale, cap):
    """x = cap * tanh(x * scale / cap)"""
    factor = scale / cap
    for i in range(x.shape[0]):
        x[i] = cap * tanh(x[i] * factor)


@kernel(fastmath=EXACT)
def silu(x):
    return x / (np.float32(1) + exp(-x))


@kernel(fastmath=EXACT)
def gelu_tanh(x):
    """GELU in its tanh form (Hendrycks and Gimpel, 1606.08415), with 1 + tanh(y) = 2 / (1 + e^(-2 y))."""
    inner = np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)
    return x / (np.float32(1) + exp(-inner))


@kernel(fastmath=EXACT)
def gelu(x):
    """GELU; erf with an error of 2e-7 (Abramowitz and Stegun, 7.1.26)."""
    z = abs(x) * np.float32(0.70710678118)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911) * z)
    p = np.float32(1.061405429)
    p = p * t - np.float32(1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t - np.float32(0.284496736)
    p = p * t + np.float32(0.254829592)
    tail = p * t * exp(-z * z)  # 1 - erf(z)
    return np.float32(0.5) * x * (np.float32(2) - tail if x > 0 else tail)


@kernel(fastmath=EXACT)
def activate(kind, x, out):
    """out = the activation function `kind` of each value of x."""
    if kind == SILU:
        for i in range(out.shape[0]):
            out[i] = silu(x[i])
    elif kind == GELU_TANH:
        for i in range(out.shape[0]):
            out[i] = gelu_tanh(x[i])
    elif kind == GELU:
        for i in range(out.shape[0]):
            out[i] = gelu(x[i])
    elif kind == RELU:
        for i in range(out.shape[0]):
            out[i] = max(x[i], np.float32(0))
    elif kind == RELU_SQUARED:
        for i in range(out.shape[0]):
            out[i] = max(x[i], np.float32(0)) * max(x[i], np.float32(0))


@kernel(fastmath=EXACT)
def gate(kind, limit, x, out):
    """activation(gate) * up of a row [gate, up]: [2 I] -> [I] (Shazeer, 2002.05202). SWIGLU: as in gpt-oss."""
    inner = out.shape[0]
    if kind == SWIGLU:
        for i in range(inner):
            g, u = min(x[i], limit), max(min(x[inner + i], limit), -limit)
            out[i] = (u + np.float32(1)) * (g * sigmoid(np.float32(1.702) * g))
        return
    if kind == SILU:
        for i in range(inner):
            out[i] = silu(x[i]) * x[inner + i]
        return
    activate(kind, x[:inner], out)
    for i in range(inner):
        out[i] *= x[inner + i]


@kernel(fastmath=EXACT)
def add_silu(x, out):
    """out += silu(x)"""
    for i in range(out.shape[0]):
        out[i] += silu(x[i])


@kernel(fastmath=EXACT)
def softmax_in_place(scores, scale, sink):
    """scores = softmax(scores * scale). The denominator includes one more score, `sink`; -infinity: no sink."""
    n = scores.shape[0]
    top = maximum(scores, n)
    for t in range(n):
        scores[t] = exp((scores[t] - top) * scale)
    factor = np.float32(1) / (sum_of(address_of(scores), n) + exp(sink - top * scale))
    for t in range(n):
        scores[t] *= factor


@kernel(fastmath=FAST)
def softmax(logits, inv_temperature, probs):
    """probs [V'] = softmax(logits[:V'] * inv_temperature) in float64."""
    top = maximum(logits, probs.shape[0])
    total = 0.0
    for i in range(probs.shape[0]):
        probs[i] = exp_double((np.float64(logits[i]) - np.float64(top)) * inv_temperature)
        total += probs[i]
    for i in range(probs.shape[0]):
        probs[i] /= total


@kernel(fastmath=FAST)
def highest_probability(logits, n, inv_temperature):
    """The maximum of softmax(logits[:n] * inv_temperature)."""
    top, total = maximum(logits, n), np.float32(0)
    for i in range(n):
        total += exp((logits[i] - top) * inv_temperature)
    return np.float32(1) / total


@kernel()
def first_above(probs, u):
    """The first id whose cumulative probability exceeds u in [0, 1); never an id of probability 0."""
    end = 0.0
    for i in range(probs.shape[0]):
        end += probs[i]
    total, last = 0.0, 0
    for i in range(probs.shape[0]):
        if probs[i] > 0:
            last = i
            total += probs[i]
            if total > u * end:
                break
    return last


@kernel()
def first_maximum(logits, inv_temperature, noise):
    """Index of the first maximum of logits[:V'] * inv_temperature + noise [V']."""
    best, top = 0, -np.inf
    for i in range(noise.shape[0]):
        value = np.float64(logits[i]) * inv_temperature + noise[i]
        if value > top:
            best, top = i, value
    return best


MAXIMUM, UNIFORMS, NOISE = range(3)


class Picks(NamedTuple):
    """How a call picks tokens in K steps of B sequences; only ids below `vocab` are picked. See `core.decode_steps`."""

    kind: int  # MAXIMUM, UNIFORMS or NOISE
    vocab: int
    inv_temperature: np.ndarray  # float64 [B]
    uniforms: np.ndarray  # float64 [K, B]
    noise: np.ndarray  # float64 [K, B, V]
    rates: np.ndarray  # float64 [B, C]: see `Worth`; [0, C]: all K steps run
    least: np.ndarray  # float64 [B, K]: see `Worth`
    confidence: np.ndarray  # float64 [K, B], receives the confidence of each step that ran
    reach: np.ndarray  # float64 [B], receives the product of each sequence's rates so far


@kernel()
def pick(picks, j, logits, probs, drawn):
    """drawn[b] = the token of step j, picked from logits [B, >= V]. If tokens are sampled, probs [B, V] receives their
    distributions in float64. Returns whether a further token is worth drawing (see `Worth`)."""
    classes, goes_on = picks.rates.shape[1], picks.rates.shape[0] == 0
    for b in range(picks.rates.shape[0]):
        heat = picks.inv_temperature[b]
        top = highest_probability(logits[b], picks.vocab, np.float32(heat if heat < ARGMAX_INV_TEMPERATURE else 1.0))
        picks.confidence[j, b] = top
        at = min(int(top * classes), classes - 1) if top > 0 else 0  # NaN has no class
        picks.reach[b] *= picks.rates[b, at]
        goes_on |= picks.reach[b] >= picks.least[b, j]
    for b in range(drawn.shape[0]):
        if picks.kind == MAXIMUM:
            drawn[b] = argmax(logits[b], picks.vocab)
            continue
        row = probs[b, : picks.vocab]
        softmax(logits[b], picks.inv_temperature[b], row)
        probs[b, picks.vocab :] = 0
        if picks.kind == UNIFORMS:
            drawn[b] = first_above(row, picks.uniforms[j, b])
        else:
            drawn[b] = first_maximum(logits[b], picks.inv_temperature[b], picks.noise[j, b, : picks.vocab])
    return goes_on
