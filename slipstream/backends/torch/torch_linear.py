"""Linear layers as the processor wants them: y = x W^T + b for x [M, in], prepared once at load.

Decoding is bound by reading W. A good kernel reads it once whether M is 1 or 8, and that is what makes checking
a draft nearly free. `F.linear` on a CPU does not (8 rows cost 6 times 1 row for a 2048x2048 layer on one
AVX-512 core: 1.20 and 0.21 ms); oneDNN with weights reordered for a few rows does (0.33 and 0.18 ms), and int8 is
faster still (0.12 and 0.08 ms). Where these operators are missing, `F.linear` runs instead.

The unpacked weights are dropped by whoever called `linear`; nothing here keeps them.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.backends.int8 import quantise_rows

_ROWS = 8
"""Rows that the packed layout is tuned for: a pending token and a draft of seven."""


class Linear(Protocol):
    nbytes: int
    """Bytes that this layer holds."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] -> [M, out]"""
        ...


def linear(weight: Tensor, bias: Tensor | None, device: torch.device, quantize: str | None = None) -> Linear:
    """The fastest layer for `weight` [out, in] and `bias` [out] on `device`.

    quantize  None, or "int8" (CPU, float32; see `Int8Linear`).
    """
    if quantize == "int8":
        return Int8Linear(weight, bias) if _has_int8() else PlainLinear(_rounded(weight), bias)
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


class Int8Linear:
    """int8 weights with one scale an output channel, symmetric; activations in 8 bits with one scale a *row* (in 7 on
    processors without VNNI: see `greatest`).

    The scale of a row depends on that row alone, and the sums are exact integers: a token gets bitwise the same
    result alone and among the rows of a draft. (Kernels that scale all rows together, such as torch's dynamic
    quantisation, let a rejected guess change the token before it.)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        values, scale = quantise_rows(weight)  # int8 [out, in], [out, 1]
        self.scale = scale[:, 0]
        self.packed = torch.ops.onednn.qlinear_prepack(values, [_ROWS, weight.shape[1]])
        self.zero = torch.zeros(weight.shape[0], dtype=torch.int64)  # [out]
        self.bias, self.most = bias, greatest()
        self.nbytes = values.nbytes + self.scale.nbytes + self.zero.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).div_(self.most).clamp_(min=1e-30)  # [M, 1]
        y = _products((x / scale).round_(), self.most, self.packed, self.scale, self.zero)
        return y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)


def _products(x: Tensor, most: int, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Integers from -most to most [M, in], times packed int8 weights: [M, out]."""
    q = (x + (most + 1)).to(torch.uint8)  # oneDNN is fast for unsigned activations only, so 0 is stored as most + 1
    return torch.ops.onednn.qlinear_pointwise(  # type: ignore[no-any-return]
        q, 1.0, most + 1, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )


@functools.cache
def greatest() -> int:
    """The integer that the greatest activation of a row becomes: 127 where this processor sums products exactly. Where
    it has no instruction for that (VNNI), oneDNN adds two products in 16 bits, silently cut at 32767; activations up to
    63, stored as 127 at most, stay below."""
    weights = torch.ops.onednn.qlinear_prepack(torch.full((16, 64), 127, dtype=torch.int8), [_ROWS, 64])
    found = _products(torch.full((1, 64), 127.0), 127, weights, torch.ones(16), torch.zeros(16, dtype=torch.int64))
    return 127 if bool((found == 64 * 127 * 127).all()) else 63


def _rounded(weight: Tensor) -> Tensor:
    """`weight` rounded to int8 but kept in float: same values, no memory saved."""
    values, scale = quantise_rows(weight)
    return values.to(weight.dtype) * scale.to(weight.dtype)


def repacks(dtype: torch.dtype, device: torch.device) -> bool:
    """True if `linear` makes layers that hold weights of their own, so that the checkpoint's can be let go."""
    return device.type == "cpu" and dtype == torch.float32 and _has_packed()


def _has_packed() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _has_int8() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")
