"""Rows times a matrix, in whichever way its weights are kept."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import prange, types
from numba.extending import overload

from slipstream.kernels.arithmetic import quantise
from slipstream.kernels.compiled import kernel
from slipstream.kernels.tiles import MOST_ROWS, PANEL, dots, grab, outer, value

SHARE = 64
"""Outputs that a thread takes at a time."""

ALIGN = 64
"""Outputs come in multiples of it; zeros fill up."""

_outer = outer(more=False)
_dots_1, _dots_2, _dots_4 = dots(1, 4), dots(2, 4), dots(4, 2)


class Matrix(NamedTuple):
    """A linear weight of every layer, [out, in] in each.

    values  [L, out, in] of int8; or in panels, [L, out / PANEL, in, PANEL] in the same shape, of float32, the bits of
            float16 as int16, or those of bfloat16 as uint16
    scale   float32 [L, out] of int8, else empty
    most    the integer that the greatest value of a row becomes where it meets int8
    """

    values: np.ndarray
    scale: np.ndarray
    most: int


def padded(outs: int) -> int:
    """Outputs of a matrix with what fills up."""
    return -(-outs // ALIGN) * ALIGN


def whole(values: np.ndarray, scale: np.ndarray) -> Matrix:
    """A matrix of int8 [L, out, in] and its scales [L, out]. Rows that meet it are rounded as finely as their products
    surely sum up in 32 bits: 15 bits up to 516 columns."""
    more = padded(values.shape[1]) - values.shape[1]
    most = min(2**15 - 1, (2**31 - 1) // (127 * values.shape[2]))
    return Matrix(np.pad(values, ((0, 0), (0, more), (0, 0))), np.pad(scale, ((0, 0), (0, more))), most)


def panels(values: np.ndarray) -> np.ndarray:
    """[out, in] -> the same weights in panels, [padded out, in]."""
    outs, n = values.shape
    filled = np.pad(values, ((0, padded(outs) - outs), (0, 0)))
    return filled.reshape(-1, PANEL, n).transpose(0, 2, 1).reshape(-1, n)


@kernel()
def look_up(embed, tokens, x):
    """x[r] = row tokens[r] of a matrix in panels, [V, d]."""
    width = embed.shape[1]
    for r in range(tokens.shape[0]):
        panel, place = tokens[r] // PANEL, tokens[r] % PANEL
        for i in range(width):
            x[r, i] = value(embed, (panel * width + i) * PANEL + place)


@kernel()
def _floats(w, layer, x, rows, y, low, high):
    """y[r, o] = x[r] . w[layer, o] for outputs low..high-1, a multiple of ALIGN."""
    n, stride = w.shape[2], y.shape[1]
    base = layer * w.shape[1]
    for o in range(low, high, ALIGN):  # so many outputs' weights stay in a near cache while all rows use them
        r = 0
        while r < rows:
            left = rows - r
            tiles = (left + MOST_ROWS - 1) // MOST_ROWS
            count = (left + tiles - 1) // tiles  # of like sizes: a tile of one row reads as many weights as any other
            _outer(w, (base + o) * n, PANEL, n * PANEL, x, r * n, n, n, y, r * stride + o, stride, count, ALIGN)
            r += count


@kernel()
def _integers(w, layer, x, rows, y, low, high):
    """The same of int16 and int8; y int32."""
    n, base = w.shape[2], layer * w.shape[1]
    for start in range(low, high, ALIGN):  # so many rows of weights stay in the nearest cache
        r = 0
        while r + 4 <= rows:
            for o in range(start, start + ALIGN, 2):
                four = _dots_4(w, (base + o) * n, x, r * n, n)
                for i in range(4):
                    for j in range(2):
                        y[r + i, o + j] = four[2 * i + j]
            r += 4
        while r + 2 <= rows:
            for o in range(start, start + ALIGN, 4):
                two = _dots_2(w, (base + o) * n, x, r * n, n)
                for i in range(2):
                    for j in range(4):
                        y[r + i, o + j] = two[4 * i + j]
            r += 2
        if r < rows:
            for o in range(start, start + ALIGN, 4):
                one = _dots_1(w, (base + o) * n, x, r * n, n)
                for j in range(4):
                    y[r, o + j] = one[j]


def _columns(w, layer, x, rows, y, low, high):
    """`_floats` or `_integers`, by what the weights are."""
    raise NotImplementedError


@overload(_columns)
def _columns_of(w, layer, x, rows, y, low, high):
    part = _integers if w.dtype == types.int8 else _floats
    return lambda w, layer, x, rows, y, low, high: part(w, layer, x, rows, y, low, high)


@kernel(parallel=True)
def _shared(w, layer, x, rows, y, threads):
    outs, taken = w.shape[1], np.zeros(1, np.int64)  # whoever is done takes the next: a thread may be held up
    for _ in prange(threads):
        low = grab(taken) * SHARE
        while low < outs:
            _columns(w, layer, x, rows, y, low, min(low + SHARE, outs))
            low = grab(taken) * SHARE


@kernel()
def _products(w, layer, x, rows, y, threads):
    if threads > 1:
        _shared(w, layer, x, rows, y, threads)
    else:
        _columns(w, layer, x, rows, y, 0, w.shape[1])


def multiply(matrix, layer, x, rows, y, threads):
    """y[r] = x[r] @ w.T of this layer for the first `rows` rows of x [R, in], y [R, padded out]; in kernels only."""
    raise NotImplementedError


@overload(multiply)
def _multiply(matrix, layer, x, rows, y, threads):
    def rounded(matrix, layer, x, rows, y, threads):
        outs, n = matrix.values.shape[1], matrix.values.shape[2]
        narrow, unit = np.empty((rows, n), np.int16), np.empty(rows, np.float32)
        sums = np.empty((rows, outs), np.int32)
        for r in range(rows):
            unit[r] = quantise(x[r], matrix.most, narrow[r])
        _products(matrix.values, layer, narrow, rows, sums, threads)
        for r in range(rows):
            for o in range(outs):
                y[r, o] = np.float32(sums[r, o]) * (matrix.scale[layer, o] * unit[r])

    def real(matrix, layer, x, rows, y, threads):
        _products(matrix.values, layer, x, rows, y, threads)

    return rounded if matrix.types[0].dtype == types.int8 else real
