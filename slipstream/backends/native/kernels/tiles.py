"""The inner loops of matrix products and of attention: sums that stay in vector registers.

Tiles of all sizes add their products in the same order, so a row of the result is bitwise the same alone and among
other rows.

A *tile* is up to `most_rows` rows of activations times a multiple of PANEL outputs. Weights are stored in panels:

    element   float32, float16 or bfloat16       [out / PANEL, in, PANEL]            one column a step
    pair      bfloat16 or int8                   [out / PANEL, in / 2, PANEL, 2]     two columns a step
    quad      int8                               [out / PANEL, in / 4, PANEL, 4]     four columns a step

so that one load gets the weights of PANEL outputs for one step. The activations of a tile are interleaved,
[in / step, rows], so that one address is enough for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.backends.native.kernels import processor
from slipstream.backends.native.kernels.processor import PANEL

_FLOAT, _INT, _WORD, _BYTE, _HALF = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8), ir.HalfType()
_SHORT = ir.IntType(16)
_FLOATS, _INTS = ir.VectorType(_FLOAT, PANEL), ir.VectorType(_INT, PANEL)
_CONTRACT = ("contract",)  # allows fused multiply-add


@dataclass(frozen=True)
class Format:
    """How the weights of a matrix are stored and multiplied.

    name     as in function names
    step     columns per step of the inner loop
    bytes    per weight
    passes   number of parts that an activation is split into
    grouped  whether activations have a scale per group of columns instead of one per row
    """

    name: str
    step: int
    bytes: int
    passes: int = 1
    grouped: bool = False

    @property
    def integer(self) -> bool:
        return self.bytes == 1

    def panels(self, rows: int) -> int:
        """Number of panels in a tile of `rows` rows such that its sums stay in registers; 0 if none fits."""
        each = PANEL // processor.lanes()  # registers that PANEL sums fill
        room = processor.registers() // each
        return next((p for p in (4, 2, 1) if (rows * self.passes + 1) * p < room), 0)

    @property
    def most_rows(self) -> int:
        """Rows of the largest tile. A tile of two panels uses each loaded activation twice: measured 1.1 to 1.5 times
        as fast as one panel, if there are enough registers."""
        least = 2 if self.panels(2) > 2 else 1
        return max(1, *(rows for rows in range(1, 13) if self.panels(rows) >= least))


FLOAT32, FLOAT16, BFLOAT16 = Format("float32", 1, 4), Format("float16", 1, 2), Format("bfloat16", 1, 2)
BFLOAT16_PAIRS = Format("bfloat16_pairs", 2, 2)
INT8_PAIRS = Format("int8_pairs", 2, 1)
INT8_QUADS = Format("int8_quads", 4, 1, grouped=True)
INT8_QUADS_TWICE = Format("int8_quads_twice", 4, 1, passes=2)
FORMATS = (FLOAT32, FLOAT16, BFLOAT16, BFLOAT16_PAIRS, INT8_PAIRS, INT8_QUADS, INT8_QUADS_TWICE)


# --- vectors ---------------------------------------------------------------------------------------------------------


def _load(b: ir.IRBuilder, pointer: Any, element: ir.Type, count: int, align: int) -> Any:
    return b.load(b.bitcast(pointer, ir.VectorType(element, count).as_pointer()), align=align)


def _take(b: ir.IRBuilder, v: Any, lanes: range | list[int]) -> Any:
    return b.shuffle_vector(
        v, ir.Constant(v.type, ir.Undefined), ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes))
    )


def _spread(b: ir.IRBuilder, number: Any) -> Any:
    """A 32-bit number in every lane."""
    kind = ir.VectorType(number.type, PANEL)
    return _take(b, b.insert_element(ir.Constant(kind, ir.Undefined), number, _INT(0)), [0] * PANEL)


def _split(b: ir.IRBuilder, v: Any, lanes: int) -> list[Any]:
    """Split a vector of PANEL lanes into vectors of the processor's width."""
    return [v] if lanes == PANEL else [_take(b, v, range(at, at + lanes)) for at in range(0, PANEL, lanes)]


