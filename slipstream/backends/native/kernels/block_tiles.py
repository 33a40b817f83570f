"""The inner loop of products with weights in blocks: a scale, and a minimum, for each output and group of columns.

Weights are stored in panels of PANEL outputs, and in spans of columns within a panel:

    scales   float16 [PANEL]  value of the integer 1, or of the factor 1
    minima   float16 [PANEL]  added to each weight; absent in formats without
    groups

A group of columns within a span is

    factors  int8 [PANEL]     the scale of the group, in units of `scales`; absent if the group is the whole span
    factors  int8 [PANEL]     the same for minima
    weights  8 bits: [columns / 4, PANEL, 4]
             4 bits: [columns / 8, PANEL, 4]  a byte holds two columns, i in its lower half and i + 4 in its upper half

so a weight is scale * integer + minimum, as in the blocks of GGUF files: nothing is rounded again. Activations have 8
bits and a scale for each group. The products of a group are summed as integers, exactly; groups are added in order, so
a row of the result is bitwise the same alone and among other rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.kernels.formats import FLOAT16, Format
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.kernels.tiles import add_quads, by_rows, pair_products, scale_sums, store_sums
from slipstream.backends.native.kernels.vectors import (
    BYTE,
    CONTRACT,
    FLOAT,
    INT,
    SHORT,
    WORD,
    as_floats,
    bytes_at,
    join,
    load_vector,
    new_function,
    place_at,
    split,
    spread,
)

_FLOATS, _INTS = ir.VectorType(FLOAT, PANEL), ir.VectorType(INT, PANEL)


def _scales(b: ir.IRBuilder, values: Any, factors: Any, form: Format) -> Any:
    """PANEL scales or minima of a group as float32: exact."""
    if not form.factors:
        return values
    return b.fmul(values, b.sitofp(load_vector(b, factors, BYTE, PANEL, 1), _FLOATS))


def _quads(b: ir.IRBuilder, pointer: Any, form: Format) -> list[Any]:
    """The weights at `pointer`, four columns of PANEL outputs in each vector."""
    whole = load_vector(b, pointer, INT, PANEL, 4)
    if form.bits == 8:
        return [whole]
    low = ir.Constant(_INTS, [0x0F0F0F0F] * PANEL)
    return [b.and_(whole, low), b.and_(b.lshr(whole, ir.Constant(_INTS, [4] * PANEL)), low)]


def _narrow(form: Format) -> bool:
    """Whether the products of a group are summed in 16 bits: 4-bit weights by pmaddubsw, where x86 has no byte dot
    products. At most 8 sums of two products of 15 and 127 are below 2^15."""
    return form.bits == 4 and not processor.has_byte_dots() and not processor.is_arm()


def _add_narrow(b: ir.IRBuilder, total: Any, weights: Any, number: Any) -> Any:
    """Two products of 8-bit integers added to each sum of 16 bits."""
    lanes = min(processor.lanes(), 8)  # AVX-512 without VNNI may lack the wide one, too
    name = "llvm.x86.ssse3.pmadd.ub.sw.128" if lanes == 4 else "llvm.x86.avx2.pmadd.ub.sw"
    small, shorts = ir.VectorType(BYTE, 4 * lanes), ir.VectorType(SHORT, 2 * lanes)
    multiply = cgutils.get_or_insert_function(b.module, ir.FunctionType(shorts, [small, small]), name)
    parts = zip(split(b, weights, lanes), split(b, number, lanes), strict=True)
    return b.add(total, join(b, [b.call(multiply, [b.bitcast(w, small), b.bitcast(n, small)]) for w, n in parts]))


def block_tile(module: ir.Module, form: Format) -> ir.Function:
    """See `tiles.matrix_tile`. x of a tile: units float32 [groups, rows], first sums int32 [groups, rows], sums
    float32 [groups, rows], quads [groups, rows, group / 4]. A unit is the value of the integer 1; first sums compensate
    the offset of unsigned weights; the sum of a group's activations is what its minimum is multiplied with."""
    name = f"slipstream_tile_{form.name}"
    tile = new_function(module, name, 10)
    if tile is None:
        return module.get_global(name)
    b = ir.IRBuilder(tile.append_basic_block())
    w, scales, bias, x, y = (bytes_at(b, each) for each in tile.args[:5])
    columns, outs, rows, stride, onto = tile.args[5:]
    groups, span = b.udiv(columns, WORD(form.group)), form.group * form.groups
    panel_bytes = b.mul(b.udiv(columns, WORD(span)), WORD(form.span_bytes))
    steps = form.group // 4
    narrow = _narrow(form)
    kind = ir.VectorType(SHORT, 2 * PANEL) if narrow else _INTS
    add = _add_narrow if narrow else add_quads
    zero = ir.Constant(_FLOATS, [0.0] * PANEL)

    def group(count: int, panels: int, o: Any) -> None:
        assert panels == 1
        start = b.gep(w, [b.mul(b.udiv(o, WORD(PANEL)), panel_bytes)])
        per_row = b.mul(groups, WORD(4 * count))  # bytes of one number a group and row
        units, first = b.bitcast(x, FLOAT.as_pointer()), place_at(b, x, per_row, INT)
        wholes = place_at(b, x, b.mul(per_row, WORD(2)), FLOAT)
        numbers = place_at(b, x, b.mul(per_row, WORD(3)), INT)
        totals = [cgutils.alloca_once(b, _FLOATS) for _ in range(count)]
        sums = [cgutils.alloca_once(b, kind) for _ in range(count)]
        for total in totals:
            b.store(zero, total)

        def one(block: Any, g: Any, scale: Any, minimum: Any) -> None:
            """Add the products of a group of columns."""
            at = b.mul(g, WORD(count))
            near = b.gep(numbers, [b.mul(at, WORD(steps))])
            for r in range(count):
                begin = ir.Constant(kind, [0] * kind.count)
                if form.bits == 8:
                    begin = spread(b, b.load(b.gep(first, [b.add(at, WORD(r))]), align=4))
                b.store(begin, sums[r])
            for step in range(0, steps, 8 // form.bits):
                place = b.gep(block, [WORD(form.group_heading + step * PANEL * form.bits // 2)])
                for k, weights in enumerate(_quads(b, place, form)):
                    for r in range(count):
                        number = spread(b, b.load(b.gep(near, [WORD(steps * r + step + k)]), align=4))
                        b.store(add(b, b.load(sums[r]), weights, number), sums[r])
            if scale is not None:
                scale = _scales(b, scale, block, form)
            if minimum is not None:
                minimum = _scales(b, minimum, b.gep(block, [WORD(PANEL)]), form)
            for r in range(count):
                whole = b.load(sums[r])
                if narrow:
                    whole = pair_products(b, whole, ir.Constant(kind, [1] * kind.count))
                part = b.sitofp(whole, _FLOATS)
                if scale is not None:
                    part = b.fmul(part, scale)
                unit = spread(b, b.load(b.gep(units, [b.add(at, WORD(r))]), align=4))
                total = b.fadd(b.load(totals[r]), b.fmul(part, unit, flags=CONTRACT), flags=CONTRACT)
                if minimum is not None:
                    sum_of = spread(b, b.load(b.gep(wholes, [b.add(at, WORD(r))]), align=4))
                    total = b.fadd(total, b.fmul(minimum, sum_of, flags=CONTRACT), flags=CONTRACT)
                b.store(total, totals[r])

        with cgutils.for_range(b, b.udiv(columns, WORD(span))) as outer:
            block = b.gep(start, [b.mul(outer.index, WORD(form.span_bytes))])
            scale = as_floats(b, block, FLOAT16, PANEL) if form.span else None
            minimum = as_floats(b, b.gep(block, [WORD(2 * PANEL)]), FLOAT16, PANEL) if form.minima else None
            block = b.gep(block, [WORD(form.heading)])
            with cgutils.for_range(b, WORD(form.groups)) as inner:
                g = b.add(b.mul(outer.index, WORD(form.groups)), inner.index)
                one(b.gep(block, [b.mul(inner.index, WORD(form.group_bytes))]), g, scale, minimum)
        made = {(r, 0): b.load(total) for r, total in enumerate(totals)}
        if not form.span:
            scale_sums(b, made, [o], scales)
        store_sums(b, made, [o], y, bias, stride, onto)

    by_rows(b, form, rows, outs, group, odd=False)
    return tile


def round_groups(module: ir.Module, group: int) -> ir.Function:
    """Round a row to integers in [-127, 127], 127 at the largest absolute value of each group, and write it as row r of
    the `count` rows of a tile; see `block_tile`. Generated explicitly: loops over columns that are not contiguous, or
    whose maximum is a float, are not vectorised.

    Arguments: x (address of float32 [columns]), tile (address), r, count, columns.
    """
    name = f"slipstream_round_{group}"
    function = new_function(module, name, 5)
    if function is None:
        return module.get_global(name)
    b = ir.IRBuilder(function.append_basic_block())
    x, tile = (bytes_at(b, each) for each in function.args[:2])
    r, count, columns = function.args[2:]
    floats, integers = ir.VectorType(FLOAT, group), ir.VectorType(INT, group)

    def built_in(name: str, result: ir.Type, argument: Any) -> Any:
        """The result of one of LLVM's functions of a vector."""
        suffix = f".v{group}{'f32' if argument.type == floats else 'i32'}"
        kind = ir.FunctionType(result, [argument.type])
        return b.call(cgutils.get_or_insert_function(module, kind, name + suffix), [argument])

    per_number = b.mul(b.udiv(columns, WORD(group)), b.mul(count, WORD(4)))  # bytes of one number for each group
    units, quads = b.bitcast(tile, FLOAT.as_pointer()), b.gep(tile, [b.mul(per_number, WORD(3))])
    firsts, sums = place_at(b, tile, per_number, INT), place_at(b, tile, b.mul(per_number, WORD(2)), FLOAT)
    with cgutils.for_range(b, b.udiv(columns, WORD(group))) as loop:
        values = load_vector(b, b.gep(x, [b.mul(loop.index, WORD(4 * group))]), FLOAT, group, 4)
        bits = b.and_(b.bitcast(values, integers), ir.Constant(integers, [0x7FFFFFFF] * group))
        top = b.bitcast(built_in("llvm.vector.reduce.smax", INT, bits), FLOAT)  # NaN if there is one
        least = FLOAT(1e-30)
        factor = b.fdiv(FLOAT(127), b.select(b.fcmp_ordered(">", top, least), top, least))
        half = ir.Constant(floats, [0.5] * group)
        scaled = b.fadd(b.fmul(values, spread(b, factor, group), flags=CONTRACT), half, flags=CONTRACT)
        whole = b.fptosi(built_in("llvm.floor", floats, scaled), integers)
        total = built_in("llvm.vector.reduce.add", INT, whole)
        unit, at = b.fdiv(top, FLOAT(127)), b.add(b.mul(loop.index, count), r)
        b.store(unit, b.gep(units, [at]), align=4)
        b.store(b.mul(total, INT(-processor.byte_offset())), b.gep(firsts, [at]), align=4)
        b.store(b.fmul(unit, b.sitofp(total, FLOAT)), b.gep(sums, [at]), align=4)
        narrow = ir.VectorType(BYTE, group)
        b.store(b.trunc(whole, narrow), place_at(b, quads, b.mul(at, WORD(group)), narrow), align=4)
    b.ret_void()
    return function
