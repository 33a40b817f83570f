"""The native backend's entry in the table of backends (see `backends.table`)."""

from __future__ import annotations

import torch

from slipstream.backends.native.packed_weights import refusal
from slipstream.backends.table import RunSettings, quantisation
from slipstream.core.target import HeadHost
from slipstream.errors import ParameterError
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.eagle_runtime import EagleRuntime
from slipstream.heads.medusa_heads import MedusaHeads
from slipstream.heads.medusa_runtime import MedusaRuntime
from slipstream.models.config import DecoderConfig
from slipstream.models.executor import Executor
from slipstream.models.weights import Weights


class NativeBackend:
    """Our own CPU kernels. Modules that need Numba are imported when an executor or head is created."""

    name = "native"
    load_dtype = torch.float32

    def check(self, settings: RunSettings) -> None:
        if settings.device.type != "cpu" or settings.dtype not in (torch.float32, torch.bfloat16):
            raise ParameterError(
                f"executor='native' was asked for on {settings.device.type} in {settings.dtype}",
                why="it runs on the CPU, in float32 or bfloat16",
                fix="choose executor='torch', or drop device and dtype",
            )

    def refusal(self, config: DecoderConfig, settings: RunSettings) -> str | None:
        if settings.device.type != "cpu":
            return "it runs on the CPU"
        return refusal(config, quantisation(settings.quantize, settings.role), settings.dtype)

    def executor(self, config: DecoderConfig, weights: Weights, settings: RunSettings) -> Executor:
        from slipstream.backends.native.native_executor import NativeExecutor

        chosen = quantisation(settings.quantize, settings.role)
        return NativeExecutor(
            config, weights, chosen, settings.threads, settings.dtype, settings.kv_dtype, settings.kv_blocks
        )

    def eagle(self, head: EagleHead, host: HeadHost, settings: RunSettings) -> EagleRuntime:
        from slipstream.backends.native.native_eagle import NativeEagle

        embedding = None if head.config.own_embedding else host.packed_embedding
        return NativeEagle(head, settings.threads, quantisation(settings.quantize, "draft"), embedding)

    def medusa(self, heads: MedusaHeads, settings: RunSettings) -> MedusaRuntime:
        from slipstream.backends.native.native_medusa import NativeMedusa

        return NativeMedusa(heads, settings.threads, quantisation(settings.quantize, "draft"))


BACKEND = NativeBackend()
