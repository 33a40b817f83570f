"""Weights in int8."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Values quantised at a time."""


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per output channel: weight [out, in] ~ scale [out, 1] * int8 [out, in]."""
    scale = torch.empty(len(weight), 1)  # [out, 1]
    values = torch.empty(weight.shape, dtype=torch.int8)  # [out, in]
    step = max(1, CHUNK // weight.shape[1])  # bounds what is in memory besides
    for i in range(0, len(weight), step):
        rows = weight[i : i + step]  # [step, in]
        scale[i : i + step] = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
        values[i : i + step] = torch.round(rows / scale[i : i + step])
    return values, scale
