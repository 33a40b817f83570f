"""The inner loops of matrix products and of attention, whose sums stay in vector registers.

Tiles of all sizes add their products in the same order, so a row of the result is bitwise the same alone and among
other rows.

A *tile* is up to `most_rows` rows of activations times a multiple of PANEL outputs. Weights are stored in panels:

    element   float32, float16 or bfloat16       [out / PANEL, in, PANEL]            one column a step
    pair      bfloat16 or int8                   [out / PANEL, in / 2, PANEL, 2]     two columns a step
    quad      int8                               [out / PANEL, in / 4, PANEL, 4]     four columns a step

So one load gets the weights of PANEL outputs for one step. The activations of a tile are interleaved,
[in / step, rows], so one address is enough for all rows. Tiles for weights in blocks are in `block_tiles`.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slipstream.backends.native.kernels import processor, vectors
from slipstream.backends.native.kernels.formats import (
    BFLOAT16_PAIRS,
    FLOAT16,
    FLOAT32,
    INT8_PAIRS,
    INT8_QUADS_TWICE,
    Format,
)
from slipstream.backends.native.kernels.memory import operation
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.kernels.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF,
    INT,
    INTS,
    SHORTS,
    WORD,
    BFloat,
    Builder,
)

# --- one step: weights of PANEL outputs times one number of a row, added to sums -------------------------------------


def _weights(b: Builder, pointer: ir.Value, fmt: Format) -> ir.Value:
    """The weights of PANEL outputs for one step."""
    if fmt.step == 1:
        return b.as_floats(pointer, fmt, PANEL)
    if fmt is INT8_PAIRS:
        return b.sext(b.load_vector(pointer, BYTE, 2 * PANEL, 1), SHORTS)
    return b.load_vector(pointer, INT, PANEL, 4)


def _add(b: Builder, fmt: Format, total: ir.Value, weights: ir.Value, number: ir.Value) -> ir.Value:
    """total + weights * number. number: `step` activations in 32 bits, repeated in every lane."""
    if fmt.step == 1:
        return b.multiply_add(number, weights, total)
    if fmt is INT8_PAIRS:
        return add_pairs(b, total, weights, number)
    if fmt is BFLOAT16_PAIRS:
        pairs = ir.VectorType(BFloat(), 2 * PANEL)
        dot = "llvm.x86.avx512bf16.dpbf16ps.512"
        return b.call_builtin(dot, FLOATS, total, b.bitcast(weights, pairs), b.bitcast(number, pairs))
    return add_quads(b, total, weights, number)


def pair_products(b: Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Multiply 16-bit integers, and add the products in pairs. LLVM compiles this to one instruction (pmaddwd)."""
    wide = ir.VectorType(INT, 2 * PANEL)
    product = b.mul(b.sext(x, wide), b.sext(y, wide))
    return b.add(b.take(product, range(0, 2 * PANEL, 2)), b.take(product, range(1, 2 * PANEL, 2)))


def add_pairs(b: Builder, total: ir.Value, weights: ir.Value, number: ir.Value) -> ir.Value:
    """Add two products of 16-bit integers to each sum."""
    return b.add(total, pair_products(b, weights, b.bitcast(number, SHORTS)))


def add_quads(b: Builder, total: ir.Value, weights: ir.Value, number: ir.Value) -> ir.Value:
    """Add four products of 8-bit integers to each sum. Weights are unsigned on x86 and signed on Arm; activations are
    signed."""
    if not processor.has_byte_dots():
        return _add_quads_as_pairs(b, total, weights, number)
    if processor.is_arm():
        lanes, name, vector = 4, "llvm.aarch64.neon.sdot.v4i32.v16i8", ir.VectorType(BYTE, 16)
    else:
        lanes = min(processor.lanes(), 16)
        name, vector = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", ir.VectorType(INT, lanes)
    parts = zip(b.split(total, lanes), b.split(weights, lanes), b.split(number, lanes), strict=True)
    return b.join([b.call_builtin(name, t.type, t, b.bitcast(w, vector), b.bitcast(n, vector)) for t, w, n in parts])


