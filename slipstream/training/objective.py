"""The contract of a training objective, and functions that objectives share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.training.acceptance import acceptance_probs
from slipstream.training.features import Teacher, Window


class Objective(nn.Module, ABC):
    """A module under training and its loss.

    name     the name on the command line.
    options  its settings; stored in the checkpoint and compared when a run is resumed.
    module   the module that is trained, checkpointed and exported.
    taps     the target's hidden states that the objective reads (see `TargetOut.hidden`).
    depth    K, the draft length whose acceptance is simulated.
    compiled whether its layers are compiled, for each shape of a batch.

    `forward` computes the loss, so that a wrapper for several devices sees every parameter that is used.
    """

    name: str
    options: Any
    module: nn.Module
    taps: tuple[int, ...]
    depth: int
    compiled: bool = False
    teacher: Teacher

    @abstractmethod
    def forward(self, window: Window) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss to differentiate, and scalars to display."""

    def begin_step(self, step: int, share: float) -> None:
        """Called before the forwards of an optimiser step; `share` of the budget is spent."""

    @abstractmethod
    def acceptance_probs(self, window: Window, temperature: float) -> Tensor:
        """Acceptance probabilities of draft tokens, [R, L] -> [R, L, K]: see `acceptance`."""

    def measure(self, windows: list[Window], prompts: list[list[int]]) -> dict[str, Any]:
        """Further measurements after a run, on the greedy held-out texts; prompts: prompt length of each text."""
        return {}

    @abstractmethod
    def export(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the result in the standard format that decoding loads."""


def most_likely(states: Tensor, table: Tensor) -> Tensor:
    """The most likely id of each distribution (ties: the lowest): states [B, N, d], output head [V, d] -> int64 [B, N].

    Windows are processed one at a time.
    """
    return torch.stack([F.linear(x, table.to(x.dtype)).argmax(-1) for x in states])


def agreement(q: Tensor, p: Tensor, counts: Tensor) -> Tensor:
    """Share of the counted positions where two ids are equal; q, p int64 [...], counts bool [...]."""
    weight = counts.float()
    return ((q == p) * weight).sum() / weight.sum().clamp(min=1)


def chain_acceptance_probs(
    draft_logits: list[Tensor], p: Tensor, tokens: Tensor, temperature: float, own: Tensor | None = None
) -> Tensor:
    """Acceptance probabilities of chains, [R, L, K] (see `acceptance`).

    draft_logits  K tensors [R, M, V']: logits of draft token j of the drafts after tokens 1, 2, ...; positions at
                  the end may be missing.
    p             [R, L, V], the target's logits.
    own           `tokens` as draft vocabulary ids, -1 for ids outside it; None if it is the target's vocabulary.
    """
    known = tokens if own is None else own
    rows, length = tokens.shape
    out = torch.zeros(rows, length, len(draft_logits), dtype=torch.float64, device=tokens.device)
    for j, q in enumerate(draft_logits):
        # Draft token j after token n is token n + 1 + j; the target's distribution for it is at position n + j.
        count = min(q.shape[1], length - 2 - j)
        if count > 0:
            text = slice(2 + j, 2 + j + count)
            wanted = p[:, 1 + j : 1 + j + count]
            out[:, 1 : 1 + count, j] = acceptance_probs(
                q[:, :count], wanted, tokens[:, text], temperature, known[:, text]
            )
    return out
