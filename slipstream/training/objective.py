"""The contract of a training objective: it makes predictions, from which loss and acceptance are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.core.strict import JsonObject
from slipstream.training.acceptance import acceptance_probs
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.losses import Aims, compute_losses
from slipstream.training.methods import RunConfig
from slipstream.training.packing import TokenStream

Figures = JsonObject
"""Measurements by name: numbers, or tables of numbers."""
Predictions = tuple[Tensor, Tensor, Aims, list[float]]
"""Arguments of `compute_losses`: `states`, `weight`, `aims` and `weights`."""


class Objective(nn.Module, ABC):
    """A module under training and its loss.

    options  settings of the method.
    module   the module that is trained, checkpointed and exported.
    taps     the target's hidden states that the objective reads (see `TargetOut.hidden`), including `FINAL`.
    depth    K, the draft length whose acceptance is simulated.
    """

    module: nn.Module
    taps: tuple[int, ...] = (FINAL,)

    def __init__(self, teacher: Teacher, options: Any, depth: int):
        super().__init__()
        self.teacher, self.options, self.depth = teacher, options, depth

    @classmethod
    def make(cls, teacher: Teacher, config: RunConfig, streams: list[TokenStream]) -> Objective:
        """Make the objective of a run. streams: the training data."""
        return cls(teacher, config.options, config.seed)  # subclasses take a seed instead of the depth

    @abstractmethod
    def predictions(self, window: Window) -> Predictions:
        """Return the module's predictions in a window [B, T], and their training targets."""

    @abstractmethod
    def draft_logits(self, window: Window) -> tuple[list[Tensor], Tensor]:
        """Return (draft logits, target logits [R, L, V]) of a window [R, L]. Draft logits are K tensors [R, M, V']: for
        each draft token, its logits in drafts after tokens 1, 2, ... of the window, perhaps without the last ones."""

    @abstractmethod
    def export(self, folder: Path, target: str | None, figures: Figures) -> None:
        """Write the result in the standard format, which decoding loads. target: name of the target. figures:
        measurements."""

    def begin_step(self, step: int) -> None:
        """Prepare for an optimiser step. Called before the step's forward passes."""

    def measure(self, windows: list[Window]) -> Figures:
        """Return further measurements after a run, on the windows of the greedy held-out texts."""
        return {}

    def draft_ids(self, ids: Tensor) -> Tensor:
        """Turn token ids of the target into ids of the draft vocabulary; -1 for ids outside it."""
        return ids

    def forward(self, window: Window) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss to differentiate, and scalars to display: the loss of each prediction."""
        loss, each = compute_losses(*self.predictions(window))
        return loss, {f"loss{k + 1}": value for k, value in enumerate(each)}

    def acceptance_probs(self, window: Window, temperature: float) -> Tensor:
        """Return the acceptance probabilities of the draft tokens of chains, [R, L] -> [R, L, K]: see `acceptance`."""
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


def decay_weights(decay: float, count: int) -> list[float]:
    """Return the weights decay^k of `count` losses, scaled so that their sum is 1."""
    raw = [decay**k for k in range(count)]
    return [w / sum(raw) for w in raw]


def initialise(module: nn.Module, generator: torch.Generator, residual: float = 0.01) -> None:
    """Draw weights from a normal distribution with the standard deviation 0.02. It is `residual` for matrices that
    write to the residual stream, and 1 for the hidden states of mask rows."""
    for name, weight in module.named_parameters():
        if weight.ndim == 2:
            std = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            nn.init.normal_(weight, 0.0, std, generator=generator)
        elif name == "mask_hidden":
            nn.init.normal_(weight, generator=generator)