def _add_quads_as_pairs(b: Builder, total: ir.Value, weights: ir.Value, number: ir.Value) -> ir.Value:
    """As `add_quads`, without byte dot products: columns 0 and 2 of each four columns become one pair of 16-bit
    integers, columns 1 and 3 another pair."""
    eight = ir.Constant(SHORTS, [8] * 2 * PANEL)
    weights, number = b.bitcast(weights, SHORTS), b.bitcast(number, SHORTS)
    widen = b.ashr if processor.is_arm() else b.lshr  # weights are unsigned on x86
    total = add_pairs(b, total, widen(b.shl(weights, eight), eight), b.ashr(b.shl(number, eight), eight))
    return add_pairs(b, total, widen(weights, eight), b.ashr(number, eight))


# --- tiles of a matrix -----------------------------------------------------------------------------------------------


def by_rows(
    b: Builder, fmt: Format, rows: ir.Value, outs: ir.Value, group: Callable[[int, int, ir.Value], None], odd: bool
) -> None:
    """Generate code that branches by the number of rows at run time, and then loops over all outputs o;
    `group(count, panels, o)` generates the body. odd: the number of outputs may be no multiple of a tile's panels. The
    generated code also returns from the function."""
    end = b.append_basic_block("end")
    choice = b.switch(rows, end)
    for count in range(1, fmt.most_rows + 1):
        block = b.append_basic_block(f"rows{count}")
        choice.add_case(WORD(count), block)
        b.position_at_end(block)
        panels = fmt.panels(count) if not odd else min(2, fmt.panels(count))
        stop = b.mul(b.udiv(outs, WORD(PANEL * panels)), WORD(PANEL * panels))
        with cgutils.for_range_slice(b, WORD(0), stop, WORD(PANEL * panels), inc=True) as (o, _):
            group(count, panels, o)
        if panels > 1:
            with cgutils.for_range_slice(b, stop, outs, WORD(PANEL), inc=True) as (o, _):
                group(count, 1, o)
        b.branch(end)
    b.position_at_end(end)
    b.ret_void()


def scale_sums(b: Builder, sums: dict[tuple[int, int], ir.Value], places: list[ir.Value], scales: ir.Value) -> None:
    """Multiply the sums of each output by its scale."""
    for (r, p), value in sums.items():
        sums[r, p] = b.fmul(value, b.load_vector(b.gep(scales, [b.mul(places[p], WORD(4))]), FLOAT, PANEL, 4))


def store_sums(
    b: Builder,
    sums: dict[tuple[int, int], ir.Value],
    places: list[ir.Value],
    y: ir.Value,
    bias: ir.Value,
    stride: ir.Value,
    add: ir.Value,
) -> None:
    """y[row, place] = (add ? y[row, place] : 0) + bias[place] + sums[row, panel], for a tile's panels at `places`."""
    kept = b.icmp_signed("!=", add, WORD(0))
    for (r, p), value in sums.items():
        at = places[p]
        more = b.load_vector(b.gep(bias, [b.mul(at, WORD(4))]), FLOAT, PANEL, 4)
        out = b.gep(y, [b.mul(b.add(b.mul(stride, WORD(r)), at), WORD(4))])
        value = b.fadd(value, more)
        with b.if_else(kept) as (then, otherwise):
            with then:
                added = b.fadd(b.load_vector(out, FLOAT, PANEL, 4), value)
                came = b.block
            with otherwise:
                instead = b.block
        result = b.phi(FLOATS)
        result.add_incoming(added, came)
        result.add_incoming(value, instead)
        b.store(result, b.bitcast(out, FLOATS.as_pointer()), align=4)


