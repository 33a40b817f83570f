"""Rounds weights to integers: per output (`quantise_rows`), or per output and group (`quantise_blocks`)."""

import numpy as np
import torch
from torch import Tensor

from slipstream.checkpoints.weight_blocks import Blocks, Scales

GROUP, LEVELS = 32, 15
CHUNK = 1 << 18
"""Values quantised at a time, which bounds what is in memory besides."""
RANGES = torch.linspace(0.8, 1.05, 11)
"""Shares of the range of a group that are tried: values beyond a shorter one are rounded to its ends."""


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per output channel: weight [out, in] ~ scale [out, 1] * int8 [out, in]."""
    scale = torch.empty(len(weight), 1)  # [out, 1]
    values = torch.empty(weight.shape, dtype=torch.int8)  # [out, in]
    step = max(1, CHUNK // weight.shape[1])
    for i in range(0, len(weight), step):
        rows = weight[i : i + step]  # [step, in]
        scale[i : i + step] = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
        values[i : i + step] = torch.round(rows / scale[i : i + step])
    return values, scale


def quantise_blocks(weight: Tensor, bits: int) -> Blocks:
    """weight [out, in], `in` a multiple of GROUP, in 4 or 8 bits with a scale in float16 for each group.

    8 bits: symmetric. 4 bits: with a minimum, and little squared error. Several ranges of a group are tried. The
    integers of a range fix the scale and the minimum of least squared error (linear regression of the weights on the
    integers); the best range is kept. Scale and minimum are rounded to float16 before the integers are chosen for good.
    """
    outs, columns = weight.shape
    integers = np.empty((outs, columns), np.uint8 if bits == 4 else np.int8)
    scales, minima = np.empty((2, outs, columns // GROUP), np.float16)
    step = max(1, CHUNK // columns)
    for i in range(0, outs, step):
        groups = weight[i : i + step].float().reshape(-1, columns // GROUP, GROUP)
        whole, scale, minimum = _in_4_bits(groups) if bits == 4 else _in_8_bits(groups)
        integers[i : i + step] = whole.reshape(-1, columns).numpy()
        scales[i : i + step], minima[i : i + step] = scale.numpy(), minimum.numpy()
    if bits == 4:
        return Blocks(bits, GROUP, integers, Scales(scales), Scales(minima))
    return Blocks(bits, GROUP, integers, Scales(scales), None, zero=128)


def _in_8_bits(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise like `_in_4_bits`, with minima of 0."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).half()
    whole = (x / scale.float().clamp(min=1e-12)).round_().clamp_(-127, 127)
    return whole.to(torch.int8), scale[..., 0], torch.zeros_like(scale[..., 0])


def _in_4_bits(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [..., GROUP], scales and minima in float16 [...]."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    middle, half = (high + low) / 2, (high - low) / 2
    best = torch.full(low.shape, torch.inf)
    scale, minimum = torch.zeros_like(low), low
    for share in RANGES.tolist():
        each = (2 * share / LEVELS) * half.clamp(min=1e-12)
        whole = ((x - (middle - share * half)) / each).round_().clamp_(0, LEVELS)
        spread = whole - whole.mean(-1, keepdim=True)
        slope = (spread * x).sum(-1, keepdim=True) / spread.square().sum(-1, keepdim=True).clamp(min=1e-12)
        start = x.mean(-1, keepdim=True) - slope * whole.mean(-1, keepdim=True)
        error = (x - whole * slope - start).square().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, slope, scale), torch.where(better, start, minimum)
    stored, least = scale.half(), minimum.half()
    whole = ((x - least.float()) / stored.float().clamp(min=1e-12)).round_().clamp_(0, LEVELS)
    return whole.to(torch.uint8), stored[..., 0], least[..., 0]
