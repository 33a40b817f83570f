"""Linear layers, y = x W^T + b for x [M, in], with weights packed once at load.

Decoding is memory-bound: its time is that of reading W. A good kernel reads W once for M = 1 and for M = 8, which makes
verifying a draft cheap. On a CPU `F.linear` does not: 8 rows cost 6 times 1 row for a 2048x2048 layer on one AVX-512
core (1.20 and 0.21 ms). oneDNN with weights reordered for a few rows does (0.33 and 0.18 ms). Without this operator,
`F.linear` runs instead.

The caller of `linear` frees the unpacked weights; nothing here keeps them.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 8
"""Rows that the packed layout is tuned for: one pending token and seven draft tokens."""


class Linear(Protocol):
    nbytes: int
    """Bytes that this layer holds."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] -> [M, out]"""
        ...


def linear(weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
    """The fastest layer for `weight` [out, in] and `bias` [out] on `device`."""
    if repacks(weight.dtype, device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight.to(device), None if bias is None else bias.to(device))


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """float32 weights in oneDNN's blocked layout, reordered once."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def repacks(dtype: torch.dtype, device: torch.device) -> bool:
    """True if `linear` copies the weights into its own layout, so that the checkpoint's can be freed."""
    return device.type == "cpu" and dtype == torch.float32 and _has_packed()


def _has_packed() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
