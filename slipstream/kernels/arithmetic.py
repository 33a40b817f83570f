"""What a decoder computes row by row, and how a token is picked from its logits. Everything here is serial and, but for
laws, in float32.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.kernels.compiled import EXACT, FAST, kernel

_FACTORIALS = tuple(float(math.factorial(k)) for k in range(12, -1, -1))


@kernel(fastmath=EXACT)
def exp(x):
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


@kernel(fastmath=EXACT)
def exp_double(x):
    """e^x in float64 for x <= 0, to 3e-16, 0 below -708: the series of e^r to its 14th term, |r| <= log(2) / 2."""
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
    """The bits of a float32 as an integer that is the greater the greater the float is, and back again. Compilers make
    vectors of the maximum of integers, not of floats."""
    return np.int32(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF)))


@kernel()
def greatest(x, n):
    """The maximum of the first n values; of no use where there is a NaN, which shows elsewhere."""
    bits, top = x.view(np.int32), np.int32(-(2**31))
    for i in range(n):
        top = max(top, _order(bits[i]))
    return np.int32(_order(top)).view(np.float32)


@kernel()
def farthest(x):
    """The greatest absolute value; NaN if there is one."""
    bits, top = x.view(np.int32), np.int32(0)
    for i in range(x.shape[0]):
        top = max(top, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return np.int32(top).view(np.float32)


@kernel(fastmath=FAST)
def quantise(x, most, out):
    """Round a row to int16 in [-most, most], most at its greatest; returns the scale of a unit."""
    top = farthest(x)
    factor = np.float32(most) / max(top, np.float32(1e-30))
    for i in range(x.shape[0]):
        out[i] = np.int16(np.floor(x[i] * factor + np.float32(0.5)))
    return top / np.float32(most)


@kernel(fastmath=FAST)
def norm(x, weight, eps, out):
    """RMS norm of a row; returns whether the row is finite."""
    square = np.float32(0)
    for i in range(x.shape[0]):
        square += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(square / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = weight[i] * (x[i] * factor)
    return np.isfinite(square)


@kernel(fastmath=FAST)
def turn(x, heads, size, cos, sin):
    """Rotate pairs (j, j + D/2) of each head in x [heads * D]."""
    half = size // 2
    for h in range(heads):
        for j in range(half):
            a, b = x[h * size + j], x[h * size + half + j]
            x[h * size + j] = a * cos[j] - b * sin[j]
            x[h * size + half + j] = b * cos[j] + a * sin[j]


@kernel(fastmath=FAST)
def gated(x, out):
    """silu(gate) * up of a row [gate, up]: [2 I] -> [I] (Shazeer, 2002.05202)."""
    inner = out.shape[0]
    for i in range(inner):
        out[i] = x[i] / (np.float32(1) + exp(-x[i])) * x[inner + i]


@kernel(fastmath=FAST)
def add_silu(x, out):
    """out += silu(x)"""
    for i in range(out.shape[0]):
        out[i] += x[i] / (np.float32(1) + exp(-x[i]))


@kernel(fastmath=FAST)
def softmax(logits, heat, law):
    """softmax(logits * heat) in float64 over the ids that law [V'] has room for."""
    top = greatest(logits, law.shape[0])
    total = 0.0
    for i in range(law.shape[0]):
        law[i] = exp_double((np.float64(logits[i]) - np.float64(top)) * heat)
        total += law[i]
    for i in range(law.shape[0]):
        law[i] /= total


@kernel()
def first_above(law, u):
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


@kernel()
def first_maximum(logits, heat, noise):
    """The first maximum of logits * heat + noise over the ids that noise [V'] has."""
    best, top = 0, -np.inf
    for i in range(noise.shape[0]):
        value = np.float64(logits[i]) * heat + noise[i]
        if value > top:
            best, top = i, value
    return best
