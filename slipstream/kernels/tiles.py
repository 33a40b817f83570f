"""The inner loops, written so that their sums stay in registers: functions that Numba compiles into their callers.

A sum is always made in the same order, whatever the size of the tile, so a row comes out the same, bit for bit, alone
and among others.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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


def outer(rows: int, panels: int) -> Any:
    """`rows` rows of x times `panels` panels of weights, as a sum of outer products over the columns."""

    @intrinsic
    def tile(
        context: Any, w: Any, first_w: Any, x: Any, first_x: Any, n: Any, y: Any, first_y: Any, stride: Any
    ) -> Any:
        """y[first_y + r * stride + o] = sum over the n columns of x[first_x + r * n + i] * w[first_w + ...], flat."""
        del context
        signature = types.none(w, first_w, x, first_x, n, y, first_y, stride)

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            w, x, y = (_data(context, b, signature, args, k) for k in (0, 2, 5))
            first_w, first_x, n, first_y, stride = (args[k] for k in (1, 3, 4, 6, 7))
            whole = n.type
            zero = ir.Constant(_WIDE, [0.0] * PANEL)
            sums = [[cgutils.alloca_once_value(b, zero) for _ in range(panels)] for _ in range(rows)]
            x_rows = [b.gep(x, [b.add(first_x, b.mul(n, whole(r)))]) for r in range(rows)]
            w_panels = [b.gep(w, [b.add(first_w, b.mul(n, whole(PANEL * p)))]) for p in range(panels)]
            with cgutils.for_range(b, n) as loop:
                at = b.mul(loop.index, whole(PANEL))
                columns = [_weights(b, b.gep(p, [at]), signature.args[0].dtype, PANEL) for p in w_panels]
                for r in range(rows):
                    number = _spread(b, b.load(b.gep(x_rows[r], [loop.index])))
                    for p in range(panels):
                        _add_product(b, sums[r][p], number, columns[p])
            for r in range(rows):
                for p in range(panels):
                    out = b.gep(y, [b.add(first_y, b.add(b.mul(stride, whole(r)), whole(PANEL * p)))])
                    b.store(b.load(sums[r][p]), b.bitcast(out, _WIDE.as_pointer()), align=4)
            return context.get_dummy_value()

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


def weighted(width: int) -> Any:
    """Rows of `width` floats, a multiple of PANEL, summed up with weights."""

    @intrinsic
    def tile(
        context: Any, weights: Any, first: Any, values: Any, start: Any, n: Any, count: Any, out: Any, at: Any
    ) -> Any:
        """out[at + i] += sum over t < count of weights[first + t] * values[start + t * n + i], all float32 and flat."""
        del context
        signature = types.none(weights, first, values, start, n, count, out, at)

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            weights, values, out = (_data(context, b, signature, args, k) for k in (0, 2, 6))
            first, start, n, count, at = (args[k] for k in (1, 3, 4, 5, 7))
            parts = range(0, width, PANEL)
            places = [b.bitcast(b.gep(out, [b.add(at, at.type(i))]), _WIDE.as_pointer()) for i in parts]
            sums = [cgutils.alloca_once_value(b, b.load(p, align=4)) for p in places]
            with cgutils.for_range(b, count) as loop:
                weight = _spread(b, b.load(b.gep(weights, [b.add(first, loop.index)])))
                row = b.gep(values, [b.add(start, b.mul(loop.index, n))])
                for i, place in zip(parts, sums, strict=True):
                    _add_product(b, place, weight, _load(b, b.gep(row, [n.type(i)]), _FLOAT, PANEL, 32))
            for place, p in zip(sums, places, strict=True):
                b.store(b.load(place), p, align=4)
            return context.get_dummy_value()

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
