"""The inner loop of products with weights in blocks. Each output has a scale, and in some formats a minimum, for each
group of columns.

Weights are stored in panels of PANEL outputs, and in spans of columns within a panel:

    scales   float16 [PANEL]  value of the integer 1, or of the factor 1
    minima   float16 [PANEL]  added to each weight; only in formats with minima
    groups

A group of columns within a span is

    factors  int8 [PANEL]     the scale of the group, in units of `scales`; absent if the group is the whole span
    factors  int8 [PANEL]     the minimum of the group, in units of `minima`; absent if the group is the whole span
    weights  8 bits: [columns / 4, PANEL, 4]
             4 bits: [columns / 8, PANEL, 4]  a byte holds two columns, i in its lower half and i + 4 in its upper half
    upper    the e upper bits of weights of 4 + e bits: [columns * e / 32, PANEL, 4]; byte j of 4 holds columns
             4 * q + j, each in the e bits from bit e * q on

A weight is scale * integer + minimum, as in the blocks of GGUF files, so no weight is rounded again. In formats with a
table, 4 bits are an index into this table. Scales that are powers of 2 are stored as an exponent of one byte.

Activations have 8 bits and a scale for each group. In *wide* formats (weights of 8 bits or with a table, on x86 without
byte dot products), activations are stored in 16 bits and multiplied in pairs: columns 0 and 2 of each four, then 1 and
3. The
products of a group are summed as integers, exactly; groups are added in order, so a row of the result is bitwise the
same alone and among other rows.
"""

from collections.abc import Iterator

from llvmlite import ir
from numba.core import cgutils

from slipstream.backends.native.kernels import processor, tiles
from slipstream.backends.native.kernels.formats import FLOAT16, Format
from slipstream.backends.native.kernels.processor import PANEL
from slipstream.backends.native.kernels.vectors import BYTE, FLOAT, FLOATS, INT, INTS, SHORTS, WORD, Builder, emit


def _scales(b: Builder, values: ir.Value, factors: ir.Value, fmt: Format) -> ir.Value:
    """PANEL scales or minima of a group as exact float32 values."""
    if not fmt.factors:
        return values
    return b.fmul(values, b.sitofp(b.load_vector(factors, BYTE, PANEL, 1), FLOATS))


def _powers(b: Builder, pointer: ir.Value) -> ir.Value:
    """PANEL powers of 2 as float32: byte e stands for 2^(e - 128). The two smallest powers are subnormal in float32."""

    def each(value: int) -> ir.Constant:
        return ir.Constant(INTS, [value] * PANEL)

    value = b.zext(b.load_vector(pointer, BYTE, PANEL, 1), INTS)
    small, usual = b.shl(each(1 << 21), value), b.shl(b.sub(value, each(1)), each(23))
    return b.bitcast(b.select(b.icmp_unsigned("<", value, each(2)), small, usual), FLOATS)