@vectors.emit(10)
def matrix_tile(b: Builder, fmt: Format) -> None:
    """y[r * stride + o] = (add ? y[...] : 0) + bias[o] + sum over columns of x[r] * w[o], for r < rows and o < outs.

    Arguments: w, scales, bias, x, y (addresses), columns, outs, rows, stride (of y, in floats), add (0 or 1).

    x of a tile, by its format:
        float32, float16, bfloat16   float32 [columns, rows]
        bfloat16_pairs               pairs of bfloat16 [columns / 2, rows]
        int8_pairs                   units float32 [rows], then pairs of int16 [columns / 2, rows]
        int8_quads_twice             units float32 [rows], first sums int32 [2, rows], quads [columns / 4, 2, rows]:
                                     upper bytes, then lower ones
    A unit is the value of the integer 1. First sums compensate the offset of unsigned weights.
    """
    w, scales, bias, x, y = map(b.bytes_at, b.function.args[:5])
    columns, outs, rows, stride, add = b.function.args[5:]
    steps = b.udiv(columns, WORD(fmt.step))
    panel_bytes = b.mul(columns, WORD(PANEL * fmt.bytes))
    step_bytes = PANEL * fmt.bytes * fmt.step

    def group(count: int, panels: int, o: ir.Value) -> None:
        each = [(r, p) for r in range(count) for p in range(panels)]
        places = [b.add(o, WORD(PANEL * p)) for p in range(panels)]
        starts = [b.gep(w, [b.mul(b.udiv(at, WORD(PANEL)), panel_bytes)]) for at in places]
        units, first = b.bitcast(x, FLOAT.as_pointer()), b.place_at(x, WORD(4 * count), INT)
        numbers = b.gep(x, [WORD(4 * count * {INT8_PAIRS: 1, INT8_QUADS_TWICE: 3}.get(fmt, 0))])
        zero = ir.Constant(INTS, [0] * PANEL) if fmt.integer else ir.Constant(FLOATS, [0.0] * PANEL)

        sums = {(k, r, p): cgutils.alloca_once(b, zero.type) for k in range(fmt.passes) for r, p in each}
        for k in range(fmt.passes):
            for r in range(count):
                begin = zero
                if fmt is INT8_QUADS_TWICE:
                    begin = b.spread(b.load(b.gep(first, [WORD(k * count + r)]), align=4))
                for p in range(panels):
                    b.store(begin, sums[k, r, p])
        with cgutils.for_range(b, steps) as loop:
            row = b.place_at(numbers, b.mul(loop.index, WORD(4 * count * fmt.passes)), zero.type.element)
            step = [b.gep(start, [b.mul(loop.index, WORD(step_bytes))]) for start in starts]
            for place in step:
                b.fetch_ahead(place)
            near = [_weights(b, place, fmt) for place in step]
            for k in range(fmt.passes):
                for r in range(count):
                    number = b.spread(b.load(b.gep(row, [WORD(k * count + r)]), align=4))
                    for p in range(panels):
                        b.store(_add(b, fmt, b.load(sums[k, r, p]), near[p], number), sums[k, r, p])
        totals = {}
        for r, p in each:
            total = b.load(sums[0, r, p])
            if fmt.integer:
                total = b.sitofp(total, FLOATS)
            if fmt.passes == 2:  # the upper byte has weight 256
                lower = b.sitofp(b.load(sums[1, r, p]), FLOATS)
                total = b.multiply_add(total, ir.Constant(FLOATS, [256.0] * PANEL), lower)
            if fmt.integer:
                total = b.fmul(total, b.spread(b.load(b.gep(units, [WORD(r)]), align=4)))
            totals[r, p] = total

        if fmt.integer:
            scale_sums(b, totals, places, scales)
        store_sums(b, totals, places, y, bias, stride, add)

    by_rows(b, fmt, rows, outs, group, odd=False)


# --- tiles of attention ----------------------------------------------------------------------------------------------


