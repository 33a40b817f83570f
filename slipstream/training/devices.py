"""Where a run computes: in this process, or on several GPUs with accelerate.

accelerate is optional (`pip install slipstream[train]`) and used if it is installed and the device is not a CPU:
`accelerate launch -m slipstream.cli.main train ...` then gives every process its own rows of each batch. Without it
the run uses the single device given.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.backends.native.kernels import processor
from slipstream.errors import ParameterError


def has_bfloat16_products(device: torch.device) -> bool:
    """Whether the hardware has instructions for them. PyTorch emulates them elsewhere, slower than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or any(map(processor.has, ("avx512bf16", "amx-bf16", "bf16")))  # the last: Arm


class Devices:
    """device: "cpu", "cuda", "cuda:1", ...; bf16: run matrix products in bfloat16 (None: where the hardware has them);
    weights stay float32."""

    def __init__(self, device: str = "cpu", bf16: bool | None = None):
        try:
            self.device = torch.device(device)
        except RuntimeError as fault:
            raise ParameterError(f"device is {device!r}", fix="use cpu, cuda or cuda:1") from fault
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ParameterError(f"device is {device!r}, but PyTorch finds no CUDA device", fix="choose --device cpu")
        self.bf16 = has_bfloat16_products(self.device) if bf16 is None else bf16
        self._accelerator: Any = None
        if self.device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
            from accelerate import Accelerator
            from accelerate.utils import DistributedDataParallelKwargs

            # With layer dropout, a step does not use all parameters.
            unused = DistributedDataParallelKwargs(find_unused_parameters=True)
            self._accelerator = Accelerator(mixed_precision="bf16" if self.bf16 else "no", kwargs_handlers=[unused])
            self.device = self._accelerator.device

    @property
    def rank(self) -> int:
        return 0 if self._accelerator is None else int(self._accelerator.process_index)

    @property
    def count(self) -> int:
        """Number of processes that share the batch."""
        return 1 if self._accelerator is None else int(self._accelerator.num_processes)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module to call for training, with gradients averaged over the processes."""
        return module if self._accelerator is None else self._accelerator.prepare_model(module)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        if self._accelerator is None:
            loss.backward()
        else:
            self._accelerator.backward(loss)

    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(parameters, norm))

    def agree(self, value: float) -> float:
        """The value of the first process, in all of them: processes must take the same decisions."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast

        return float(broadcast(torch.tensor(value, dtype=torch.float64, device=self.device)).item())

    def wait(self) -> None:
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()
