"""Agreement of a draft model or an early exit with the target on held-out text; it determines acceptance rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.embedded.compact import CompactLlama, head_logits


@dataclass(frozen=True)
class Agreement:
    """Means over positions.

    Attributes:
        top1: share of positions where both distributions have the same maximum (acceptance rate of greedy decoding).
        overlap: mean of `sum_x min(p(x), q(x))`, the acceptance rate alpha of rejection sampling at
            temperature 1 (Leviathan et al. 2023, arXiv 2211.17192, corollary 3.6).
        positions: number of positions.
    """

    top1: float
    overlap: float
    positions: int


def compare(pairs: Iterator[tuple[Tensor, Tensor]]) -> Agreement:
    """Agreement of (target logits, draft logits) pairs, `[N, V]` each."""
    same, overlap, count = 0.0, 0.0, 0
    for p, q in pairs:
        same += float((p.argmax(-1) == q.argmax(-1)).sum())
        overlap += float(torch.minimum(p.float().softmax(-1), q.float().softmax(-1)).sum())
        count += len(p)
    return Agreement(same / count, overlap / count, count)


@torch.no_grad()
def draft_agreement(target: CompactLlama, draft: CompactLlama, tokens: Tensor, mask: Tensor | None = None) -> Agreement:
    """Agreement of a draft model with its target.

    tokens `[R, T]`; mask `[R, T]`, true at the positions that count.
    """

    def logits() -> Iterator[tuple[Tensor, Tensor]]:
        for i, row in enumerate(tokens):
            chosen = mask[i] if mask is not None else torch.ones_like(row, dtype=torch.bool)
            yield target(row[None])[0][chosen], draft(row[None])[0][chosen]

    return compare(logits())


@torch.no_grad()
def exit_agreement(model: CompactLlama, tokens: Tensor) -> dict[int, Agreement]:
    """Agreement of every early exit with the full model, by number of layers; tokens `[R, T]`."""
    layers = model.shape.num_hidden_layers
    norm, weight = model.model.norm, model.model.embed_tokens.weight
    parts: dict[int, list[Agreement]] = {n: [] for n in range(1, layers)}
    for row in tokens:
        states = model.hidden(row[None], taps=range(layers - 1))
        last = head_logits(norm, weight, states[-1])[0]
        for n, pair in parts.items():
            pair.append(compare(iter([(last, head_logits(norm, weight, states[n - 1])[0])])))
    rows = len(tokens)  # all rows have the same number of positions, so plain means are correct
    return {
        n: Agreement(sum(a.top1 for a in f) / rows, sum(a.overlap for a in f) / rows, sum(a.positions for a in f))
        for n, f in parts.items()
    }
