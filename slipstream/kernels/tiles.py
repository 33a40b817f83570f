"""The inner loops, written so that their sums stay in registers: functions that Numba compiles into their callers.

A sum is always made in the same order, whatever the size of the tile, so a row comes out the same, bit for bit, alone
and among others.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.compiled import kernel

PANEL = 16
"""Outputs of a matrix that lie side by side: floats are kept as [out / PANEL, in, PANEL]."""

LANES = 32
"""Columns that one step of `dots` takes; rows of int8 are multiples of it."""

_FLOAT, _INDEX = ir.FloatType(), ir.IntType(32)
_WIDE = ir.VectorType(_FLOAT, PANEL)
_CONTRACT = ("contract",)  # a product and a sum may be one rounding


def _data(context: Any, b: ir.IRBuilder, signature: Any, args: Any, k: int) -> Any:
    """Pointer to the first value of an array argument."""
    return context.make_array(signature.args[k])(context, b, args[k]).data


def _load(b: ir.IRBuilder, pointer: Any, element: ir.Type, lanes: int, bits: int) -> Any:
    return b.load(b.bitcast(pointer, ir.VectorType(element, lanes).as_pointer()), align=bits // 8)


def _take(b: ir.IRBuilder, v: Any, lanes: range | list[int]) -> Any:
    index = ir.Constant(ir.VectorType(_INDEX, len(lanes)), list(lanes))
    return b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), index)


def _spread(b: ir.IRBuilder, number: Any) -> Any:
    """A float32 in every lane."""
    return _take(b, b.insert_element(ir.Constant(_WIDE, ir.Undefined), number, _INDEX(0)), [0] * PANEL)


def _weights(b: ir.IRBuilder, pointer: Any, kind: types.Type, lanes: int) -> Any:
    """Weights from `pointer` on, as float32: exact. Numba knows no 16-bit floats on a CPU, so the bits of float16 come
    as int16, and those of bfloat16, the upper half of a float32, as uint16."""
    wide = ir.VectorType(_FLOAT, lanes)
    if kind == types.float32:
        return _load(b, pointer, _FLOAT, lanes, 32)
    if kind == types.int16:
        return b.fpext(_load(b, pointer, ir.HalfType(), lanes, 16), wide)
    word = ir.VectorType(_INDEX, lanes)
    upper = b.zext(_load(b, pointer, ir.IntType(16), lanes, 16), word)
    return b.bitcast(b.shl(upper, ir.Constant(word, [16] * lanes)), wide)


def _add_product(b: ir.IRBuilder, place: Any, x: Any, y: Any) -> None:
    b.store(b.fadd(b.load(place), b.fmul(x, y, flags=_CONTRACT), flags=_CONTRACT), place)


def _room() -> tuple[int, int]:
    """(vector registers, how many of them PANEL floats fill) of this processor."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return 32, PANEL // 4
    return (32, PANEL // 16) if get_host_cpu_features().get("avx512f") else (16, PANEL // 8)


def _panels(rows: int) -> int:
    """Panels side by side in a tile of so many rows: what leaves its sums, and what is added to them, in registers."""
    registers, each = _room()
    return next((panels for panels in (4, 2, 1) if (rows + 1) * panels * each < registers), 0)


MOST_ROWS = min(12, max(rows for rows in range(1, 16) if _panels(rows)))
"""Rows of one tile."""


@kernel()
def tiles_of(rows):
    """How many tiles so many rows need."""
    return (rows + MOST_ROWS - 1) // MOST_ROWS


def outer(packed: bool, more: bool, widest: int, odd: bool = False) -> Any:
    """A tile of up to MOST_ROWS rows of x times panels of w, as a sum of outer products over the columns of x.

    packed  of x the rows lie side by side, value first_x + i * rows + r being column i of row r: every number is then
            found from one address, for which there are registers enough
    more    added to what is in y
    widest  most panels side by side; outputs come in multiples of that, ...
    odd     ... or of PANEL
    """

    @intrinsic
    def tile(
        context: Any, w: Any, first_w: Any, step: Any, apart: Any, x: Any, first_x: Any, stride_x: Any, n: Any,
        y: Any, first_y: Any, stride_y: Any, rows: Any, outs: Any,
    ) -> Any:  # fmt: skip
        """y[first_y + r * stride_y + o] = sum over i < n of x[first_x + r * stride_x + i] * w(i, o), for r < rows and
        o < outs. w(i, o) is the value first_w + i * step + (o // PANEL) * apart + o % PANEL of w.
        All arrays are taken as flat."""
        del context
        signature = types.none(
            w, first_w, step, apart, x, first_x, stride_x, n, y, first_y, stride_y, rows, outs
        )  # fmt: skip

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            data = [_data(context, b, signature, args, k) for k in (0, 4, 8)]
            numbers = [args[k] for k in (1, 2, 3, 5, 6, 7, 9, 10, 11, 12)]
            kind = ir.FunctionType(ir.VoidType(), [each.type for each in (*data, *numbers)])
            name = f"slipstream_outer_{signature.args[0].dtype}_{packed}_{more}_{widest}_{odd}"
            function = cgutils.get_or_insert_function(b.module, kind, name)
            if function.is_declaration:  # once a module, and kept apart: a copy in every caller takes long to compile
                function.linkage = "linkonce_odr"
                function.attributes.add("noinline")
                body(ir.IRBuilder(function.append_basic_block()), function.args, signature.args[0].dtype)
            b.call(function, [*data, *numbers])
            return context.get_dummy_value()

        def body(b: ir.IRBuilder, args: Any, kind: Any) -> None:
            w, x, y, first_w, step, apart, first_x, stride_x, n, first_y, stride_y, rows, outs = args
            whole = n.type

            def group(count: int, panels: int, o: Any) -> None:
                """Outputs o to o + panels * PANEL of the first `count` rows."""
                outs_at = [b.add(o, whole(PANEL * p)) for p in range(panels)]
                places = [
                    [
                        b.bitcast(b.gep(y, [b.add(b.add(first_y, at), b.mul(stride_y, whole(r)))]), _WIDE.as_pointer())
                        for at in outs_at
                    ]
                    for r in range(count)
                ]
                zero = ir.Constant(_WIDE, [0.0] * PANEL)
                sums = [
                    [cgutils.alloca_once_value(b, b.load(place, align=4) if more else zero) for place in row]
                    for row in places
                ]
                strides = [whole(r) if packed else b.mul(stride_x, whole(r)) for r in range(count)]
                x_rows = [b.gep(x, [b.add(first_x, stride)]) for stride in strides]
                w_panels = [b.gep(w, [b.add(first_w, b.mul(apart, b.udiv(at, whole(PANEL))))]) for at in outs_at]
                with cgutils.for_range(b, n) as loop:
                    columns = [_weights(b, b.gep(p, [b.mul(loop.index, step)]), kind, PANEL) for p in w_panels]
                    at = b.mul(loop.index, whole(count)) if packed else loop.index
                    for x_row, row in zip(x_rows, sums, strict=True):
                        number = _spread(b, b.load(b.gep(x_row, [at])))
                        for place, column in zip(row, columns, strict=True):
                            _add_product(b, place, number, column)
                for row, sums_row in zip(places, sums, strict=True):
                    for place, total in zip(row, sums_row, strict=True):
                        b.store(b.load(total), place, align=4)

            end = b.append_basic_block("end")
            choice = b.switch(rows, end)
            for count in range(1, MOST_ROWS + 1):
                block = b.append_basic_block(f"rows{count}")
                choice.add_case(whole(count), block)
                b.position_at_end(block)
                panels, stop = min(_panels(count), widest), outs
                if odd:
                    stop = b.mul(b.udiv(outs, whole(PANEL * panels)), whole(PANEL * panels))
                with cgutils.for_range_slice(b, whole(0), stop, whole(PANEL * panels), inc=True) as (o, _):
                    group(count, panels, o)
                if odd:
                    with cgutils.for_range_slice(b, stop, outs, whole(PANEL), inc=True) as (o, _):
                        group(count, 1, o)
                b.branch(end)
            b.position_at_end(end)
            b.ret_void()

        return signature, generate

    return tile


def dots(rows: int, outs: int) -> Any:
    """`rows` rows of x, int16, times `outs` rows of w, int8, each a dot product."""

    @intrinsic
    def tile(context: Any, w: Any, first_w: Any, x: Any, first_x: Any, n: Any) -> Any:
        """int32 sums over n columns; the rows of w begin at its value first_w, those of x at first_x, n apart. Order:
        row by row of x."""
        del context
        signature = types.UniTuple(types.int32, rows * outs)(w, first_w, x, first_x, n)

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            n, word = args[4], ir.VectorType(_INDEX, LANES)

            def pointers(k: int, count: int) -> list[Any]:
                data = _data(context, b, signature, args, k)
                return [b.gep(data, [b.add(args[k + 1], b.mul(n, n.type(j)))]) for j in range(count)]

            w_rows, x_rows = pointers(0, outs), pointers(2, rows)
            zero = ir.Constant(ir.VectorType(_INDEX, LANES // 2), [0] * (LANES // 2))
            sums = [cgutils.alloca_once_value(b, zero) for _ in range(rows * outs)]
            with cgutils.for_range_slice(b, n.type(0), n, n.type(LANES), inc=True) as (i, _):
                xs = [b.sext(_load(b, b.gep(p, [i]), ir.IntType(16), LANES, 16), word) for p in x_rows]
                for o, pointer in enumerate(w_rows):
                    values = b.sext(_load(b, b.gep(pointer, [i]), ir.IntType(8), LANES, 8), word)
                    for r in range(rows):
                        # Products of neighbours added: what processors have one instruction for (pmaddwd, vpdpwssd).
                        product = b.mul(values, xs[r])
                        pairs = b.add(_take(b, product, range(0, LANES, 2)), _take(b, product, range(1, LANES, 2)))
                        place = sums[r * outs + o]
                        b.store(b.add(b.load(place), pairs), place)
            totals = []
            for place in sums:
                v, width = b.load(place), LANES // 2
                while width > 1:
                    width //= 2
                    v = b.add(_take(b, v, range(width)), _take(b, v, range(width, 2 * width)))
                totals.append(b.extract_element(v, _INDEX(0)))
            return context.make_tuple(b, signature.return_type, totals)

        return signature, generate

    return tile


def _value(context: Any, w: Any, index: Any) -> Any:
    """The weight at this place of w, counted flat, as float32."""
    del context
    signature = types.float32(w, index)

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = b.gep(_data(context, b, signature, args, 0), [args[1]])
        return b.extract_element(_weights(b, pointer, signature.args[0].dtype, 1), _INDEX(0))

    return signature, generate


def _grab(context: Any, counter: Any) -> Any:
    """counter[0]++, by several threads: each gets another number."""
    del context
    signature = types.int64(counter)

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _data(context, b, signature, args, 0), ir.IntType(64)(1), "monotonic")

    return signature, generate


value: Any = intrinsic(_value)
grab: Any = intrinsic(_grab)