def _join(b: ir.IRBuilder, parts: list[Any]) -> Any:
    while len(parts) > 1:
        both = 2 * parts[0].type.count
        parts = [
            b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_INT, both), list(range(both))))
            for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not have."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def as_floats(b: ir.IRBuilder, pointer: Any, form: Format, count: int) -> Any:
    """`count` weights from `pointer` on, widened to float32: exact."""
    if form is FLOAT32:
        return _load(b, pointer, _FLOAT, count, 4)
    if form is FLOAT16:
        return b.fpext(_load(b, pointer, _HALF, count, 2), ir.VectorType(_FLOAT, count))
    wide = ir.VectorType(_INT, count)  # a bfloat16 is the upper half of a float32
    upper = b.zext(_load(b, pointer, _SHORT, count, 2), wide)
    return b.bitcast(b.shl(upper, ir.Constant(wide, [16] * count)), ir.VectorType(_FLOAT, count))


# --- one step: weights of PANEL outputs times one number of a row, added to sums -------------------------------------


def _weights(b: ir.IRBuilder, pointer: Any, form: Format) -> Any:
    """The weights of PANEL outputs for one step."""
    if form.step == 1:
        return as_floats(b, pointer, form, PANEL)
    if form is INT8_PAIRS:
        return b.sext(_load(b, pointer, _BYTE, 2 * PANEL, 1), ir.VectorType(_SHORT, 2 * PANEL))
    return _load(b, pointer, _INT, PANEL, 4)


def _add(b: ir.IRBuilder, form: Format, total: Any, weights: Any, number: Any) -> Any:
    """total + weights * number; number: 32 bits in every lane, of `step` activations."""
    if form.step == 1:
        return b.fadd(total, b.fmul(number, weights, flags=_CONTRACT), flags=_CONTRACT)
    if form is INT8_PAIRS:
        return b.add(total, _pair_products(b, weights, b.bitcast(number, ir.VectorType(_SHORT, 2 * PANEL))))
    if form is BFLOAT16_PAIRS:
        pairs = ir.VectorType(_BFloat(), 2 * PANEL)
        kind = ir.FunctionType(_FLOATS, [_FLOATS, pairs, pairs])
        dot = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return b.call(dot, [total, b.bitcast(weights, pairs), b.bitcast(number, pairs)])
    return _add_quads(b, total, weights, number)


def _pair_products(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """Products of 16-bit integers, added in pairs; LLVM compiles this to one instruction (pmaddwd)."""
    wide = ir.VectorType(_INT, 2 * PANEL)
    product = b.mul(b.sext(x, wide), b.sext(y, wide))
    return b.add(_take(b, product, range(0, 2 * PANEL, 2)), _take(b, product, range(1, 2 * PANEL, 2)))


def _add_quads(b: ir.IRBuilder, total: Any, weights: Any, number: Any) -> Any:
    """Four products of 8-bit integers added to each sum: weights unsigned on x86, signed on Arm, activations signed."""
    if processor.is_arm():
        lanes, name, form = 4, "llvm.aarch64.neon.sdot.v4i32.v16i8", ir.VectorType(_BYTE, 16)
    else:
        lanes = min(processor.lanes(), 16)
        name, form = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", ir.VectorType(_INT, lanes)
    sums = ir.VectorType(_INT, lanes)
    dot = cgutils.get_or_insert_function(b.module, ir.FunctionType(sums, [sums, form, form]), name)
    parts = zip(_split(b, total, lanes), _split(b, weights, lanes), _split(b, number, lanes), strict=True)
    return _join(b, [b.call(dot, [t, b.bitcast(w, form), b.bitcast(n, form)]) for t, w, n in parts])


# --- tiles of a matrix -----------------------------------------------------------------------------------------------


def _by_rows(
    b: ir.IRBuilder, form: Format, rows: Any, outs: Any, group: Callable[[int, int, Any], None], odd: bool
) -> None:
    """Generate code that calls `group(count, panels, o)` for the number of rows at run time and for all outputs o. odd:
    the number of outputs need not be a multiple of a tile's panels. Ends the function."""
    end = b.append_basic_block("end")
    choice = b.switch(rows, end)
    for count in range(1, form.most_rows + 1):
        block = b.append_basic_block(f"rows{count}")
        choice.add_case(_WORD(count), block)
        b.position_at_end(block)
        panels = form.panels(count) if not odd else min(2, form.panels(count))
        stop = b.mul(b.udiv(outs, _WORD(PANEL * panels)), _WORD(PANEL * panels))
        with cgutils.for_range_slice(b, _WORD(0), stop, _WORD(PANEL * panels), inc=True) as (o, _):
            group(count, panels, o)
        if panels > 1:
            with cgutils.for_range_slice(b, stop, outs, _WORD(PANEL), inc=True) as (o, _):
                group(count, 1, o)
        b.branch(end)
    b.position_at_end(end)
    b.ret_void()


def _function(module: ir.Module, name: str, count: int) -> ir.Function | None:
    """A new function with `count` 64-bit integer arguments; None if the module already has one of this name."""
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * count)
    function = cgutils.get_or_insert_function(module, kind, name)
    if not function.is_declaration:
        return None
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    return function


