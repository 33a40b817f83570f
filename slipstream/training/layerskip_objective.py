"""LayerSkip for a target that was not trained for it: layer dropout and early-exit loss (Elhoushi et al. 2404.16710,
section 4.1), continued from its checkpoint.

The result is a *new target*, whose output differs from the original target's. To keep the difference small, every exit
(including the last layer) learns the distribution of the original target; the paper's loss uses only the text. A model
trained this way can draft with its own first layers: they learned to predict through the shared final norm and head,
and the model learned not to depend on every late layer.
"""

import math

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ParameterError, TrainingError
from slipstream.training.features import FINAL, Teacher, Window
from slipstream.training.losses import Aims
from slipstream.training.methods import LayerSkipOptions
from slipstream.training.objective import Predictions
from slipstream.training.trainable import ModelObjective, load_trainable


def dropout_rates(layers: int, p_max: float, progress: float = 1.0) -> list[float]:
    """Return the rates `p_l = S(t) D(l) p_max` with `D(l) = exp(l ln2 / (L-1)) - 1` (section 4.1.1), l = 0..L-1.

    progress: t / (T-1) in [0, 1], for `S(t) = exp(t ln2 / (T-1)) - 1`, the paper's schedule for training from scratch.
    A progress of 1 is the constant schedule of the paper's fine-tuning runs."""
    time = math.exp(progress * math.log(2)) - 1
    if layers == 1:
        return [0.0]
    return [time * (math.exp(level * math.log(2) / (layers - 1)) - 1) * p_max for level in range(layers)]


def choose_layers_to_run(rates: list[float], seed: int, step: int) -> list[bool]:
    """Draw the layers that run in this step. The draw is for the whole batch, so a skipped layer is not computed at
    all.

    It depends only on (seed, step), so a resumed run equals an uninterrupted run."""
    draws = np.random.default_rng([seed, 11, step]).random(len(rates))
    return [bool(u >= p) for u, p in zip(draws, rates, strict=True)]


def exit_weights(layers: int, settings: LayerSkipOptions, step: int) -> dict[int, float]:
    """Return the loss weights of the layers that exit in this step (section 4.1.2). They sum to 1.

    The weight of layer l is `e(l) C(t, l)` divided by the sum over all layers, with the curriculum C, `e(l) = e_scale *
    sum_{i<=l} i` for `l < L-1`, and `e(L-1) = L-1 + e_scale * sum_{i<=L-2} i`. The last layer always has a weight;
    layers with weight zero are left out."""
    last = layers - 1
    weights = {last: last + settings.exit_scale * (last - 1) * last / 2 if last else 1.0}
    if settings.rotation:
        for level in range(last):
            if step % settings.rotation == level % settings.rotation:
                weights[level] = settings.exit_scale * level * (level + 1) / 2
    total = sum(weights.values())
    return {level: w / total for level, w in sorted(weights.items()) if w > 0}


class LayerSkipObjective(ModelObjective):
    def __init__(self, teacher: Teacher, options: LayerSkipOptions, seed: int = 0):
        super().__init__(teacher, options, options.depth)
        if teacher.decoder.checkpoint is None:
            raise TrainingError("the target has no folder to train it from", fix="give a folder or hub id")
        self.seed, self.module = seed, load_trainable(teacher.decoder.checkpoint)
        self.module.to(teacher.device, teacher.dtype)
        layers = self.module.depth
        self.exit = max(1, layers // 2) if options.exit is None else options.exit
        if not 0 < self.exit < layers:
            raise ParameterError(f"exit is {self.exit}; the target has {layers} layers", fix=f"choose 1..{layers - 1}")
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        layers = self.module.depth
        # S(t) = 1: the constant schedule of the paper's continued training.
        self.kept = choose_layers_to_run(dropout_rates(layers, self.options.p_max), self.seed, step)
        self.exits = exit_weights(layers, self.options, step)

    def predictions(self, window: Window) -> Predictions:
        layers = self.module.depth
        if self.training:
            kept, weights = self.kept, self.exits
        else:  # independent of the step: the chosen exit and the last layer
            kept, weights = [True] * layers, {self.exit - 1: 0.5, layers - 1: 0.5}
        early = [level for level in weights if level < layers - 1]
        states = torch.stack(self.module.states(window.tokens[:, :-1], kept, early))  # [K, B, N, d]
        aims = Aims(window.taps[FINAL], self.teacher.head, window.counts, 0, stride=0)
        return states, self.module.table[None], aims, list(weights.values())

    def draft_logits(self, window: Window) -> tuple[list[Tensor], Tensor]:
        """Return the logits of the early exit and of the full model, on texts that the original target wrote."""
        early, last = self.module.states(window.tokens, None, [self.exit - 1])
        return self.shift(self.logits(early)), self.logits(last)
