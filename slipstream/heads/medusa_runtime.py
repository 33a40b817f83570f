"""`MedusaRuntime`: Medusa heads as a drafter calls them, behind one interface with one implementation a backend."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.heads.medusa_heads import MedusaConfig


class MedusaRuntime(Protocol):
    """What runs the heads: `MedusaHeads` itself, or a backend's own."""

    config: MedusaConfig
    token_map: Tensor
    """Target id of each id that the heads know, int64 [draft_vocab]."""

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, d] -> [R, K, draft_vocab], valid until the next call."""
        ...