def _bytes_at(b: ir.IRBuilder, address: Any) -> Any:
    return b.inttoptr(address, _BYTE.as_pointer())


def _at(b: ir.IRBuilder, pointer: Any, byte: Any, kind: ir.Type) -> Any:
    """Pointer to the address + `byte` bytes."""
    return b.bitcast(b.gep(pointer, [byte]), kind.as_pointer())


def _matrix_tile(module: ir.Module, form: Format) -> ir.Function:
    """y[r * stride + o] = (add ? y[...] : 0) + bias[o] + sum over columns of x[r] * w[o], for r < rows and o < outs.

    Arguments: w, scales, bias, x, y (addresses), columns, group, outs, rows, stride (of y, in floats), add (0 or 1).

    x of a tile, by its format:
        float32, float16, bfloat16   float32 [columns, rows]
        bfloat16_pairs               pairs of bfloat16 [columns / 2, rows]
        int8_pairs                   units float32 [rows], then pairs of int16 [columns / 2, rows]
        int8_quads                   units float32 [groups, rows], first sums int32 [groups, rows], quads [columns / 4,
                                     rows]
        int8_quads_twice             units float32 [rows], first sums int32 [2, rows], quads [columns / 4, 2, rows]:
                                     upper bytes, then lower ones
    A unit is the value of the integer 1; first sums compensate the offset of unsigned weights.
    """
    name = f"slipstream_tile_{form.name}"
    made = _function(module, name, 11)
    if made is None:
        return module.get_global(name)
    b = ir.IRBuilder(made.append_basic_block())
    w, scales, bias, x, y = (_bytes_at(b, each) for each in made.args[:5])
    columns, length, outs, rows, stride, add = made.args[5:]
    kept = b.sitofp(add, _FLOAT)
    steps = b.udiv(columns, _WORD(form.step))
    panel_bytes = b.mul(columns, _WORD(PANEL * form.bytes))
    step_bytes = PANEL * form.bytes * form.step

    def group(count: int, panels: int, o: Any) -> None:
        each = [(r, p) for r in range(count) for p in range(panels)]
        places = [b.add(o, _WORD(PANEL * p)) for p in range(panels)]
        starts = [b.gep(w, [b.mul(b.udiv(at, _WORD(PANEL)), panel_bytes)]) for at in places]
        groups = b.udiv(columns, length) if form.grouped else _WORD(1)
        units = b.bitcast(x, _FLOAT.as_pointer())
        per_row = b.mul(groups, _WORD(4 * count))  # bytes of one number a group and row
        heading = {INT8_PAIRS: 1, INT8_QUADS: 2, INT8_QUADS_TWICE: 3}.get(form, 0)
        numbers = b.gep(x, [b.mul(per_row, _WORD(heading))])
        first = _at(b, x, per_row, _INT)
        zero = ir.Constant(_INTS, [0] * PANEL) if form.integer else ir.Constant(_FLOATS, [0.0] * PANEL)

        def sum_up(low: Any, high: Any, sums: dict[tuple[int, int, int], Any]) -> None:
            """Add steps low..high-1."""
            with cgutils.for_range_slice(b, low, high, _WORD(1), inc=True) as (i, _):
                kind = _FLOAT if form.step == 1 else _INT
                row = _at(b, numbers, b.mul(i, _WORD(4 * count * form.passes)), kind)
                near = [_weights(b, b.gep(start, [b.mul(i, _WORD(step_bytes))]), form) for start in starts]
                for k in range(form.passes):
                    for r in range(count):
                        number = _spread(b, b.load(b.gep(row, [_WORD(k * count + r)]), align=4))
                        for p in range(panels):
                            place = sums[k, r, p]
                            b.store(_add(b, form, b.load(place), near[p], number), place)

        if form.grouped:
            totals = {rp: cgutils.alloca_once_value(b, ir.Constant(_FLOATS, [0.0] * PANEL)) for rp in each}
            for rp in each:
                b.store(ir.Constant(_FLOATS, [0.0] * PANEL), totals[rp])
            sums = {(0, r, p): cgutils.alloca_once(b, _INTS) for r, p in each}
            per_group = b.udiv(length, _WORD(form.step))
            with cgutils.for_range_slice(b, _WORD(0), groups, _WORD(1), inc=True) as (g, _):
                at = b.mul(g, _WORD(count))
                for r in range(count):
                    begin = _spread(b, b.load(b.gep(first, [b.add(at, _WORD(r))]), align=4))
                    for p in range(panels):
                        b.store(begin, sums[0, r, p])
                low = b.mul(g, per_group)
                sum_up(low, b.add(low, per_group), sums)
                for r in range(count):
                    unit = _spread(b, b.load(b.gep(units, [b.add(at, _WORD(r))]), align=4))
                    for p in range(panels):
                        part = b.sitofp(b.load(sums[0, r, p]), _FLOATS)
                        total = b.load(totals[r, p])
                        b.store(b.fadd(total, b.fmul(part, unit, flags=_CONTRACT), flags=_CONTRACT), totals[r, p])
            made_of = {rp: b.load(totals[rp]) for rp in each}
        else:
            sums = {(k, r, p): cgutils.alloca_once(b, zero.type) for k in range(form.passes) for r, p in each}
            for k in range(form.passes):
                for r in range(count):
                    begin = zero
                    if form is INT8_QUADS_TWICE:
                        begin = _spread(b, b.load(b.gep(first, [_WORD(k * count + r)]), align=4))
                    for p in range(panels):
                        b.store(begin, sums[k, r, p])
            sum_up(_WORD(0), steps, sums)
            made_of = {}
            for r, p in each:
                found = b.load(sums[0, r, p])
                if form.integer:
                    found = b.sitofp(found, _FLOATS)
                if form.passes == 2:  # the upper byte has weight 256
                    lower = b.sitofp(b.load(sums[1, r, p]), _FLOATS)
                    scaled = b.fmul(found, ir.Constant(_FLOATS, [256.0] * PANEL), flags=_CONTRACT)
                    found = b.fadd(scaled, lower, flags=_CONTRACT)
                if form.integer:
                    found = b.fmul(found, _spread(b, b.load(b.gep(units, [_WORD(r)]), align=4)))
                made_of[r, p] = found

        for p, at in enumerate(places):
            byte = b.mul(at, _WORD(4))
            more = _load(b, b.gep(bias, [byte]), _FLOAT, PANEL, 4)
            scale = _load(b, b.gep(scales, [byte]), _FLOAT, PANEL, 4) if form.integer else None
            for r in range(count):
                out = b.gep(y, [b.mul(b.add(b.mul(stride, _WORD(r)), at), _WORD(4))])
                value = made_of[r, p]
                if scale is not None:
                    value = b.fmul(value, scale)
                value = b.fadd(value, more)
                with b.if_else(b.fcmp_ordered("!=", kept, ir.Constant(_FLOAT, 0.0))) as (then, otherwise):
                    with then:
                        added = b.fadd(_load(b, out, _FLOAT, PANEL, 4), value)
                        came = b.block
                    with otherwise:
                        instead = b.block
                result = b.phi(_FLOATS)
                result.add_incoming(added, came)
                result.add_incoming(value, instead)
                b.store(result, b.bitcast(out, _FLOATS.as_pointer()), align=4)

    _by_rows(b, form, rows, outs, group, odd=False)
    return made


