"""`MedusaRuntime`: the interface by which a drafter calls Medusa heads; each backend implements it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.heads.medusa_heads import MedusaConfig


class MedusaRuntime(Protocol):
    """Runs the heads: `MedusaHeads` itself, or a backend's implementation."""

    config: MedusaConfig
    token_map: Tensor
    """Target id of each draft id, int64 [draft_vocab]."""

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, d] -> [R, K, draft_vocab], valid until the next call."""
        ...
