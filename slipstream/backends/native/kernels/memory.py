"""Memory access by address, atomic counters and calls through function pointers, as functions that Numba compiles into
their callers.

Kernels get addresses instead of typed arrays for arguments of several types: there are seven weight formats, and
compiling a pass for each combination would take minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.backends.native.kernels.compiled import kernel
from slipstream.backends.native.kernels.processor import converts_half, is_arm

_WORD, _BYTE = ir.IntType(64), ir.IntType(8)


def _pointer(context: Any, address: Any) -> Any:
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], _BYTE.as_pointer())

    return types.voidptr(types.int64), generate


def _address_of(context: Any, array: Any) -> Any:
    """The address of an array's first value."""
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.ptrtoint(context.make_array(signature.args[0])(context, b, args[0]).data, _WORD)

    return types.int64(array), generate


def _counter(b: ir.IRBuilder, address: Any) -> Any:
    return b.inttoptr(address, _WORD.as_pointer())


def _load(context: Any, address: Any) -> Any:
    """The counter at an address (acquire): what another thread wrote before storing this value is visible
    afterwards."""
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.load_atomic(_counter(b, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


def _store(context: Any, address: Any, value: Any) -> Any:
    """Set the counter at an address (release): a thread that loads this value sees what was written before."""
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], _counter(b, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


def _fetch_add(context: Any, address: Any, more: Any) -> Any:
    """Add to the counter at an address; returns its value before."""
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _counter(b, args[0]), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


def _pause(context: Any) -> Any:
    """Hint to the processor that this is a spin loop."""
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if is_arm():  # hint 1: yield
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.aarch64.hint"), [ir.IntType(32)(1)])
        else:
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.none(), generate


def _call(context: Any, address: Any, values: Any) -> Any:
    """Call the function at `address` with these int64 arguments (a tuple); it returns nothing."""
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        given = cgutils.unpack_tuple(b, args[1], len(signature.args[1]))
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * len(given))
        b.call(b.inttoptr(args[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.none(types.int64, values), generate


def _half(context: Any, address: Any) -> Any:
    """The float16 at an address, as float32 (Numba has no 16-bit floats on CPUs). Never runs on a processor without
    float16 instructions, where nothing is stored in float16: LLVM would call a library function that is not there."""
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if not converts_half():
            return ir.Constant(ir.FloatType(), 0.0)
        return b.fpext(b.load(b.inttoptr(args[0], ir.HalfType().as_pointer()), align=2), ir.FloatType())

    return types.float32(types.int64), generate


def _put_half(context: Any, address: Any, value: Any) -> Any:
    """Write a float32 as float16 to an address; restricted as `_half`."""
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if converts_half():
            b.store(b.fptrunc(args[1], ir.HalfType()), b.inttoptr(args[0], ir.HalfType().as_pointer()), align=2)
        return context.get_dummy_value()

    return types.none(types.int64, types.float32), generate


def _where(context: Any, record: Any) -> Any:
    """The address of a record."""
    del context

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return b.ptrtoint(args[0], _WORD)

    return types.int64(record), generate


pointer: Any = intrinsic(_pointer)
where: Any = intrinsic(_where)
half: Any = intrinsic(_half)
put_half: Any = intrinsic(_put_half)
address_of: Any = intrinsic(_address_of)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
fetch_add: Any = intrinsic(_fetch_add)
pause: Any = intrinsic(_pause)
call: Any = intrinsic(_call)


@kernel()
def floats(address, count):
    """float32 [count] at an address."""
    return carray(pointer(address), (count,), np.float32)


@kernel()
def integers(address, count):
    """int64 [count] at an address."""
    return carray(pointer(address), (count,), np.int64)


@kernel()
def words(address, count):
    """int32 [count] at an address."""
    return carray(pointer(address), (count,), np.int32)


@kernel()
def shorts(address, count):
    """uint16 [count] at an address."""
    return carray(pointer(address), (count,), np.uint16)


@kernel()
def small(address, count):
    """int8 [count] at an address."""
    return carray(pointer(address), (count,), np.int8)
