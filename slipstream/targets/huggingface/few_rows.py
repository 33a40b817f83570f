"""Linear layers of a transformers model over few rows, on processors for which torch's own are slow.

Decoding reads every weight for one row, or for the few rows of a draft. `F.linear` calls MKL, which on AMD's processors
is far from the speed of memory, and takes three times as long for two rows as for one. Within `fast`, layers use our
own product on the same weights; it adds up in an order that does not depend on the number of rows. Nothing is copied,
so weights may change between passes. In bfloat16, torch's product is slower only for few rows.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.backends.native import unpacked_product

MOST_ROWS = {torch.float32: 32, torch.bfloat16: 8}
"""Largest number of rows for which our product is faster (measured up to 32)."""


class FewRows:
    """Speeds up the linear layers of a model over few rows. wanted: whether to do this; None: if `is_faster`."""

    def __init__(self, module: nn.Module, wanted: bool | None = None):
        wanted = is_faster() if wanted is None else wanted
        linears = (layer for layer in module.modules() if type(layer) is nn.Linear)
        self.layers = [layer for layer in linears if wanted and _is_plain(layer)]

    @contextmanager
    def fast(self) -> Iterator[None]:
        """Use our product in the layers within this block. Blocks may be nested."""
        for layer in self.layers:
            vars(layer)["forward"] = functools.partial(linear, weight=layer.weight, bias=layer.bias)
        try:
            yield
        finally:
            for layer in self.layers:
                vars(layer).pop("forward", None)


def _is_plain(layer: nn.Linear) -> bool:
    """Return whether a linear layer is unmodified: quantisation and device maps replace its weight or `forward`."""
    changed = "forward" in vars(layer) or type(layer.weight) is not nn.Parameter
    return not changed and layer.weight.dtype in MOST_ROWS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` of x [..., in], weight [out, in] and bias [out]: [..., out]."""
    rows = x.numel() // max(1, weight.shape[1])
    if not 0 < rows <= MOST_ROWS.get(weight.dtype, 0) or not (weight.is_cpu and x.is_cpu and x.dtype is weight.dtype):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    if bias is not None and (bias.dtype is not weight.dtype or not bias.is_contiguous()):
        return F.linear(x, weight, bias)
    product = unpacked_product.product(x if x.is_contiguous() else x.contiguous(), rows, weight, bias)
    return product.view(*x.shape[:-1], len(weight))


@functools.cache
def is_faster() -> bool:
    """Return whether `linear` is faster than `F.linear` here: True on AMD's processors, if Linux reports the vendor.
    Not measured on Intel's processors, for which MKL is made."""
    cpuinfo = Path("/proc/cpuinfo")
    amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()
    return amd and torch.backends.mkl.is_available() and unpacked_product.available()