def _numbers(b: Builder, nibbles: ir.Value, table: tuple[int, ...]) -> ir.Value:
    """Replace bytes, which are indices into a table, by the table's numbers, stored like weights of 8 bits."""
    count, name = processor.lookup()
    kind = ir.VectorType(BYTE, count)
    near = ir.Constant(kind, [(x + processor.byte_offset()) % 256 for x in table] * (count // 16))
    found = [b.call_builtin(name, kind, near, b.bitcast(part, kind)) for part in b.split(nibbles, count // 4)]
    return b.join([b.bitcast(part, ir.VectorType(INT, count // 4)) for part in found])


def _quads(b: Builder, pointer: ir.Value, fmt: Format, upper: ir.Value | None, step: int) -> Iterator[ir.Value]:
    """Yield the weights at `pointer` as vectors of four columns of PANEL outputs, or in wide formats of two columns in
    16 bits. upper: a vector that contains the upper bits of quad number `step`."""
    whole = b.load_vector(pointer, INT, PANEL, 4)
    if fmt.bits == 8 and not fmt.wide:
        yield whole
        return
    if fmt.table:
        low, upper, lower = (ir.Constant(INTS, [x] * PANEL) for x in (0x0F0F0F0F, 0xFF00FF00, 0x00FF00FF))
        for shift in (0, 4):
            whole = b.load_vector(pointer, INT, PANEL, 4)
            numbers = _numbers(b, b.and_(b.lshr(whole, ir.Constant(INTS, [shift] * PANEL)), low), fmt.table)
            if not fmt.wide:
                yield numbers
                continue
            yield b.bitcast(b.and_(numbers, lower), SHORTS)
            yield b.bitcast(b.lshr(b.and_(numbers, upper), ir.Constant(INTS, [8] * PANEL)), SHORTS)
        return
    kind, low, shift = (SHORTS, 0xFF, 8) if fmt.wide else (INTS, 0x0F0F0F0F, 4)
    for k in range(2):
        if k and processor.adds_pairs():  # loading it again costs less than keeping it in a register
            whole = b.load_vector(pointer, INT, PANEL, 4)
        quad = b.bitcast(whole, kind)
        quad = b.lshr(quad, ir.Constant(kind, [shift] * kind.count)) if k else quad
        quad = b.and_(quad, ir.Constant(kind, [low] * kind.count))
        if upper is not None:
            right = (step + k) * fmt.upper % 8 - 4
            shifts, mask = (ir.Constant(INTS, [x] * PANEL) for x in (abs(right), 0x10101010 * (2**fmt.upper - 1)))
            more = b.load_vector(upper, INT, PANEL, 4)
            quad = b.or_(quad, b.and_(b.lshr(more, shifts) if right > 0 else b.shl(more, shifts), mask))
        yield quad


def _add_narrow(b: Builder, total: ir.Value, weights: ir.Value, number: ir.Value) -> ir.Value:
    """Add two products of 8-bit integers to each sum of 16 bits, by pmaddubsw."""
    lanes = min(processor.lanes(), 8)  # AVX-512 without VNNI may lack pmaddubsw for 512 bits
    name = "llvm.x86.ssse3.pmadd.ub.sw.128" if lanes == 4 else "llvm.x86.avx2.pmadd.ub.sw"
    small, shorts = ir.VectorType(BYTE, 4 * lanes), ir.VectorType(SHORTS.element, 2 * lanes)
    parts = zip(b.split(weights, lanes), b.split(number, lanes), strict=True)
    sums = [b.call_builtin(name, shorts, b.bitcast(w, small), b.bitcast(n, small)) for w, n in parts]
    return b.add(total, b.join(sums))


def _settle(b: Builder, sums: list[ir.Value]) -> None:
    """Force all sums into registers before the next step, by making them operands of an empty assembly instruction.
    Without it, LLVM computes row after row and keeps the weights of all steps in memory."""
    lanes = sums[0].type.pointee.count * processor.lanes() // PANEL
    parts = [b.take(v, range(at, at + lanes)) for v in map(b.load, sums) for at in range(0, v.type.count, lanes)]
    count, kinds = len(parts), [part.type for part in parts]
    operands = ",".join(["=x"] * count + [str(i) for i in range(count)] + ["~{memory}"])
    result = b.asm(ir.FunctionType(ir.LiteralStructType(kinds), kinds), "", operands, parts, True)
    parts = [b.extract_value(result, i) for i in range(count)]
    for r, total in enumerate(sums):
        b.store(b.join(parts[r * count // len(sums) : (r + 1) * count // len(sums)]), total)


@emit(10)
def block_tile(b: Builder, fmt: Format) -> None:
    """See `tiles.matrix_tile`. x of a tile: units float32 [groups, rows], first sums int32 [groups, rows], sums
    float32 [groups, rows], quads [groups, rows, group / 4] (wide formats: pairs [groups, rows, group / 2]). A unit is
    the value of the integer 1. First sums compensate the offset of stored weights, see `Format.added`. Sums are of a
    group's activations; the group's minimum is multiplied by its sum."""
    w, scales, bias, x, y = map(b.bytes_at, b.function.args[:5])
    columns, outs, rows, stride, onto = b.function.args[5:]
    groups, span = b.udiv(columns, WORD(fmt.group)), fmt.group * fmt.groups
    panel_bytes = b.mul(b.udiv(columns, WORD(span)), WORD(fmt.span_bytes))
    steps, words = fmt.group // 4, fmt.group * (1 + fmt.wide) // 4
    narrow = not fmt.offset and not processor.has_byte_dots() and not processor.is_arm()
    run = 2 if fmt.upper else steps  # 16 bits hold 8 sums of two products of 15 and 127, and 2 of 63 and 127
    add = _add_narrow if narrow else tiles.add_pairs if fmt.wide else tiles.add_quads
    zero, no_sum = ir.Constant(FLOATS, [0.0] * PANEL), ir.Constant(INTS, [0] * PANEL)
    no_short_sum, ones = (ir.Constant(SHORTS, [value] * 2 * PANEL) for value in (0, 1))

    def group(count: int, panels: int, o: ir.Value) -> None:
        assert panels == 1
        start = b.gep(w, [b.mul(b.udiv(o, WORD(PANEL)), panel_bytes)])
        per_row = b.mul(groups, WORD(4 * count))  # bytes of one number for each group and row
        units, first = b.bitcast(x, FLOAT.as_pointer()), b.place_at(x, per_row, INT)
        wholes = b.place_at(x, b.mul(per_row, WORD(2)), FLOAT)
        numbers = b.place_at(x, b.mul(per_row, WORD(3)), INT)
        totals = [cgutils.alloca_once(b, FLOATS) for _ in range(count)]
        sums = [cgutils.alloca_once(b, INTS) for _ in range(count)]
        sums_of_run = [cgutils.alloca_once(b, SHORTS) for _ in range(count)] if narrow else sums
        for total in totals:
            b.store(zero, total)

        def one(block: ir.Value, g: ir.Value, scale: ir.Value, minimum: ir.Value) -> None:
            """Add the products of one group of columns to `block`."""
            at = b.mul(g, WORD(count))
            near = b.gep(numbers, [b.mul(at, WORD(words))])
            firsts = [b.gep(first, [b.add(at, WORD(r))]) for r in range(count)] if fmt.added else []
            for r in range(count):
                b.store(b.spread(b.load(firsts[r], align=4)) if firsts and not narrow else no_sum, sums[r])
            for step in range(0, steps, 2 if fmt.bits < 8 else 1):
                place = b.gep(block, [WORD(fmt.group_heading + step * PANEL * (2 if fmt.bits < 8 else 4))])
                b.fetch_ahead(place)
                upper = None
                if fmt.upper:
                    above = PANEL * (fmt.group // 2 + step * fmt.upper // 8 * 4)
                    upper = b.gep(block, [WORD(fmt.group_heading + above)])
                    if step * fmt.upper % 8 == 0:
                        b.fetch_ahead(upper)
                for k, weights in enumerate(_quads(b, place, fmt, upper, step)):
                    for r in range(count):
                        if narrow and (step + k) % run == 0:
                            b.store(no_short_sum, sums_of_run[r])
                        number = b.spread(b.load(b.gep(near, [WORD(words * r + step * (1 + fmt.wide) + k)]), align=4))
                        b.store(add(b, b.load(sums_of_run[r]), weights, number), sums_of_run[r])
                    if processor.adds_pairs() and not fmt.upper:
                        _settle(b, sums_of_run)
                    if narrow and (step + k + 1) % run == 0:
                        for each, total in zip(sums_of_run, sums, strict=True):
                            b.store(b.add(b.load(total), tiles.pair_products(b, b.load(each), ones)), total)
                        if fmt.upper and processor.adds_pairs():
                            _settle(b, sums)
            if scale is not None:
                scale = _scales(b, scale, block, fmt)
            if minimum is not None:
                minimum = _scales(b, minimum, b.gep(block, [WORD(PANEL)]), fmt)
            for r in range(count):
                whole = b.load(sums[r])
                if firsts and narrow:
                    whole = b.add(whole, b.spread(b.load(firsts[r], align=4)))
                part = b.sitofp(whole, FLOATS)
                if scale is not None:
                    part = b.fmul(part, scale)
                unit = b.spread(b.load(b.gep(units, [b.add(at, WORD(r))]), align=4))
                total = b.multiply_add(part, unit, b.load(totals[r]))
                if minimum is not None:
                    sum_of = b.spread(b.load(b.gep(wholes, [b.add(at, WORD(r))]), align=4))
                    total = b.multiply_add(minimum, sum_of, total)
                b.store(total, totals[r])

        with cgutils.for_range(b, b.udiv(columns, WORD(span))) as outer:
            block = b.gep(start, [b.mul(outer.index, WORD(fmt.span_bytes))])
            scale = None
            if fmt.span:
                scale = _powers(b, block) if fmt.powers else b.as_floats(block, FLOAT16, PANEL)
            minimum = b.as_floats(b.gep(block, [WORD(2 * PANEL)]), FLOAT16, PANEL) if fmt.minima else None
            block = b.gep(block, [WORD(fmt.heading)])
            with cgutils.for_range(b, WORD(fmt.groups)) as inner:
                g = b.add(b.mul(outer.index, WORD(fmt.groups)), inner.index)
                one(b.gep(block, [b.mul(inner.index, WORD(fmt.group_bytes))]), g, scale, minimum)
        sums_of = {(r, 0): b.load(total) for r, total in enumerate(totals)}
        if not fmt.span:
            tiles.scale_sums(b, sums_of, [o], scales)
        tiles.store_sums(b, sums_of, [o], y, bias, stride, onto)

    tiles.by_rows(b, fmt, rows, outs, group, odd=False)


@emit(6)
def round_groups(b: Builder, group: int, width: int) -> None:
    """Round a row to integers in [-127, 127], and write it as row r of the `count` rows of a tile, in `width` bits; see
    `block_tile`. The largest absolute value of each group becomes 127. The code is generated explicitly, because LLVM
    does not vectorise loops over columns that are not contiguous, or loops for the maximum of floats.

    Arguments: x (address of float32 [columns]), tile (address), r, count, columns, added (see `Format`).
    """
    x, tile = map(b.bytes_at, b.function.args[:2])
    r, count, columns, added = b.function.args[2:]
    floats, integers = ir.VectorType(FLOAT, group), ir.VectorType(INT, group)

    per_number = b.mul(b.udiv(columns, WORD(group)), b.mul(count, WORD(4)))  # bytes of one number for each group
    units, quads = b.bitcast(tile, FLOAT.as_pointer()), b.gep(tile, [b.mul(per_number, WORD(3))])
    firsts, sums = b.place_at(tile, per_number, INT), b.place_at(tile, b.mul(per_number, WORD(2)), FLOAT)
    with cgutils.for_range(b, b.udiv(columns, WORD(group))) as loop:
        values = b.load_vector(b.gep(x, [b.mul(loop.index, WORD(4 * group))]), FLOAT, group, 4)
        bits = b.and_(b.bitcast(values, integers), ir.Constant(integers, [0x7FFFFFFF] * group))
        top = b.bitcast(b.call_builtin(f"llvm.vector.reduce.smax.v{group}i32", INT, bits), FLOAT)  # NaN if there is one
        least = FLOAT(1e-30)
        factor = b.fdiv(FLOAT(127), b.select(b.fcmp_ordered(">", top, least), top, least))
        half = ir.Constant(floats, [0.5] * group)
        scaled = b.multiply_add(values, b.spread(factor, group), half)
        whole = b.fptosi(b.call_builtin(f"llvm.floor.v{group}f32", floats, scaled), integers)
        total = b.call_builtin(f"llvm.vector.reduce.add.v{group}i32", INT, whole)
        unit, at = b.fdiv(top, FLOAT(127)), b.add(b.mul(loop.index, count), r)
        b.store(unit, b.gep(units, [at]), align=4)
        b.store(b.neg(b.mul(total, b.trunc(added, INT))), b.gep(firsts, [at]), align=4)
        b.store(b.fmul(unit, b.sitofp(total, FLOAT)), b.gep(sums, [at]), align=4)
        narrow = b.trunc(whole, ir.VectorType(ir.IntType(width), group))
        if width == 16:
            narrow = b.take(narrow, [i + j for i in range(0, group, 4) for j in (0, 2, 1, 3)])
        b.store(narrow, b.place_at(quads, b.mul(at, WORD(group * width // 8)), narrow.type), align=4)
    b.ret_void()
