"""Linear layers, y = x W^T + b for x [M, in], with weights packed once at load.

Decoding is memory-bound: its time is that of reading W. A good kernel reads W once for M = 1 and for M = 8, which makes
verifying a draft cheap. On a CPU `F.linear` does not: 8 rows cost 6 times 1 row for a 2048x2048 layer on one AVX-512
core (1.20 and 0.21 ms). oneDNN with weights reordered for a few rows does (0.33 and 0.18 ms). Without this operator,
`F.linear` runs instead.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 8
"""Rows that the packed layout is tuned for: one pending token and seven draft tokens."""


class Linear:
    """The fastest layer for `weight` [out, in] and `bias` [out] on `device`. The caller frees the unpacked weights.

    nbytes  bytes that this layer holds.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device):
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.bias = None if bias is None else bias.to(device)
        self._packed = repacks(weight.dtype, device)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if self._packed else weight.to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] -> [M, out]"""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def repacks(dtype: torch.dtype, device: torch.device) -> bool:
    """True if `Linear` copies the weights into a layout of oneDNN, so that the checkpoint's can be freed."""
    return device.type == "cpu" and dtype == torch.float32 and _has_packed()


def _has_packed() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
