"""The contract of a training objective: what it predicts; the loss, agreement and acceptance follow from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.training.acceptance import acceptance_probs
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.losses import Aims, distribution_losses
from slipstream.training.packing import Stream
from slipstream.training.training_settings import LoopConfig


@dataclass(frozen=True)
class Predictions:
    """What an objective predicts at the positions of a window: `states`, `tables` and `weights` as in
    `distribution_losses`, on which `aims` they are trained."""

    states: Tensor
    tables: Tensor
    aims: Aims
    weights: list[float]


class Objective(nn.Module, ABC):
    """A module under training and its loss.

    name     the name on the command line.
    options  its settings, `loss` among them; stored in the checkpoint and compared when a run is resumed.
    module   the module that is trained, checkpointed and exported.
    taps     the target's hidden states that the objective reads (see `TargetOut.hidden`), `FINAL` among them.
    depth    K, the draft length whose acceptance is simulated.
    compiled whether its layers are compiled, for each shape of a batch.
    """

    name: str
    options: Any
    module: nn.Module
    taps: tuple[int, ...] = (FINAL,)
    depth: int
    compiled: bool = False
    teacher: Teacher

    @classmethod
    def make(cls, teacher: Teacher, options: Any, loop: LoopConfig, streams: list[Stream]) -> Objective:
        """The objective of a run. streams: the training data."""
        return cls(teacher, options, loop.seed)  # type: ignore[call-arg]

    @abstractmethod
    def predictions(self, window: Window) -> Predictions:
        """What the module predicts in a window [B, T]."""

    @abstractmethod
    def draft_logits(self, window: Window) -> tuple[list[Tensor], Tensor]:
        """(K tensors [R, M, V'], [R, L, V]): the logits of draft token j of the drafts after tokens 1, 2, ... of a
        window [R, L], where positions at the end may be missing; and the target's logits."""

    @abstractmethod
    def export(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the result in the standard format that decoding loads."""

    def begin_step(self, step: int, share: float) -> None:
        """Called before the forwards of an optimiser step; `share` of the budget is spent."""

    def measure(self, windows: list[Window]) -> dict[str, Any]:
        """Further measurements after a run, on the windows of the greedy held-out texts."""
        return {}

    def draft_ids(self, ids: Tensor) -> Tensor:
        """Token ids of the target as ids of the draft vocabulary, -1 for those outside it."""
        return ids

    def forward(self, window: Window) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to differentiate, and scalars to display: the loss of each prediction, and in evaluations the share
        of positions at which its most likely token is the target's."""
        predicted = self.predictions(window)
        states, tables, aims = predicted.states, predicted.tables, predicted.aims
        loss, each = distribution_losses(self.options.loss, states, tables, aims, predicted.weights)
        shown = {f"loss{k + 1}": each[k] for k in range(len(states))}
        if not self.training:
            best, rows = self.draft_ids(most_likely(aims.final, self.teacher.head)), states.shape[2]
            for k in range(len(states)):
                at = aims.ahead + k * aims.stride
                same = most_likely(states[k], tables[min(k, len(tables) - 1)]) == best[:, at : at + rows]
                counted = aims.counts[:, 1 + at : 1 + at + rows].float()
                shown[f"agree{k + 1}"] = (same * counted).sum() / counted.sum().clamp(min=1)
        return loss, shown

    def acceptance_probs(self, window: Window, temperature: float) -> Tensor:
        """Acceptance probabilities of the draft tokens of chains, [R, L] -> [R, L, K]: see `acceptance`."""
        tokens = window.tokens
        known, length = self.draft_ids(tokens), tokens.shape[1]
        draft_logits, p = self.draft_logits(window)
        out = torch.zeros(*tokens.shape, len(draft_logits), dtype=torch.float64, device=tokens.device)
        for j, q in enumerate(draft_logits):
            # Draft token j after token n is token n + 1 + j; the target's distribution for it is at position n + j.
            count = min(q.shape[1], length - 2 - j)
            if count > 0:
                text, at = slice(2 + j, 2 + j + count), slice(1 + j, 1 + j + count)
                out[:, 1 : 1 + count, j] = acceptance_probs(
                    q[:, :count], p[:, at], tokens[:, text], temperature, known[:, text]
                )
        return out


def decaying(decay: float, count: int) -> list[float]:
    """Weights decay^k of `count` losses; they sum to 1."""
    raw = [decay**k for k in range(count)]
    return [w / sum(raw) for w in raw]


def most_likely(states: Tensor, table: Tensor) -> Tensor:
    """The most likely id of each distribution (ties: the lowest): states [B, N, d], output head [V, d] -> int64 [B, N].

    Windows are processed one at a time.
    """
    return torch.stack([F.linear(x, table.to(x.dtype)).argmax(-1) for x in states])