@vectors.emit(11)
def attention_tile(b: Builder, fmt: Format, scores: bool) -> None:
    """Multiply query rows by the keys, or weights by the values, of one block of the KV cache. Sums are in the order of
    slots.

    Arguments: w, scales, x, y (addresses), n, step, apart (in values of w), stride_x, stride_y (in floats), outs, rows.

    scores  y[r * stride_y + o] = sum over i < n of x[i * rows + r] * w(i, o): interleaved queries times keys
    else    y[r * stride_y + o] += sum over i < n of x[r * stride_x + i] * w(i, o): weights of slots times values

    w(i, o) is number i * step + (o // PANEL) * apart + o % PANEL of w. In a format with spans, this number is
    multiplied by a scale, which `fmt.span` neighbouring numbers of a head share (along i for keys, along o for values):

    scores  scale i // span * step + o
    else    scale i * ceil(step / span) + o // span; the first output begins a span, or all outputs are in one panel
    """
    w, scales, x, y = map(b.bytes_at, b.function.args[:4])
    n, step, apart, stride_x, stride_y, outs, rows = b.function.args[4:]
    x = b.bitcast(x, FLOAT.as_pointer())
    spans = b.udiv(b.add(step, WORD(fmt.span - 1)), WORD(fmt.span)) if fmt.span else step

    def group(count: int, panels: int, o: ir.Value) -> None:
        places = [b.add(o, WORD(PANEL * p)) for p in range(panels)]
        starts = [b.gep(w, [b.mul(b.mul(apart, b.udiv(at, WORD(PANEL))), WORD(fmt.bytes))]) for at in places]
        outs_at = {
            (r, p): b.gep(y, [b.mul(b.add(b.mul(stride_y, WORD(r)), at), WORD(4))])
            for r in range(count)
            for p, at in enumerate(places)
        }
        zero = ir.Constant(FLOATS, [0.0] * PANEL)
        sums = {rp: cgutils.alloca_once(b, FLOATS) for rp in outs_at}
        for rp, out in outs_at.items():
            b.store(zero if scores else b.load_vector(out, FLOAT, PANEL, 4), sums[rp])

        def add_products(i: ir.Value, factors: list[ir.Value]) -> None:
            near = [b.as_floats(b.gep(s, [b.mul(b.mul(i, step), WORD(fmt.bytes))]), fmt, PANEL) for s in starts]
            near = [b.fmul(values, factor) for values, factor in zip(near, factors, strict=True)] if fmt.span else near
            for r in range(count):
                at = b.add(b.mul(i, WORD(count)), WORD(r)) if scores else b.add(b.mul(stride_x, WORD(r)), i)
                number = b.spread(b.load(b.gep(x, [at]), align=4))
                for p in range(panels):
                    b.store(_add(b, FLOAT32, b.load(sums[r, p]), near[p], number), sums[r, p])

        if fmt.span and scores:
            with cgutils.for_range_slice(b, WORD(0), n, WORD(fmt.span), inc=True) as (begin, _):
                first = b.mul(b.udiv(begin, WORD(fmt.span)), step)
                begins = [b.gep(scales, [b.mul(b.add(first, at), WORD(2))]) for at in places]
                factors = [b.as_floats(at, FLOAT16, PANEL) for at in begins]
                end = b.add(begin, WORD(fmt.span))
                end = b.select(b.icmp_unsigned("<", end, n), end, n)
                with cgutils.for_range_slice(b, begin, end, WORD(1), inc=True) as (i, _):
                    add_products(i, factors)
        else:
            with cgutils.for_range(b, n) as loop:
                factors = []
                if fmt.span:
                    at = b.add(b.mul(loop.index, spans), b.udiv(o, WORD(fmt.span)))
                    factor = b.spread(b.load(b.place_at(scales, b.mul(at, WORD(2)), HALF), align=2))
                    factors = [b.fpext(factor, FLOATS)] * panels
                add_products(loop.index, factors)
        for rp, out in outs_at.items():
            b.store(b.load(sums[rp]), b.bitcast(out, FLOATS.as_pointer()), align=4)

    by_rows(b, FLOAT32, rows, outs, group, odd=True)


# --- sums in a fixed order -------------------------------------------------------------------------------------------


@vectors.emit(2, FLOAT)
def _total(b: Builder, squares: bool) -> None:
    """Generate the sum of a row, or of its squares: PANEL partial sums in order, which are then added pairwise. The
    code is generated explicitly, so that the order is the same in all callers; LLVM may vectorise a loop differently in
    each caller. Arguments: the address of the row, and its length."""
    x, count = b.bitcast(b.bytes_at(b.function.args[0]), FLOAT.as_pointer()), b.function.args[1]
    total = cgutils.alloca_once_value(b, ir.Constant(FLOATS, [0.0] * PANEL))
    whole = b.mul(b.udiv(count, WORD(PANEL)), WORD(PANEL))
    with cgutils.for_range_slice(b, WORD(0), whole, WORD(PANEL), inc=True) as (i, _):
        v = b.load_vector(b.gep(x, [i]), FLOAT, PANEL, 4)
        if squares:
            v = b.fmul(v, v)
        b.store(b.fadd(b.load(total), v), total)
    with cgutils.for_range_slice(b, whole, count, WORD(1), inc=True) as (i, _):
        one = b.load(b.gep(x, [i]), align=4)
        if squares:
            one = b.fmul(one, one)
        lane = b.trunc(b.sub(i, whole), INT)
        sums = b.load(total)
        b.store(b.insert_element(sums, b.fadd(b.extract_element(sums, lane), one), lane), total)
    b.ret(b.sum_of(b.load(total)))


@operation(types.float32, types.int64, types.int64)
def sum_of(b, address, count):
    return b.call(_total(b.module, False), [address, count])


@operation(types.float32, types.int64, types.int64)
def sum_of_squares(b, address, count):
    return b.call(_total(b.module, True), [address, count])
