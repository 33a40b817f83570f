"""Attention for a pass in which a draft token overflows, so that its keys and values are not finite. PyTorch gives
these values the weight 0 in rows that do not see the token, but 0 times a value that is not finite is NaN, which would
spoil these rows, too. So the pass is run again, and each row attends only to the slots that it sees.
"""

from typing import Protocol

import torch
from torch import Tensor

FOLD_ROWS = 64
"""If a sequence has at most this many new tokens, the query heads that share a key/value head become rows of one
attention call. With more tokens, the mask would be too large."""


class Attend(Protocol):
    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention: q [1, H, n, D], keys [1, Hk, S, D], values [1, Hk, S, Dv], additive mask [n, S] or [1, H, n, S] or
        None -> [1, H, n, Dv]"""
        ...


def may_spoil(hidden: Tensor | None, sequences: int) -> bool:
    """Return whether a row of the residual stream [M, d] is not finite and may have spoilt another row. A value that is
    not finite spreads over its row, so one column is enough. CUDA is not checked: that would be a second
    synchronisation per step."""
    if hidden is None or len(hidden) == sequences or hidden.device.type != "cpu":
        return False
    return not bool(hidden[:, 0].isfinite().all())


def rows_apart(attend: Attend, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, n: int) -> Tensor:
    """Call `attend` for one row after another.

    q     [1, H, f n, D]: n rows, or f heads with n rows each.
    mask  [f n, S] or [1, H, f n, S], additive: minus infinity at slots that a row does not see, the same for all heads.
          None: every row sees all slots.
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
