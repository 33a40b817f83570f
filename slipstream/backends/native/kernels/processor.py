"""Instructions of this processor. They decide how weights are laid out and which tiles are generated."""

import functools
import platform

from llvmlite import binding
from numba import config
from numba.core.codegen import get_host_cpu_features

PANEL = 16
"""Number of outputs of a matrix that are stored together: one vector of 16 floats, or several smaller vectors."""

_ARM_CODE = {
    "dotprod": "declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>) define i32 @f(<16 x i8> %a) {"
    "%b = sext <16 x i8> %a to <16 x i32> %c = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %b) ret i32 %c }",
    "bf16": "define bfloat @f(float %a) { %b = fptrunc float %a to bfloat ret bfloat %b }",
}
"""For each feature, code that LLVM compiles to an instruction of the feature if the processor has it."""


@functools.cache
def has(feature: str) -> bool:
    """Return True if the processor has a feature, by LLVM's name, such as "avx512vnni". NUMBA_CPU_FEATURES
    ("+avx2,+fma,...") names the features of another processor for which Numba compiles."""
    chosen = config.CPU_FEATURES  # type: ignore[attr-defined]
    features = get_host_cpu_features() if chosen is None else chosen
    return f"+{feature}" in features.split(",") or (is_arm() and feature in _ARM_CODE and _implies(feature, features))


def _implies(feature: str, features: str) -> bool:
    """Return True if the name of the Arm processor for which Numba compiles implies a feature. On Linux, LLVM lists
    only a few features of Arm processors and derives the rest from the processor's name. The generated code shows
    whether LLVM uses the feature."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    name = config.CPU_NAME or binding.get_host_cpu_name()  # type: ignore[attr-defined]
    machine = binding.Target.from_default_triple().create_target_machine(cpu=name, features=features)
    code = machine.emit_assembly(binding.parse_assembly(_ARM_CODE[feature]))
    return {"dotprod": "sdot", "bf16": "bfcvt"}[feature] in code


is_arm = functools.cache(lambda: platform.machine().lower() in ("arm64", "aarch64"))


def lanes() -> int:
    """Number of 32-bit lanes of the widest vector register."""
    if is_arm():
        return 4
    if has("avx512f"):
        return 16
    return 8 if has("avx2") else 4


def registers() -> int:
    """Number of vector registers."""
    return 32 if is_arm() or has("avx512f") else 16


def has_byte_dots() -> bool:
    """Return whether one instruction adds four products of 8-bit integers to a 32-bit sum: AVX-512 VNNI, AVX-VNNI, or
    the dot products of Arm."""
    if is_arm():
        return has("dotprod")
    return (lanes() == 16 and has("avx512vnni")) or has("avxvnni") or (has("avx512vnni") and has("avx512vl"))


def adds_pairs() -> bool:
    """Return whether products of 8-bit integers are added in pairs: on x86 without AVX-512 and byte dot products."""
    return registers() == 16 and not has_byte_dots()


def lookup() -> tuple[int, str]:
    """Return the bytes of a vector, and LLVM's name of the instruction that replaces each byte (an index below 16) by a
    table's entry."""
    if is_arm():
        return 16, "llvm.aarch64.neon.tbl1.v16i8"
    if lanes() == 16 and has("avx512bw"):
        return 64, "llvm.x86.avx512.pshuf.b.512"
    return (32, "llvm.x86.avx2.pshuf.b") if lanes() > 4 else (16, "llvm.x86.ssse3.pshuf.b.128")


def has_bfloat16_dots() -> bool:
    """Return whether one instruction adds two products of bfloat16 numbers to a float32 sum (AVX-512 BF16)."""
    return not is_arm() and lanes() == 16 and has("avx512bf16")


def converts_half() -> bool:
    """Return whether an instruction converts float16 to float32 (F16C on x86; every 64-bit Arm has one)."""
    return is_arm() or has("f16c") or has("avx512f")


def kv_refusal(kv_dtype: str) -> str | None:
    """Return why this processor cannot have a KV cache in this format, or None if it can. The scales of q8_0 are
    float16, too."""
    if kv_dtype == "float32" or converts_half():
        return None
    return "this processor has no instructions for float16 (F16C)"


def byte_offset() -> int:
    """The offset added to int8 weights. On x86, instructions need one unsigned operand, so weights are stored as 1 to
    255."""
    return 0 if is_arm() else 128
