"""LayerSkip for a target that was not trained for it: layer dropout and early-exit loss (Elhoushi et al. 2404.16710,
section 4.1), continued from its checkpoint.

The result is a *new target*: its output differs from that of the original. To keep it close, every exit (the last
included) learns the original's distribution ("kl"). The paper's loss is "ce", on the text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.core.params import Strict, check_integer
from slipstream.errors import ParameterError, TrainingError
from slipstream.training.compact import CompactLlama
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.layerskip_recipe import LayerSkip, dropout_rates, exit_weights, kept_layers
from slipstream.training.losses import Aims, check_loss, distribution_losses
from slipstream.training.objective import Objective, agreement, chain_acceptance_probs, most_likely
from slipstream.training.trainable import HuggingFaceModel, load_trainable, save_model

if TYPE_CHECKING:
    from slipstream.training.data import Prepared
    from slipstream.training.run import RunConfig


@dataclass(frozen=True)
class LayerSkipOptions(Strict):
    """exit     number of layers before the exit whose acceptance is simulated; None: half of all.
    p_max, exit_scale, rotation   as in `LayerSkip`.
    loss     one of `losses.KINDS`.
    depth    K, the draft length whose acceptance is simulated.
    compile  compile the layers (needs a C++ compiler on a CPU).
    """

    exit: int | None = None
    p_max: float = 0.1
    exit_scale: float = 0.3
    rotation: int = 7
    loss: str = "kl"
    depth: int = 4
    compile: bool = False

    def __post_init__(self) -> None:
        check_integer("depth", self.depth, 1)
        check_integer("rotation", self.rotation, 0)
        if self.exit is not None:
            check_integer("exit", self.exit, 1)
        check_loss(self.loss)
        LayerSkip(self.p_max, self.exit_scale, self.rotation)  # raises ParameterError for bad values


class LayerSkipObjective(Objective):
    name = "layerskip"
    taps = (FINAL,)
    module: CompactLlama | HuggingFaceModel

    def __init__(self, teacher: Teacher, options: LayerSkipOptions, seed: int = 0):
        super().__init__()
        if teacher.decoder.source is None:
            raise TrainingError("the target has no folder to train it from", fix="give a folder or hub id")
        self.teacher, self.options, self.depth, self.seed = teacher, options, options.depth, seed
        self.compiled = options.compile
        self.module = load_trainable(teacher.decoder.source, options.compile)
        self.module.to(teacher.device, teacher.dtype)
        layers = self.module.depth
        self.exit = max(1, layers // 2) if options.exit is None else options.exit
        if not 0 < self.exit < layers:
            raise ParameterError(f"exit is {self.exit}, the target has {layers} layers", fix=f"choose 1..{layers - 1}")
        self.settings = LayerSkip(options.p_max, options.exit_scale, options.rotation)
        self.begin_step(0, 0.0)

    def begin_step(self, step: int, share: float) -> None:
        layers = self.module.depth
        # The constant schedule of the paper's continual training: S(t) = 1.
        self.kept = kept_layers(dropout_rates(layers, self.settings.p_max), self.seed, step)
        self.exits = exit_weights(layers, self.settings, step)

    def forward(self, window: Window) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, layers = window.tokens, self.module.depth
        inputs = tokens[:, :-1]
        if self.training:
            kept, weights = self.kept, self.exits
        else:  # independent of the step: the chosen exit and the last layer
            kept, weights = [True] * layers, {self.exit - 1: 0.5, layers - 1: 0.5}
        early = [level for level in weights if level < layers - 1]
        states = torch.stack([self.module.normed(x) for x in self.module.hidden(inputs, kept, early)])  # [K, B, N, d]
        aims = Aims(window.taps[FINAL], self.teacher.head, tokens, window.counts, 0, stride=0)
        loss, each = distribution_losses(
            self.options.loss, states, self.module.table[None], aims, list(weights.values())
        )
        shown = {}
        if not self.training:
            table, counts = self.module.table, window.counts[:, 1:]
            early_best, last = most_likely(states[0], table), most_likely(states[-1], table)  # [B, N]
            original = most_likely(window.taps[FINAL][:, :-1], self.teacher.head)
            shown = {"loss_exit": each[0], "loss_last": each[-1]}
            shown |= {"agree": agreement(early_best, last, counts), "agree_original": agreement(last, original, counts)}
        return loss, shown

    def _logits(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.module.table.to(states.dtype))

    def acceptance_probs(self, window: Window, temperature: float) -> Tensor:
        """Acceptance of the exit's tokens by the current model, on texts that the original wrote."""
        early, last = self.module.hidden(window.tokens, None, [self.exit - 1])
        q, p = self._logits(self.module.normed(early)), self._logits(self.module.normed(last))
        return chain_acceptance_probs([q[:, 1 + j :] for j in range(self.depth)], p, window.tokens, temperature)

    def export(self, folder: Path, facts: Mapping[str, Any]) -> None:
        save_model(self.module, folder, self.teacher.decoder.source, sorted(self.teacher.decoder.capabilities.eos_ids))


def make(teacher: Teacher, config: RunConfig, prepared: Prepared) -> LayerSkipObjective:
    """See `methods`."""
    return LayerSkipObjective(teacher, config.options, config.loop.seed)
