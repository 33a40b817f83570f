"""Random Medusa heads, small enough to enumerate, that are better than chance for nobody."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.drafters.medusa import MedusaDraftConfig, MedusaDrafter
from slipstream.heads.medusa_heads import MedusaConfig, MedusaHeads


def tiny_heads(hidden: int = 8, vocab: int = 11, heads: int = 3, layers: int = 1, seed: int = 0, **config: Any):
    """float64, every parameter drawn at random; a borrowed lm_head too."""
    c = MedusaConfig(heads, layers, hidden, vocab, **config)
    made = MedusaHeads(c).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    if c.draft_vocab is not None:
        made.select_vocabulary(torch.randperm(vocab, generator=generator)[: c.draft_vocab])
    if not c.own_lm_head:
        made.borrow(torch.randn(vocab, hidden, generator=generator, dtype=torch.float64))
    return made.requires_grad_(False).eval()


def medusa_drafter(vocab: int, **options: Any) -> MedusaDrafter:
    """For a `ToyTarget`, whose hidden states are its logits."""
    return MedusaDrafter(tiny_heads(vocab, vocab, 4, seed=5), vocab, MedusaDraftConfig(**options))
