"""What the loop trains: the contract of an objective, and what they share beside the losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.training.acceptance import chances
from slipstream.training.features import Teacher, Window


class Objective(nn.Module, ABC):
    """A module under training and its loss.

    name     as on the command line.
    options  how it was asked for; written into the checkpoint, and compared when a run is resumed.
    module   what is trained, checkpointed and exported.
    taps     the target's hidden states that it reads (see `TargetOut.hidden`).
    depth    K, the guesses of a chain whose acceptance is simulated.

    `forward` is the loss, so that whatever wraps a module to train it on several devices sees every parameter used.
    """

    name: str
    options: Any
    module: nn.Module
    taps: tuple[int, ...]
    depth: int
    teacher: Teacher

    @abstractmethod
    def forward(self, window: Window) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to differentiate, and scalars to show."""

    def begin_step(self, step: int, share: float) -> None:
        """Called before the forwards of an optimiser step; `share` of the budget is spent."""

    @abstractmethod
    def chances(self, window: Window, temperature: float) -> Tensor:
        """[R, L] -> [R, L, K]: see `acceptance`."""

    def measure(self, windows: list[Window], prompts: list[list[int]]) -> dict[str, Any]:
        """More figures for the end of a run, on the greedy held-out texts; prompts: prompt length of each text."""
        return {}

    @abstractmethod
    def export(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write what decoding loads, in the field's format."""


def likeliest(states: Tensor, table: Tensor) -> Tensor:
    """The first maximum of every law: states [B, N, d], output head [V, d] -> int64 [B, N], one window at a time."""
    return torch.stack([F.linear(x, table.to(x.dtype)).argmax(-1) for x in states])


def agreement(q: Tensor, p: Tensor, counts: Tensor) -> Tensor:
    """Share of the places that count where two ids are the same; q, p int64 [...], counts bool [...]."""
    weight = counts.float()
    return ((q == p) * weight).sum() / weight.sum().clamp(min=1)


def chain_chances(
    guesses: list[Tensor], p: Tensor, tokens: Tensor, temperature: float, own: Tensor | None = None
) -> Tensor:
    """Chances of a chain: guesses[j] [R, M, V'] are the logits of guess j of drafts that start behind tokens 1, 2, ...
    (missing places at the end aside), p [R, L, V] the target's logits -> [R, L, K] (see `acceptance`).

    own: `tokens` as the draft numbers them, -1 for ids that it cannot guess; None if it has the target's vocabulary.
    """
    known = tokens if own is None else own
    rows, length = tokens.shape
    out = torch.zeros(rows, length, len(guesses), dtype=torch.float64, device=tokens.device)
    for j, q in enumerate(guesses):
        # Behind token n, guess j is token n + 1 + j, and its law is the target's at place n + j.
        count = min(q.shape[1], length - 2 - j)
        if count > 0:
            text = slice(2 + j, 2 + j + count)
            wanted = p[:, 1 + j : 1 + j + count]
            out[:, 1 : 1 + count, j] = chances(q[:, :count], wanted, tokens[:, text], temperature, known[:, text])
    return out
