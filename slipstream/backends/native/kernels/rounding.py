"""Rounds rows of activations to 8 bits, a scale for each group of columns, and writes them into a tile's rows."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.backends.native.kernels.processor import byte_offset
from slipstream.backends.native.kernels.vectors import (
    BYTE,
    CONTRACT,
    FLOAT,
    INT,
    WORD,
    bytes_at,
    load_vector,
    new_function,
    place_at,
    spread,
)


def _round_groups(module: ir.Module, group: int) -> ir.Function:
    """Round a row to integers in [-127, 127], 127 at the largest absolute value of each group, and write it as row r of
    the `count` rows of a tile; see `block_tiles`. Generated explicitly: loops over columns that are not contiguous, or
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
        b.store(b.mul(total, INT(-byte_offset())), b.gep(firsts, [at]), align=4)
        b.store(b.fmul(unit, b.sitofp(total, FLOAT)), b.gep(sums, [at]), align=4)
        narrow = ir.VectorType(BYTE, group)
        b.store(b.trunc(whole, narrow), place_at(b, quads, b.mul(at, WORD(group)), narrow), align=4)
    b.ret_void()
    return function


def round_groups(group: int) -> Any:
    """An intrinsic that calls `_round_groups`."""

    def define(context: Any, x: Any, tile: Any, r: Any, count: Any, columns: Any) -> Any:
        del context

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            b.call(_round_groups(b.module, group), args)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 5), generate

    return intrinsic(define)
