"""What the native backend declares; see `backends.table`."""

from __future__ import annotations

import torch

from slipstream.backends.native.packed_weights import refusal
from slipstream.backends.table import Medusa, Wish, quantisation
from slipstream.errors import ParameterError
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.eagle_runtime import EagleRuntime
from slipstream.heads.host import Host
from slipstream.heads.medusa_heads import MedusaHeads
from slipstream.models.config import DecoderConfig
from slipstream.models.executor import Executor
from slipstream.models.weights import Weights


class NativeBackend:
    """Our own CPU kernels. Modules that need Numba are imported when something is made."""

    name = "native"
    load_dtype = torch.float32

    def check(self, wish: Wish) -> None:
        if wish.device.type != "cpu" or wish.dtype not in (torch.float32, torch.bfloat16):
            raise ParameterError(
                f"executor='native' was asked for on {wish.device.type} in {wish.dtype}",
                why="it runs on the CPU, in float32 or bfloat16",
                fix="choose executor='torch', or drop device and dtype",
            )

    def refusal(self, config: DecoderConfig, wish: Wish) -> str | None:
        if wish.device.type != "cpu":
            return "it runs on the CPU"
        return refusal(config, quantisation(wish.quantize, wish.role), wish.dtype)

    def executor(self, config: DecoderConfig, weights: Weights, wish: Wish) -> Executor:
        from slipstream.backends.native.native_executor import NativeExecutor

        chosen = quantisation(wish.quantize, wish.role)
        return NativeExecutor(config, weights, chosen, wish.threads, wish.dtype, wish.kv_dtype)

    def eagle(self, head: EagleHead, host: Host, wish: Wish) -> EagleRuntime:
        from slipstream.backends.native.native_eagle import NativeEagle

        embedding = None if head.config.own_embedding else host.embedding_record
        return NativeEagle(head, wish.threads, quantisation(wish.quantize, "draft"), embedding)

    def medusa(self, heads: MedusaHeads, wish: Wish) -> Medusa:
        from slipstream.backends.native.native_medusa import NativeMedusa

        return NativeMedusa(heads, wish.threads, quantisation(wish.quantize, "draft"))


BACKEND = NativeBackend()
