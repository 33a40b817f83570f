"""Attention where a draft token overflows: its keys and values are not finite. PyTorch gives them the weight 0 for rows
that do not see the token, but 0 times a value that is not finite is NaN, which would spoil these rows, too. So a pass
with such a row is run again, each row alone over nothing but what it sees.
"""

from typing import Protocol

import torch
from torch import Tensor

FOLD_ROWS = 64
"""With at most this many new tokens, query heads of a group become rows; with more, the mask is too large."""


class Attend(Protocol):
    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q [1, H, n, D], keys [1, Hk, S, D], values [1, Hk, S, Dv], additive mask [n, S] or [1, H, n, S] or None ->
        [1, H, n, Dv]"""
        ...


def may_spoil(hidden: Tensor | None, sequences: int) -> bool:
    """Return whether a row of the residual stream [M, d] is not finite and may have spoilt another row. A value that is
    not finite spreads over its row, so one column is enough. CUDA is not checked: that would be a second
    synchronisation per step."""
    if hidden is None or len(hidden) == sequences or hidden.device.type != "cpu":
        return False
    return not bool(hidden[:, 0].isfinite().all())


def rows_apart(attend: Attend, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, n: int) -> Tensor:
    """`attend`, one row after another.

    q     [1, H, f n, D]: n rows, or f heads with n rows each.
    mask  [f n, S] or [1, H, f n, S], additive: minus infinity where a row does not see, the same for all heads. None:
          every row sees everything.
    """
    rows = q.unflatten(2, (-1, n))  # [1, H, f, n, D]
    masks = None if mask is None else mask.unflatten(-2, (-1, n))  # [..., f, n, S]
    out = []
    for i in range(n):
        seen, bias = slice(None), None
        if masks is not None:
            row_mask = masks[..., i, :]  # [..., f, S]
            seen = row_mask.flatten(0, -2)[0] != -torch.inf
            bias = row_mask[..., seen] if bool(row_mask[..., seen].any()) else None
        out.append(attend(rows[:, :, :, i], keys[:, :, seen], values[:, :, seen], bias))  # [1, H, f, Dv]
    return torch.stack(out, 3).flatten(2, 3)
