"""The native backend's entry in the table of backends (see `backends.table`): which decoders it can run, and how
near to float64. Numba, which is optional, is imported when an executor or head is created."""

from __future__ import annotations

import importlib.util

import torch

from slipstream.backends.quantise import GROUP
from slipstream.core.target import HeadHost
from slipstream.errors import ParameterError
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.eagle_runtime import EagleRuntime
from slipstream.heads.medusa_heads import MedusaHeads, MedusaRuntime
from slipstream.models.config import DecoderConfig
from slipstream.models.executor import Executor
from slipstream.models.load_settings import LoadSettings
from slipstream.models.weights import Weights
from slipstream.settings import WEIGHT_FORMATS, WeightFormat

MOST_COLUMNS = 1 << 16
"""Maximum number of columns of an int8 matrix: with more, a sum of products could overflow 32 bits."""


def refusal(
    config: DecoderConfig, quantised: WeightFormat | None = None, dtype: torch.dtype = torch.float32
) -> str | None:
    """Why the native backend cannot run this decoder, or None if it can."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed"
    if config.head_dim % 16:
        return f"heads of {config.head_dim} values are not a multiple of 16"
    columns = max(config.hidden_size, config.heads * config.head_dim, config.intermediate_size)
    if quantised and not quantised.head and columns > MOST_COLUMNS:
        return f"{columns} columns of integer products may overflow 32 bits; {MOST_COLUMNS} do not"
    if quantised and quantised.head:  # weights in blocks
        for name, shape in config.shapes().items():
            if len(shape) == 2 and "embed" not in name and shape[1] % GROUP:
                return f"{name} has rows of {shape[1]} numbers, {quantised.name} needs a multiple of {GROUP}"
    if quantised and dtype != torch.float32:
        return f"integer products are added up in float32, not in {str(dtype).removeprefix('torch.')}"
    if dtype == torch.bfloat16:
        from slipstream.backends.native.kernels import processor

        if not processor.has_bfloat16_dots():
            return "this processor has no bfloat16 products (AVX-512 BF16)"
    elif dtype != torch.float32:
        return f"it computes in float32 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
    return None


class NativeBackend:
    """Our own CPU kernels."""

    name = "native"
    load_dtype = torch.float32

    def check(self, settings: LoadSettings) -> None:
        if settings.device.type != "cpu" or settings.dtype not in (torch.float32, torch.bfloat16):
            raise ParameterError(
                f"executor='native' was asked for on {settings.device.type} in {settings.dtype}",
                why="it runs on the CPU, in float32 or bfloat16",
                fix="choose executor='torch', or drop device and dtype",
            )

    def refusal(self, config: DecoderConfig, settings: LoadSettings) -> str | None:
        if settings.device.type != "cpu":
            return "it runs on the CPU"
        return refusal(config, settings.weight_format, settings.dtype)

    def executor(self, config: DecoderConfig, weights: Weights, settings: LoadSettings) -> Executor:
        from slipstream.backends.native.native_executor import NativeExecutor

        return NativeExecutor(config, weights, settings)

    def eagle(self, head: EagleHead, host: HeadHost, settings: LoadSettings) -> EagleRuntime:
        from slipstream.backends.native.native_heads import NativeEagle

        embedding = None if head.config.own_embedding else host.packed_embedding
        return NativeEagle(head, settings.threads, settings.weight_format, embedding)

    def medusa(self, heads: MedusaHeads, settings: LoadSettings) -> MedusaRuntime:
        from slipstream.backends.native.native_heads import NativeMedusa

        return NativeMedusa(heads, None, settings.weight_format)


BACKEND = NativeBackend()


# --- what `slipstream info` says of this processor ------------------------------------------------------------------


MEASURED_ON = "4,642 rows of the embedded target's held-out prompts, against float64"

DISTANCES = {
    "w8a16": {"kl": 1.7e-4, "agreement": 0.9933},
    "w8a8": {"kl": 3.7e-4, "agreement": 0.9899},
    "w4a8": {"kl": 1.2e-2, "agreement": 0.9369},
    "bfloat16": {"kl": 2.0e-5, "agreement": 0.9978},
    "float16 KV": {"kl": 6e-8, "agreement": 0.9998},
}
"""How far a model's distributions are from those in float64. kl: mean Kullback-Leibler divergence KL(float64 || this)
per row, in nats; agreement: share of rows with the same argmax.

For `quantize` of that name, `dtype="bfloat16"` and `kv_dtype="float16"`, each with everything else in float32. The KL
divergence of float32 itself is 2e-12. A row is the distribution after one token of a prompt in `zoo/prompts`, given the
tokens before it; the reference is the torch executor in float64. Measured with `python -m benchmarks.accuracy` on a
processor with VNNI and AVX-512 BF16."""

WITHOUT_BYTE_DOTS = {"kl": 1.7e-4, "agreement": 0.9938}
"""For w8a16 and w8a8 on a processor without byte dot products: activations then have 15 bits. Measured alike."""


def distances() -> dict[str, dict[str, float]]:
    """`DISTANCES`, adjusted for this processor."""
    from slipstream.backends.native.kernels import processor

    rows = [name for name, each in WEIGHT_FORMATS.items() if each.head is None]  # blocks keep activations of 8 bits
    return DISTANCES | ({} if processor.has_byte_dots() else dict.fromkeys(rows, WITHOUT_BYTE_DOTS))


def int8_products() -> str:
    """The instructions that this processor uses for int8 products."""
    from slipstream.backends.native.kernels import processor

    if not processor.has_byte_dots():
        return "none (16-bit products instead, slower)"
    return "Arm dot products" if processor.is_arm() else "VNNI"


def bfloat16_products() -> str:
    """The instructions that this processor uses for bfloat16 products."""
    from slipstream.backends.native.kernels import processor

    return "AVX-512 BF16" if processor.has_bfloat16_dots() else "none (dtype bfloat16 is left to torch)"