# --- tiles of attention ----------------------------------------------------------------------------------------------


def _attention_tile(module: ir.Module, form: Format, scores: bool) -> ir.Function:
    """Query rows times the keys or values of one block of the KV cache; sums in the order of slots.

    Arguments: w, x, y (addresses), n, step, apart (in values of w), stride_x, stride_y (in floats), outs, rows.

    scores  y[r * stride_y + o] = sum over i < n of x[i * rows + r] * w(i, o): interleaved queries times keys
    else    y[r * stride_y + o] += sum over i < n of x[r * stride_x + i] * w(i, o): weights of slots times values

    w(i, o) is value i * step + (o // PANEL) * apart + o % PANEL of w.
    """
    name = f"slipstream_{'scores' if scores else 'mix'}_{form.name}"
    made = _function(module, name, 10)
    if made is None:
        return module.get_global(name)
    b = ir.IRBuilder(made.append_basic_block())
    w, x, y = (_bytes_at(b, each) for each in made.args[:3])
    n, step, apart, stride_x, stride_y, outs, rows = made.args[3:]
    x = b.bitcast(x, _FLOAT.as_pointer())

    def group(count: int, panels: int, o: Any) -> None:
        places = [b.add(o, _WORD(PANEL * p)) for p in range(panels)]
        starts = [b.gep(w, [b.mul(b.mul(apart, b.udiv(at, _WORD(PANEL))), _WORD(form.bytes))]) for at in places]
        outs_at = {
            (r, p): b.gep(y, [b.mul(b.add(b.mul(stride_y, _WORD(r)), at), _WORD(4))])
            for r in range(count)
            for p, at in enumerate(places)
        }
        zero = ir.Constant(_FLOATS, [0.0] * PANEL)
        sums = {rp: cgutils.alloca_once(b, _FLOATS) for rp in outs_at}
        for rp, out in outs_at.items():
            b.store(zero if scores else _load(b, out, _FLOAT, PANEL, 4), sums[rp])
        with cgutils.for_range(b, n) as loop:
            near = [
                as_floats(b, b.gep(s, [b.mul(b.mul(loop.index, step), _WORD(form.bytes))]), form, PANEL) for s in starts
            ]
            for r in range(count):
                at = (
                    b.add(b.mul(loop.index, _WORD(count)), _WORD(r))
                    if scores
                    else b.add(b.mul(stride_x, _WORD(r)), loop.index)
                )
                number = _spread(b, b.load(b.gep(x, [at]), align=4))
                for p in range(panels):
                    b.store(_add(b, FLOAT32, b.load(sums[r, p]), near[p], number), sums[r, p])
        for rp, out in outs_at.items():
            b.store(b.load(sums[rp]), b.bitcast(out, _FLOATS.as_pointer()), align=4)

    _by_rows(b, FLOAT32, rows, outs, group, odd=True)
    return made


