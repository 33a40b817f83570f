"""Memory access by address, atomic counters and calls through function pointers, as functions that Numba compiles into
their callers. Kernels get addresses instead of arrays of several types: compiling a pass for each combination of weight
formats would take minutes."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

from slipstream.backends.native.kernels.compiled import kernel
from slipstream.backends.native.kernels.processor import converts_half, is_arm

intrinsic: Any = _intrinsic
_WORD, _BYTE, _HALF = ir.IntType(64), ir.IntType(8), ir.HalfType()


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that writes LLVM code, so that kernels can call it. The function gets the builder and the
    values of the arguments, and returns the value of the result, or None if there is no result. Without `arguments`, it
    accepts the types of the caller."""

    def decorate(generate: Callable[..., Any]) -> Any:
        @wraps(generate)  # Numba reads the names of the arguments
        def define(_context: Any, *given: Any) -> Any:
            def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
                value = generate(b, *values)
                return context.get_dummy_value() if value is None else value

            return result(*(arguments or given)), write

        return intrinsic(define)

    return decorate


@operation(types.voidptr, types.int64)
def pointer(b, address):
    return b.inttoptr(address, _BYTE.as_pointer())


@operation(types.int64)
def where(b, record):
    """The address of a record."""
    return b.ptrtoint(record, _WORD)


@intrinsic
def address_of(context, array):
    """The address of an array's first value."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return b.ptrtoint(context.make_array(signature.args[0])(context, b, values[0]).data, _WORD)

    return types.int64(array), generate


def _counter(b: ir.IRBuilder, address: Any) -> Any:
    return b.inttoptr(address, _WORD.as_pointer())


@operation(types.int64, types.int64)
def load(b, address):
    """Read the counter at an address (acquire): everything that another thread wrote before it stored this value is
    visible afterwards."""
    return b.load_atomic(_counter(b, address), "acquire", 8)


@operation(types.none, types.int64, types.int64)
def store(b, address, value):
    """Set the counter at an address (release): a thread that loads this value sees everything written before."""
    b.store_atomic(value, _counter(b, address), "release", 8)


@operation(types.int64, types.int64, types.int64)
def fetch_add(b, address, more):
    """Add `more` to the counter at an address. Returns the counter's value before."""
    return b.atomic_rmw("add", _counter(b, address), more, "acq_rel")


@operation(types.none)
def pause(b):
    """Hint to the processor that this is a spin loop."""
    name, given = ("llvm.aarch64.hint", [ir.IntType(32)(1)]) if is_arm() else ("llvm.x86.sse2.pause", [])
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in given])
    b.call(cgutils.get_or_insert_function(b.module, kind, name), given)


@operation(types.none)
def call(b, address, values):
    """Call the function at `address` with these int64 arguments (a tuple); it returns nothing."""
    given = cgutils.unpack_tuple(b, values)
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * len(given))
    b.call(b.inttoptr(address, kind.as_pointer()), given)


@operation(types.float32, types.int64)
def half(b, address):
    """Read the float16 at an address as float32 (Numba has no 16-bit floats on CPUs). Needs float16 instructions:
    without them LLVM would call a library function that does not exist. Processors without them store no float16."""
    if not converts_half():
        return ir.Constant(ir.FloatType(), 0.0)
    return b.fpext(b.load(b.inttoptr(address, _HALF.as_pointer()), align=2), ir.FloatType())


@operation(types.none, types.int64, types.float32)
def put_half(b, address, value):
    """Write a float32 as float16 to an address. Needs float16 instructions, as `half` does."""
    if converts_half():
        b.store(b.fptrunc(value, _HALF), b.inttoptr(address, _HALF.as_pointer()), align=2)


def _array(kind: Any) -> Any:
    """Make a kernel (address, count) that returns the array [count] of this type at the address."""

    @kernel()
    def array(address, count):
        return carray(pointer(address), (count,), kind)

    return array


floats, integers, words, shorts, small = map(_array, (np.float32, np.int64, np.int32, np.uint16, np.int8))
