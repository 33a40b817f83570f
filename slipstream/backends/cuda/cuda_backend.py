"""The cuda backend's entry in the table of backends (see `backends.table`). Triton, which comes with PyTorch's CUDA
builds, is imported when an executor is created."""

import importlib.util

import torch

from slipstream.backends.torch.torch_backend import TorchBackend
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weights import Weights
from slipstream.errors import ParameterError
from slipstream.executor.executor import Executor

LEAST_CAPABILITY = (8, 0)
"""Lowest compute capability of an NVIDIA GPU that multiplies in bfloat16 (Ampere)."""


class CudaBackend(TorchBackend):
    """Runs our own Triton kernels in CUDA graphs on an NVIDIA GPU, and draft heads by PyTorch.

    Experimental: it is chosen by name only. Its logits were compared with a reference only on a CPU, in Triton's
    interpreter. On a GPU only its speed was measured (docs/log.md).
    """

    name = "cuda"
    automatic = False

    def check(self, settings: LoadSettings) -> None:
        if settings.device.type != "cuda":
            raise ParameterError(
                f"executor='cuda' was asked for on {settings.device.type}",
                why="its kernels run on an NVIDIA GPU",
                fix="choose device='cuda', or another executor",
            )
        super().check(settings)

    def refusal(self, config: DecoderConfig, settings: LoadSettings) -> str | None:
        if settings.dtype not in (torch.bfloat16, torch.float32):
            return f"it computes in bfloat16 or float32, not in {str(settings.dtype).removeprefix('torch.')}"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if torch.version.hip is not None or torch.cuda.get_device_capability(settings.device) < LEAST_CAPABILITY:
            return "it needs an NVIDIA GPU of compute capability 8.0 or newer"
        return find_missing_part(config) or super().refusal(config, settings)

    def executor(self, config: DecoderConfig, weights: Weights, settings: LoadSettings) -> Executor:
        from slipstream.backends.cuda.cuda_executor import CudaExecutor

        self.check(settings)
        return CudaExecutor(config, weights, settings)


def find_missing_part(config: DecoderConfig) -> str | None:
    """Return, in words, a part of this decoder that the kernels do not support; None if they support all parts."""
    if config.experts is not None:
        return "it has no mixtures of experts"
    if config.norm != "rms" or config.position != "rope" or not config.gated:
        return "it has RMS norms, rotary positions and gated MLPs only"
    return config.unlike_llama


BACKEND = CudaBackend()