# --- sums in a fixed order -------------------------------------------------------------------------------------------


def _total(squares: bool) -> Any:
    """The sum of a row, or of its squares: PANEL partial sums in order, which are then added pairwise. Generated
    explicitly, so that the order is the same in all callers; loops that LLVM vectorises may differ from caller to
    caller."""

    def define(context: Any, address: Any, count: Any) -> Any:
        del context

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            name = f"slipstream_sum{'_of_squares' if squares else ''}"
            kind = ir.FunctionType(_FLOAT, [_WORD, _WORD])
            function = cgutils.get_or_insert_function(b.module, kind, name)
            if function.is_declaration:
                function.linkage = "linkonce_odr"
                function.attributes.add("noinline")
                body(ir.IRBuilder(function.append_basic_block()), *function.args)
            return b.call(function, [args[0], args[1]])

        def body(b: ir.IRBuilder, address: Any, count: Any) -> None:
            x = b.bitcast(_bytes_at(b, address), _FLOAT.as_pointer())
            total = cgutils.alloca_once_value(b, ir.Constant(_FLOATS, [0.0] * PANEL))
            whole = b.mul(b.udiv(count, _WORD(PANEL)), _WORD(PANEL))
            with cgutils.for_range_slice(b, _WORD(0), whole, _WORD(PANEL), inc=True) as (i, _):
                v = _load(b, b.gep(x, [i]), _FLOAT, PANEL, 4)
                if squares:
                    v = b.fmul(v, v)
                b.store(b.fadd(b.load(total), v), total)
            with cgutils.for_range_slice(b, whole, count, _WORD(1), inc=True) as (i, _):
                one = b.load(b.gep(x, [i]), align=4)
                if squares:
                    one = b.fmul(one, one)
                lane = b.trunc(b.sub(i, whole), _INT)
                held = b.load(total)
                b.store(b.insert_element(held, b.fadd(b.extract_element(held, lane), one), lane), total)
            v, width = b.load(total), PANEL
            while width > 1:
                width //= 2
                v = b.fadd(_take(b, v, range(width)), _take(b, v, range(width, 2 * width)))
            b.ret(b.extract_element(v, _INT(0)))

        return types.float32(types.int64, types.int64), generate

    define.__name__ = "sum_of_squares" if squares else "sum_of"
    return intrinsic(define)


sum_of: Any = _total(squares=False)
sum_of_squares: Any = _total(squares=True)


def locator(make: Callable[[ir.Module], ir.Function]) -> Any:
    """An intrinsic that compiles a tile into its caller and returns its address."""

    def locate(context: Any) -> Any:
        del context

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return b.ptrtoint(make(b.module), _WORD)

        return types.int64(), generate

    return intrinsic(locate)


def matrix_tile(form: Format) -> Any:
    """An intrinsic: the address of the tile for weights of this format (see `_matrix_tile`)."""
    return locator(lambda module: _matrix_tile(module, form))


def attention_tile(form: Format, scores: bool) -> Any:
    """An intrinsic: the address of the tile for keys (`scores`) or values of this format (see `_attention_tile`)."""
    return locator(lambda module: _attention_tile(module, form, scores))
