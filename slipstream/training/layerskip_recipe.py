"""The LayerSkip recipe: layer dropout and early-exit loss (Elhoushi et al. 2024, arXiv 2404.16710).

A model trained this way can draft with its own first layers: they learned to predict through the shared final
norm and head, and the model learned not to depend on every late layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slipstream.errors import ParameterError


@dataclass(frozen=True)
class LayerSkip:
    """Settings of the recipe. Defaults suit eight layers trained from scratch.

    Attributes:
        p_max: dropout rate of the last layer at the end of the time schedule (section 4.1.1).
        exit_scale: `e_scale`, the total weight of the early exits relative to the last layer (section 4.1.2).
        rotation: `R` of the rotational curriculum `C_rot,R`: exit `l` is trained at the steps `t` with
            `t % R == l % R`, so a step computes about `L / R` exits. 0 turns the exits off.
    """

    p_max: float = 0.1
    exit_scale: float = 0.3
    rotation: int = 7

    def __post_init__(self) -> None:
        if not 0 <= self.p_max < 1:
            raise ParameterError(
                f"p_max={self.p_max} is not in [0, 1)",
                why="it is a probability of skipping a layer",
                fix="use about 0.1",
            )


def dropout_rates(layers: int, p_max: float, progress: float = 1.0) -> list[float]:
    """Rates `p_l = S(t) D(l) p_max` with `D(l) = exp(l ln2 / (L-1)) - 1` (section 4.1.1), l = 0..L-1.

    Args:
        progress: training progress in [0, 1]; `S(t) = exp(t ln2 / (T-1)) - 1`, the paper's choice for
            training from scratch. 1 gives the constant schedule of its fine-tuning runs.
    """
    time = math.exp(progress * math.log(2)) - 1
    if layers == 1:
        return [0.0]
    return [time * (math.exp(level * math.log(2) / (layers - 1)) - 1) * p_max for level in range(layers)]


def kept_layers(rates: list[float], seed: int, step: int) -> list[bool]:
    """Which layers run at this step: one draw for the whole batch, so a skipped layer is not computed at all.

    The draw is a function of (seed, step) alone, which keeps a resumed run equal to an uninterrupted one.
    """
    draws = np.random.default_rng([seed, 11, step]).random(len(rates))
    return [bool(u >= p) for u, p in zip(draws, rates, strict=True)]


def exit_weights(layers: int, settings: LayerSkip, step: int) -> dict[int, float]:
    """Normalised loss weights of the layers that exit at this step (section 4.1.2); they sum to 1.

    `e(l) = e_scale * sum_{i<=l} i` for `l < L-1`, `e(L-1) = L-1 + e_scale * sum_{i<=L-2} i`, times the
    curriculum `C(t, l)`, over their sum. The last layer is always on; weights of zero are left out.
    """
    last = layers - 1
    weights = {last: last + settings.exit_scale * (last - 1) * last / 2 if last else 1.0}
    if settings.rotation:
        for level in range(last):
            if step % settings.rotation == level % settings.rotation:
                weights[level] = settings.exit_scale * level * (level + 1) / 2
    total = sum(weights.values())
    return {level: w / total for level, w in sorted(weights.items()) if w > 0}
