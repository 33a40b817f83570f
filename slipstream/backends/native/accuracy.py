"""How much the native backend's arithmetic changes a target's distribution (measured)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.settings import WEIGHT_FORMATS


@dataclass(frozen=True)
class Distance:
    """Distance from the same model in float64. kl: mean Kullback-Leibler divergence KL(float64 || this) per row, in
    nats; agreement: share of rows with the same argmax."""

    kl: float
    agreement: float


MEASURED_ON = "4,642 rows of the embedded target's held-out prompts, against float64"

DISTANCES: Mapping[str, Distance] = {
    "w8a16": Distance(1.7e-4, 0.9933),
    "w8a8": Distance(3.7e-4, 0.9899),
    "w4a8": Distance(1.2e-2, 0.9369),
    "bfloat16": Distance(2.0e-5, 0.9978),
    "float16 KV": Distance(6e-8, 0.9998),
}
"""For `quantize` of that name, `dtype="bfloat16"` and `kv_dtype="float16"`, each with everything else in
float32. The KL divergence of float32 itself is 2e-12. A row is the distribution after one token of a prompt in
`zoo/prompts`, given the tokens before it; the reference is the torch executor in float64. Measured with `python -m
benchmarks.accuracy` on a processor with VNNI and AVX-512 BF16."""

WITHOUT_BYTE_DOTS = Distance(1.7e-4, 0.9938)
"""For w8a16 and w8a8 on a processor without byte dot products: activations then have 15 bits. Measured in the same
way, with those kernels."""


def distances() -> dict[str, Distance]:
    """`DISTANCES`, adjusted for this processor."""
    from slipstream.backends.native.kernels.processor import has_byte_dots

    rows = [name for name, each in WEIGHT_FORMATS.items() if each.head is None]  # blocks keep activations of 8 bits
    changed = {} if has_byte_dots() else dict.fromkeys(rows, WITHOUT_BYTE_DOTS)
    return {**DISTANCES, **changed}


def int8_products() -> str:
    """The instructions that this processor uses for int8 products."""
    from slipstream.backends.native.kernels.processor import has_byte_dots, is_arm

    if not has_byte_dots():
        return "none (16-bit products instead, slower)"
    return "Arm dot products" if is_arm() else "VNNI"


def bfloat16_products() -> str:
    """The instructions that this processor uses for bfloat16 products."""
    from slipstream.backends.native.kernels.processor import has_bfloat16_dots

    return "AVX-512 BF16" if has_bfloat16_dots() else "none (dtype bfloat16 is left to torch)"
