"""Rows times a matrix, in whichever way its weights are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numba import prange, types
from numba.extending import overload

from slipstream.kernels.arithmetic import quantise
from slipstream.kernels.compiled import kernel
from slipstream.kernels.tiles import PANEL, dots, grab, outer, tiles_of, value

SHARE = 64
"""Outputs that a thread takes at a time."""

ALIGN = 64
"""Outputs come in multiples of it; zeros fill up."""

WORTH_SHARING = 1 << 15
"""Numbers to pack from which on threads are worth their waking."""

_outer = outer(packed=True, more=False, widest=ALIGN // PANEL)
_dots_1, _dots_2, _dots_4 = dots(1, 4), dots(2, 4), dots(4, 2)


NONE = np.empty((0, 0), np.float32)


class Matrix(NamedTuple):
    """A linear weight of every layer, [out, in] in each.

    values  [L, out, in] of int8; or in panels, [L, out / PANEL, in, PANEL] in the same shape, of float32, the bits of
            float16 as int16, or those of bfloat16 as uint16
    scale   float32 [L, out] of int8, else empty
    most    the integer that the greatest value of a row becomes where it meets int8
    bias    float32 [L, out], or empty where there is none
    """

    values: np.ndarray
    scale: np.ndarray
    most: int
    bias: np.ndarray = NONE


def padded(outs: int) -> int:
    """Outputs of a matrix with what fills up."""
    return -(-outs // ALIGN) * ALIGN


def _filled_up(rows: np.ndarray) -> np.ndarray:
    """[L, out] -> [L, padded out]; of nothing, nothing."""
    return np.pad(rows, ((0, 0), (0, padded(rows.shape[1]) - rows.shape[1])))


def rounded(values: np.ndarray, scale: np.ndarray, bias: np.ndarray = NONE) -> Matrix:
    """A matrix of int8 [L, out, in] with its scales and bias [L, out]. Rows that meet it are rounded as finely as their
    products surely sum up in 32 bits: 15 bits up to 516 columns."""
    more = padded(values.shape[1]) - values.shape[1]
    most = min(2**15 - 1, (2**31 - 1) // (127 * values.shape[2]))
    return Matrix(np.pad(values, ((0, 0), (0, more), (0, 0))), _filled_up(scale), most, _filled_up(bias))


def exact(layers: Iterable[np.ndarray], count: int, bias: np.ndarray = NONE) -> Matrix:
    """A matrix of floats from the [out, in] of each of its `count` layers, and its bias [L, out]."""
    values = None
    for layer, each in enumerate(layers):  # one by one: never in memory twice
        laid = panels(each)
        if values is None:
            values = np.empty((count, *laid.shape), laid.dtype)
        values[layer] = laid
    assert values is not None
    return Matrix(values, NONE, 0, _filled_up(bias))


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
def _first(tile, rows):
    """The first row of a tile. They are of like sizes: a tile of one row reads as many weights as any other."""
    return tile * rows // tiles_of(rows)


@kernel()
def _pack(x, tile, rows, packed):
    """Lay the rows of a tile side by side, where they would lie one behind the other."""
    n, first = x.shape[1], _first(tile, rows)
    count = _first(tile + 1, rows) - first
    for r in range(count):
        row = x[first + r]
        for i in range(n):
            packed[first * n + i * count + r] = row[i]


@kernel(parallel=True)
def _pack_shared(x, rows, packed):
    for tile in prange(tiles_of(rows)):
        _pack(x, np.int64(tile), rows, packed)  # a range of threads counts without signs


@kernel()
def _floats(w, layer, packed, rows, y, low, high):
    """y[r, o] = x[r] . w[layer, o] for outputs low..high-1, a multiple of ALIGN."""
    n, stride = w.shape[2], y.shape[1]
    base = layer * w.shape[1]
    for o in range(low, high, ALIGN):  # so many outputs' weights stay in a near cache while all rows use them
        for tile in range(tiles_of(rows)):
            r = _first(tile, rows)
            count = _first(tile + 1, rows) - r
            _outer(w, (base + o) * n, PANEL, n * PANEL, packed, r * n, 0, n, y, r * stride + o, stride, count, ALIGN)


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


@kernel()
def _add_bias(matrix, layer, rows, y):
    if matrix.bias.shape[0] > 0:
        for r in range(rows):
            for o in range(y.shape[1]):
                y[r, o] += matrix.bias[layer, o]


def multiply(matrix, layer, x, rows, y, threads):
    """y[r] = x[r] @ w.T + bias of this layer for the first `rows` rows of x [R, in]; y [R, padded out]; in kernels."""
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
        _add_bias(matrix, layer, rows, y)

    def real(matrix, layer, x, rows, y, threads):
        packed = x[0]
        if rows > 1:
            packed = np.empty(rows * x.shape[1], np.float32)
            if threads > 1 and packed.shape[0] > WORTH_SHARING:
                _pack_shared(x, rows, packed)
            else:
                for tile in range(tiles_of(rows)):
                    _pack(x, tile, rows, packed)
        _products(matrix.values, layer, packed, rows, y, threads)
        _add_bias(matrix, layer, rows, y)

    return rounded if matrix.types[0].dtype == types.int8 else real
