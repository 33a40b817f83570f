"""Code for LLVM that tiles are made of: vectors, functions, addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slipstream.backends.native.kernels.formats import FLOAT16, FLOAT32, Format
from slipstream.backends.native.kernels.memory import operation
from slipstream.backends.native.kernels.processor import PANEL

FLOAT, INT, WORD, BYTE, HALF = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8), ir.HalfType()
SHORT = ir.IntType(16)
CONTRACT = ("contract",)
"""A flag of operations: a product and a sum may be fused."""


# --- vectors ---------------------------------------------------------------------------------------------------------


def load_vector(b: ir.IRBuilder, pointer: Any, element: ir.Type, count: int, align: int) -> Any:
    return b.load(b.bitcast(pointer, ir.VectorType(element, count).as_pointer()), align=align)


def take(b: ir.IRBuilder, v: Any, lanes: range | list[int]) -> Any:
    return b.shuffle_vector(
        v, ir.Constant(v.type, ir.Undefined), ir.Constant(ir.VectorType(INT, len(lanes)), list(lanes))
    )


def spread(b: ir.IRBuilder, number: Any, count: int = PANEL) -> Any:
    """A 32-bit number in every lane."""
    kind = ir.VectorType(number.type, count)
    return take(b, b.insert_element(ir.Constant(kind, ir.Undefined), number, INT(0)), [0] * count)


def split(b: ir.IRBuilder, v: Any, lanes: int) -> list[Any]:
    """Split a vector of PANEL lanes into vectors of the processor's width."""
    return [v] if lanes == PANEL else [take(b, v, range(at, at + lanes)) for at in range(0, PANEL, lanes)]


def join(b: ir.IRBuilder, parts: list[Any]) -> Any:
    while len(parts) > 1:
        both = 2 * parts[0].type.count
        parts = [
            b.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT, both), list(range(both))))
            for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


class BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not have."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def as_floats(b: ir.IRBuilder, pointer: Any, form: Format, count: int) -> Any:
    """`count` weights from `pointer` on, widened to float32: exact."""
    if form is FLOAT32:
        return load_vector(b, pointer, FLOAT, count, 4)
    if form is FLOAT16:
        return b.fpext(load_vector(b, pointer, HALF, count, 2), ir.VectorType(FLOAT, count))
    wide = ir.VectorType(INT, count)  # a bfloat16 is the upper half of a float32
    upper = b.zext(load_vector(b, pointer, SHORT, count, 2), wide)
    return b.bitcast(b.shl(upper, ir.Constant(wide, [16] * count)), ir.VectorType(FLOAT, count))


# --- functions and addresses -----------------------------------------------------------------------------------------


def new_function(module: ir.Module, name: str, count: int) -> ir.Function | None:
    """A new function with `count` 64-bit integer arguments; None if the module already has one of this name."""
    kind = ir.FunctionType(ir.VoidType(), [WORD] * count)
    function = cgutils.get_or_insert_function(module, kind, name)
    if not function.is_declaration:
        return None
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    return function


def bytes_at(b: ir.IRBuilder, address: Any) -> Any:
    return b.inttoptr(address, BYTE.as_pointer())


def place_at(b: ir.IRBuilder, pointer: Any, byte: Any, kind: ir.Type) -> Any:
    """Pointer to the address + `byte` bytes."""
    return b.bitcast(b.gep(pointer, [byte]), kind.as_pointer())


def locator(make: Callable[[ir.Module], ir.Function]) -> Any:
    """An intrinsic that compiles a tile into its caller and returns its address."""
    return operation(types.int64)(lambda b: b.ptrtoint(make(b.module), WORD))
