"""The native backend's entry in the table of backends (see `backends.table`)."""

from __future__ import annotations

import torch

from slipstream.backends.native.packed_weights import refusal
from slipstream.core.target import HeadHost
from slipstream.errors import ParameterError
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.eagle_runtime import EagleRuntime
from slipstream.heads.medusa_heads import MedusaHeads
from slipstream.heads.medusa_runtime import MedusaRuntime
from slipstream.models.config import DecoderConfig
from slipstream.models.executor import Executor
from slipstream.models.load_settings import LoadSettings
from slipstream.models.weights import Weights


class NativeBackend:
    """Our own CPU kernels. Modules that need Numba are imported when an executor or head is created."""

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
        from slipstream.backends.native.native_eagle import NativeEagle

        embedding = None if head.config.own_embedding else host.packed_embedding
        return NativeEagle(head, settings.threads, settings.weight_format, embedding)

    def medusa(self, heads: MedusaHeads, settings: LoadSettings) -> MedusaRuntime:
        from slipstream.backends.native.native_medusa import NativeMedusa

        return NativeMedusa(heads, None, settings.weight_format)


BACKEND = NativeBackend()
