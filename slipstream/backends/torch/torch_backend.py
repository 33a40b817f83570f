"""The torch backend's entry in the table of backends (see `backends.table`)."""

import torch

from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.backends.torch.torch_heads import TorchDFlash, TorchEagle
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weights import Weights
from slipstream.core.target import HeadHost
from slipstream.errors import ParameterError
from slipstream.executor.executor import Executor
from slipstream.heads.dflash_head import DFlashHead
from slipstream.heads.eagle_head import EagleHead
from slipstream.heads.eagle_rows import DFlashRuntime, EagleRuntime
from slipstream.heads.medusa_heads import MedusaHeads, MedusaRuntime

_OWN_CACHE = "its KV cache always has the dtype of the model"


class TorchBackend:
    """PyTorch on any device: runs every decoder whose layers are like Llama's or GPT-2's."""

    name = "torch"
    automatic = True
    load_dtype = None

    def check(self, settings: LoadSettings) -> None:
        if settings.kv_dtype is not None:
            raise ParameterError(
                f"kv_dtype={settings.kv_dtype!r} was given, but the torch executor does not have this setting",
                why=_OWN_CACHE,
                fix="leave kv_dtype out, or give executor='native'",
            )
        _refuse_quantize(settings.quantize, "the torch executor")

    def refusal(self, config: DecoderConfig, settings: LoadSettings) -> str | None:
        if settings.quantize:
            return "it has no kernels for quantised weights"
        if settings.kv_dtype is not None:
            return _OWN_CACHE
        return config.unlike_llama and f"{config.unlike_llama}, which only the native and transformers executors run"

    def executor(self, config: DecoderConfig, weights: Weights, settings: LoadSettings) -> Executor:
        self.check(settings)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        return TorchExecutor(config, weights, settings)

    def eagle(self, head: EagleHead, host: HeadHost, settings: LoadSettings) -> EagleRuntime:
        _refuse_quantize(settings.quantize, "a head that torch runs")
        return TorchEagle(head)

    def dflash(self, head: DFlashHead, host: HeadHost, settings: LoadSettings) -> DFlashRuntime:
        _refuse_quantize(settings.quantize, "a head that torch runs")
        return TorchDFlash(head)

    def medusa(self, heads: MedusaHeads, settings: LoadSettings) -> MedusaRuntime:
        _refuse_quantize(settings.quantize, "a head that torch runs")
        return heads


def _refuse_quantize(quantize: str | None, of: str) -> None:
    if quantize:
        raise ParameterError(
            f"quantize={quantize!r} was given, but {of} cannot run quantised weights",
            why="only the native executor, which runs on CPUs, has kernels for them",
            fix="leave quantize out, or give executor='native'",
        )


BACKEND = TorchBackend()
