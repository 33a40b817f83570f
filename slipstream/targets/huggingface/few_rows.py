"""Linear layers of a transformers model over few rows, on processors for which torch's own are slow.

Decoding reads every weight for one row, or for the few of a draft. `F.linear` calls MKL, which on AMD's processors is
far from the speed of memory, and takes three times as long for two rows as for one. Two other products of torch, on the
same weights in the same place, are faster (70 MB of weights in a 4096x768 layer, two cores of an EPYC, milliseconds):

    rows   F.linear   batched   oneDNN
    1      5.3        2.0       2.9
    2      18.4       3.0       8.3
    4      12.0       6.6       3.9
    8      15.9       10.1      8.4

Within `fast`, layers take the faster one. Nothing is copied and nothing is kept, so weights may change between passes,
and outside of a pass the model is what it was. Sums are added in another order, as between any two of torch's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCHED_ROWS, ONEDNN_ROWS = 3, 16
"""Most rows of a batched product, and of one by oneDNN."""
_GROUP = 64
"""Outputs of each product of a batch. Fixed, so that sums do not depend on the number of threads."""


class FewRows:
    """module: of transformers. wanted: whether its layers are to be faster; None: where `is_faster`."""

    def __init__(self, module: nn.Module, wanted: bool | None = None):
        wanted = is_faster() if wanted is None else wanted
        linears = (layer for layer in module.modules() if type(layer) is nn.Linear)
        self.layers = [layer for layer in linears if wanted and _is_plain(layer)]

    @contextmanager
    def fast(self) -> Iterator[None]:
        """The layers are fast in this block, of which several may run at once."""
        for layer in self.layers:
            vars(layer)["forward"] = functools.partial(_forward, layer)
        try:
            yield
        finally:
            for layer in self.layers:
                vars(layer).pop("forward", None)


def _is_plain(layer: nn.Linear) -> bool:
    """Whether nobody has changed what this layer does: quantisation and device maps do."""
    changed = "forward" in vars(layer) or type(layer.weight) is not nn.Parameter
    return not changed and layer.weight.dtype == torch.float32


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of x [..., in], weight [out, in] and bias [out]: [..., out]."""
    rows, most = x.shape[:-1].numel(), len(weight) // _GROUP * _GROUP
    if not 0 < rows <= ONEDNN_ROWS or not most or not _on_cpu(x, weight):
        return F.linear(x, weight, bias)
    if rows > BATCHED_ROWS:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
        return out
    flat = x.reshape(rows, -1)  # [M, in]
    groups = weight[:most].view(-1, _GROUP, weight.shape[1])
    made = torch.bmm(groups, flat.t().expand(len(groups), -1, -1)).view(most, rows).t()  # [M, most]
    if most < len(weight):
        made = torch.cat((made, F.linear(flat, weight[most:])), 1)
    made = made.contiguous()
    if bias is not None:
        made += bias
    return made.view(*x.shape[:-1], len(weight))


def _on_cpu(x: Tensor, weight: Tensor) -> bool:
    here = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
    return here and weight.is_contiguous() and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


@functools.cache
def is_faster() -> bool:
    """Whether `linear` is faster than `F.linear` here: on AMD's processors, as far as Linux names them. On Intel's, for
    which MKL is made, it was not measured."""
    cpuinfo = Path("/proc/cpuinfo")
    amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()
    return amd and torch.backends.mkl.is_available() and _has_onednn()


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
