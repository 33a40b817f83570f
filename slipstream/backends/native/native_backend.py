"""The native backend's entry in the table of backends (see `backends.table`): which decoders it can run.
Numba, which is optional, is imported when an executor or head is created."""

import importlib.util

import torch

from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weight_formats import QUANTISED, WeightFormat
from slipstream.checkpoints.weights import Weights
from slipstream.core.target import HeadHost
from slipstream.errors import ParameterError
from slipstream.executor.executor import Executor
from slipstream.heads.dflash_head import DFlashHead
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.eagle_rows import DFlashRuntime, EagleRuntime
from slipstream.heads.medusa_heads import MedusaHeads, MedusaRuntime

ALIGN = 64
"""The widths of latent attention must be multiples of this; the same as `products.ALIGN`."""

MOST_COLUMNS = 1 << 16
"""Maximum number of columns of an int8 matrix: with more, a sum of products could overflow 32 bits."""


def refusal(
    config: DecoderConfig, quantised: WeightFormat | None = None, dtype: torch.dtype = torch.float32
) -> str | None:
    """Return why the native backend cannot run this decoder, or None if it can."""
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed"
    for layer in config.described:
        if layer.head_dim % 16:
            return f"heads of {layer.head_dim} values are not a multiple of 16"
        part = layer.latent
        if part is not None and (part.rank % ALIGN or part.value % ALIGN or part.plain % 16):
            least = f"latent vectors and values must be multiples of {ALIGN}, dimensions without positions of 16"
            return f"{least}; they have {part.rank}, {part.value} and {part.plain}"
    columns = max(shape[-1] for shape in config.shapes().values())
    if quantised and not quantised.span and columns > MOST_COLUMNS:
        return f"{columns} columns of integer products may overflow 32 bits; {MOST_COLUMNS} do not"
    if quantised and quantised.span:
        for name, shape in config.shapes().items():
            if len(shape) == 2 and "embed" not in name and shape[1] % quantised.span:
                needs = f"{quantised.quantize} needs a multiple of {quantised.span}"
                return f"{name} has rows of {shape[1]} numbers, {needs}"
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
    automatic = True
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

        return NativeEagle(head, settings.threads, _format(head, settings), host.packed_tables)

    def dflash(self, head: DFlashHead, host: HeadHost, settings: LoadSettings) -> DFlashRuntime:
        from slipstream.backends.native.native_heads import NativeDFlash

        return NativeDFlash(head, settings.threads, _format(head, settings), host.packed_tables)

    def medusa(self, heads: MedusaHeads, settings: LoadSettings) -> MedusaRuntime:
        from slipstream.backends.native.native_heads import NativeMedusa

        return NativeMedusa(heads, None, settings.weight_format)


def _format(head: EagleHead | DFlashHead, settings: LoadSettings) -> WeightFormat | None:
    return settings.weight_format or (QUANTISED["w8a8"] if head.in_8_bits else None)


BACKEND = NativeBackend()


def int8_products() -> str:
    """The instructions that this processor uses for int8 products."""
    from slipstream.backends.native.kernels import processor

    if not processor.has_byte_dots():
        return "none (16-bit products instead, slower)"
    return "Arm dot products" if processor.is_arm() else "VNNI"
