"""Rounds groups of weights to integers of 4 bits (see `quantise_blocks`), by the same operations in the same order as
torch on x86 processors, so the integers are equal on every processor. One lane of a vector computes one group."""

from functools import reduce

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from slipstream.backends.native.kernels.compiled import entry
from slipstream.backends.native.kernels.memory import call, floats, small
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.kernels.vectors import FLOAT, FLOATS, WORD, Builder, emit, locator

GROUP, LEVELS = 32, 15
_TINY, _TO_WHOLE = np.float32(1e-12), np.float32(1.5 * 2**23)
"""Adding and subtracting `_TO_WHOLE` rounds small numbers to integers, halves to even."""


@emit(6)
def fit_tile(b: Builder) -> None:
    """Scales and minima of PANEL groups. Arguments: x (address of float32 [count, GROUP]), count (groups beyond repeat
    the last one), tried (address of float32 [n, 2]: a share of the range, and twice this share over LEVELS), n, scales
    (address of float32 [PANEL]), stride (from there to the minima, in bytes)."""
    x, tried, scales = (b.bytes_at(b.function.args[i]) for i in (0, 2, 4))
    _, count, _, tries, _, stride = b.function.args

    def constant(value: float) -> ir.Value:
        return ir.Constant(FLOATS, [float(value)] * PANEL)

    def total(v: list[ir.Value]) -> ir.Value:
        columns = (reduce(b.fadd, v[lane::8]) for lane in range(8))
        return reduce(b.fadd, columns, constant(0))

    def at_least(v: ir.Value, least: ir.Value) -> ir.Value:  # both keep NaN
        return b.select(b.fcmp_ordered("<", v, least), least, v)

    def at_most(v: ir.Value, most: ir.Value) -> ir.Value:
        return b.select(b.fcmp_ordered(">", v, most), most, v)

    def end_of(name: str, v: list[ir.Value]) -> ir.Value:
        return reduce(lambda x, y: b.call_builtin(f"llvm.{name}.v{PANEL}f32", FLOATS, x, y), v)

    last = b.sub(count, WORD(1))
    rows = [b.select(b.icmp_unsigned("<", WORD(i), count), WORD(i), last) for i in range(PANEL)]
    groups = [b.gep(x, [b.mul(row, WORD(4 * GROUP))]) for row in rows]
    values = cgutils.alloca_once(b, ir.ArrayType(FLOATS, GROUP))
    whole = cgutils.alloca_once(b, ir.ArrayType(FLOATS, GROUP))

    def place(array: ir.Value, i: int) -> ir.Value:
        return b.gep(array, [WORD(0), WORD(i)])

    for i in range(GROUP):
        vector: ir.Value = constant(0)
        for lane, group in enumerate(groups):
            number = b.load(b.place_at(group, WORD(4 * i), FLOAT), align=4)
            vector = b.insert_element(vector, number, ir.IntType(32)(lane))
        b.store(vector, place(values, i))
    read = [b.load(place(values, i)) for i in range(GROUP)]
    low, high = end_of("minimum", read), end_of("maximum", read)
    middle, half = (b.fdiv(f(high, low), constant(2)) for f in (b.fadd, b.fsub))
    range_ = at_least(half, constant(_TINY))
    mean = b.fdiv(total(read), constant(GROUP))
    best, scale, minimum = (cgutils.alloca_once_value(b, v) for v in (constant(np.inf), constant(0), low))
    with cgutils.for_range(b, tries) as loop:
        share, unit = (b.load(b.place_at(tried, b.add(b.mul(loop.index, WORD(8)), WORD(4 * i)), FLOAT)) for i in (0, 1))
        start = b.fsub(middle, b.fmul(b.spread(share), half))
        each = b.fmul(b.spread(unit), range_)
        for i in range(GROUP):
            v = at_most(at_least(b.fdiv(b.fsub(b.load(place(values, i)), start), each), constant(0)), constant(LEVELS))
            b.store(b.fsub(b.fadd(v, constant(_TO_WHOLE)), constant(_TO_WHOLE)), place(whole, i))
        pairs = [(b.load(place(values, i)), b.load(place(whole, i))) for i in range(GROUP)]
        middle_whole = b.fdiv(total([w for _, w in pairs]), constant(GROUP))
        spread = [b.fsub(w, middle_whole) for _, w in pairs]
        squares = at_least(total([b.fmul(s, s) for s in spread]), constant(_TINY))
        slope = b.fdiv(total([b.fmul(s, v) for s, (v, _) in zip(spread, pairs, strict=True)]), squares)
        first = b.fsub(mean, b.fmul(slope, middle_whole))
        left = [b.fsub(b.fsub(v, b.fmul(w, slope)), first) for v, w in pairs]
        error = total([b.fmul(e, e) for e in left])
        better = b.fcmp_ordered("<", error, b.load(best))
        for kept, new in ((best, error), (scale, slope), (minimum, first)):
            b.store(b.select(better, new, b.load(kept)), kept)
    b.store(b.load(scale), b.place_at(scales, WORD(0), FLOATS), align=4)
    b.store(b.load(minimum), b.place_at(scales, stride, FLOATS), align=4)
    b.ret_void()


_tile = locator(fit_tile)


@entry
def fit_groups(x, count, tried, tries, scales, minima):
    """Write scales and minima of `count` groups, each padded to a multiple of PANEL; see `fit_tile`."""
    tile = _tile()
    for at in range(0, count, PANEL):
        call(tile, (x + 4 * GROUP * at, count - at, tried, np.int64(tries), scales + 4 * at, minima - scales))


@entry
def round_weights(x, count, scales, minima, whole):
    """Write the integers (uint8 [count, GROUP]) of groups with these scales and minima."""
    values, integers = floats(x, count * GROUP), small(whole, count * GROUP)
    units, firsts = floats(scales, count), floats(minima, count)
    for g in range(count):
        unit, first = max(units[g], _TINY), firsts[g]
        for i in range(g * GROUP, (g + 1) * GROUP):
            v = min(max((values[i] - first) / unit, np.float32(0)), np.float32(LEVELS))
            integers[i] = np.int8((v + _TO_WHOLE) - _TO_WHOLE)
