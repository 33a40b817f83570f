"""Linear layers, y = x W^T + b for x [M, in], with weights packed once at load.

Decoding is memory-bound: its time is that of reading W. A good kernel reads W once for M = 1 and for M = 8, which makes
verifying a draft cheap. On a CPU `F.linear` does not: 8 rows cost 6 times 1 row for a 2048x2048 layer on one AVX-512
core (1.20 and 0.21 ms). oneDNN with weights reordered for a few rows does (0.33 and 0.18 ms), and int8 is faster
(0.12 and 0.08 ms). Without these operators, `F.linear` runs instead.

The caller of `linear` frees the unpacked weights; nothing here keeps them.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.backends.int8 import quantise_rows

_ROWS = 8
"""Rows that the packed layout is tuned for: one pending token and seven draft tokens."""


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
    """Symmetric int8 weights with one scale per output channel; 8-bit activations with one scale per *row* (7-bit on
    processors without VNNI: see `largest_activation`).

    The scale of a row depends only on that row, and the sums are exact integers. The result is therefore
    batch-invariant: a row's result is bitwise identical with and without draft tokens. (If all rows share a scale, as
    in torch's dynamic quantisation, a rejected draft token can change the token before it.)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        values, scale = quantise_rows(weight)  # int8 [out, in], [out, 1]
        self.scale = scale[:, 0]
        self.packed = torch.ops.onednn.qlinear_prepack(values, [_ROWS, weight.shape[1]])
        self.zero = torch.zeros(weight.shape[0], dtype=torch.int64)  # [out]
        self.bias, self.most = bias, largest_activation()
        self.nbytes = values.nbytes + self.scale.nbytes + self.zero.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).div_(self.most).clamp_(min=1e-30)  # [M, 1]
        y = _products((x / scale).round_(), self.most, self.packed, self.scale, self.zero)
        return y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)


def _products(x: Tensor, most: int, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Products of integers from -most to most, [M, in], with packed int8 weights: [M, out]."""
    q = (x + (most + 1)).to(torch.uint8)  # oneDNN is fast for unsigned activations only, so 0 is stored as most + 1
    return torch.ops.onednn.qlinear_pointwise(  # type: ignore[no-any-return]
        q, 1.0, most + 1, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )


@functools.cache
def largest_activation() -> int:
    """The integer that represents the largest activation of a row: 127 if this processor sums products exactly.
    Without the instruction for it (VNNI), oneDNN adds two products in 16 bits and silently clips at 32767. Activations
    up to 63, stored as 127 at most, stay below that: 63."""
    weights = torch.ops.onednn.qlinear_prepack(torch.full((16, 64), 127, dtype=torch.int8), [_ROWS, 64])
    found = _products(torch.full((1, 64), 127.0), 127, weights, torch.ones(16), torch.zeros(16, dtype=torch.int64))
    return 127 if bool((found == 64 * 127 * 127).all()) else 63


def _rounded(weight: Tensor) -> Tensor:
    """`weight` rounded to int8 but kept in float: same values, no memory saved."""
    values, scale = quantise_rows(weight)
    return values.to(weight.dtype) * scale.to(weight.dtype)


def repacks(dtype: torch.dtype, device: torch.device) -> bool:
    """True if `linear` copies the weights into its own layout, so that the checkpoint's can be freed."""
    return device.type == "cpu" and dtype == torch.float32 and _has_packed()


def _has_packed() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _has_int8() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")
