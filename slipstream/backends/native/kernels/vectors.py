"""`Builder` writes the LLVM code of tiles, and `emit` makes functions of it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slipstream.backends.native.kernels.formats import FLOAT16, FLOAT32, Q8_0, Format
from slipstream.backends.native.kernels.memory import operation
from slipstream.backends.native.kernels.processor import PANEL

FLOAT, INT, WORD, BYTE, HALF = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8), ir.HalfType()
SHORT = ir.IntType(16)
FLOATS, INTS, SHORTS = ir.VectorType(FLOAT, PANEL), ir.VectorType(INT, PANEL), ir.VectorType(SHORT, 2 * PANEL)
_CONTRACT = ("contract",)
AHEAD = 2048
"""Distance in bytes at which weights are prefetched. Measured on AVX2 with weights of 8 or 16 bits: products of 2 to 5
rows take 0.8 to 0.9 of the time without prefetching; 1 or 4 KB gain less."""


class BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not have."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class Builder(ir.IRBuilder):  # type: ignore[misc]
    """Writes the code of a function."""

    def call_builtin(self, name: str, result: ir.Type, *given: ir.Value) -> ir.Value:
        """Call one of LLVM's built-in functions, and return its result."""
        kind = ir.FunctionType(result, [each.type for each in given])
        return self.call(cgutils.get_or_insert_function(self.module, kind, name), given)

    def multiply_add(self, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
        """total + x * y, rounded only once if the processor has such an instruction."""
        return self.fadd(total, self.fmul(x, y, flags=_CONTRACT), flags=_CONTRACT)

    def bytes_at(self, address: ir.Value) -> ir.Value:
        return self.inttoptr(address, BYTE.as_pointer())

    def place_at(self, pointer: ir.Value, byte: ir.Value, kind: ir.Type) -> ir.Value:
        """Pointer to the address + `byte` bytes."""
        return self.bitcast(self.gep(pointer, [byte]), kind.as_pointer())

    def load_vector(self, pointer: ir.Value, element: ir.Type, count: int, align: int) -> ir.Value:
        return self.load(self.bitcast(pointer, ir.VectorType(element, count).as_pointer()), align=align)

    def fetch_ahead(self, pointer: ir.Value) -> None:
        """Prefetch the memory `AHEAD` bytes after a pointer into the cache; unmapped memory is no error. The processor
        prefetches by itself, but not as far ahead, even with one row (measured)."""
        place, how = self.gep(pointer, [WORD(AHEAD)]), (INT(0), INT(3), INT(1))  # read, into all caches, data
        self.call_builtin("llvm.prefetch.p0", ir.VoidType(), place, *how)

    def take(self, v: ir.Value, lanes: range | list[int]) -> ir.Value:
        places = ir.Constant(ir.VectorType(INT, len(lanes)), list(lanes))
        return self.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), places)

    def spread(self, number: ir.Value, count: int = PANEL) -> ir.Value:
        """Return a vector with a 32-bit number in every lane."""
        kind = ir.VectorType(number.type, count)
        return self.take(self.insert_element(ir.Constant(kind, ir.Undefined), number, INT(0)), [0] * count)

    def split(self, v: ir.Value, lanes: int) -> list[ir.Value]:
        """Split a vector of PANEL lanes into vectors of the processor's width."""
        return [v] if lanes == PANEL else [self.take(v, range(at, at + lanes)) for at in range(0, PANEL, lanes)]

    def join(self, parts: list[ir.Value]) -> ir.Value:
        while len(parts) > 1:
            lanes = 2 * parts[0].type.count
            order = ir.Constant(ir.VectorType(INT, lanes), list(range(lanes)))
            parts = [self.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def sum_of(self, v: ir.Value) -> ir.Value:
        """The sum of the lanes of a vector of floats, added pairwise."""
        width = v.type.count
        while width > 1:
            width //= 2
            v = self.fadd(self.take(v, range(width)), self.take(v, range(width, 2 * width)))
        return self.extract_element(v, INT(0))

    def as_floats(self, pointer: ir.Value, fmt: Format, count: int) -> ir.Value:
        """Load `count` weights from `pointer` on, widened to float32 without rounding. Integers are not yet multiplied
        by their scale."""
        if fmt is FLOAT32:
            return self.load_vector(pointer, FLOAT, count, 4)
        if fmt is FLOAT16:
            return self.fpext(self.load_vector(pointer, HALF, count, 2), ir.VectorType(FLOAT, count))
        if fmt is Q8_0:
            return self.sitofp(self.load_vector(pointer, BYTE, count, 1), ir.VectorType(FLOAT, count))
        wide = ir.VectorType(INT, count)  # a bfloat16 is the upper half of a float32
        upper = self.zext(self.load_vector(pointer, SHORT, count, 2), wide)
        return self.bitcast(self.shl(upper, ir.Constant(wide, [16] * count)), ir.VectorType(FLOAT, count))


def emit(count: int, result: ir.Type | None = None) -> Callable[[Callable[..., None]], Callable[..., ir.Function]]:
    """Decorator for a function `write(b, *parameters)`, which writes the LLVM code of a function with `count` 64-bit
    arguments, `b.function.args`. The result is `make(module, *parameters)`, which adds this LLVM function to a module
    if the module does not have it yet."""

    def decorate(write: Callable[..., None]) -> Callable[..., ir.Function]:
        @wraps(write)
        def make(module: ir.Module, *parameters: Any) -> ir.Function:
            name = "_".join(["slipstream", write.__name__, *(str(getattr(p, "name", p)) for p in parameters)])
            kind = ir.FunctionType(result or ir.VoidType(), [WORD] * count)
            function = cgutils.get_or_insert_function(module, kind, name)
            if function.is_declaration:
                function.linkage = "linkonce_odr"
                function.attributes.add("noinline")
                write(Builder(function.append_basic_block()), *parameters)
            return function

        return make

    return decorate


def locator(make: Callable[..., ir.Function], *parameters: Any) -> Any:
    """Make a function for kernels that compiles a generated function into its caller and returns the address of the
    generated function."""
    return operation(types.int64)(lambda b: b.ptrtoint(make(b.module, *parameters), WORD))
