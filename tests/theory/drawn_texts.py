"""Simulated speculative decoding: texts drawn draft token by draft token, to check the closed forms against."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.theory.forecast import StepCosts


@dataclass(frozen=True)
class Sampled:
    """A mean with its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Drawn:
    """tau: tokens a step; speedup: plain time over speculative time; both of all texts together."""

    tau: Sampled
    speedup: Sampled


def draw_chains(rates: Seq[float], costs: StepCosts, tokens: int = 256, texts: int = 2000, seed: int = 0) -> Drawn:
    """Texts of `tokens` tokens, each step a chain of len(rates) draft tokens, fewer where the text is about to end.
    rates: share of the steps that accept the draft token at position 1, 2, ..."""
    rng = np.random.default_rng(seed)
    before = np.array([1.0, *rates[:-1]])
    chances = np.divide(rates, before, out=np.zeros(len(rates)), where=before > 0)  # [K] given all before it
    cost = np.array([costs.step(k) for k in range(len(rates) + 1)])
    left, steps, spent = np.full(texts, tokens), np.zeros(texts), np.zeros(texts)
    while len(alive := np.flatnonzero(left)):
        room = np.minimum(left[alive] - 1, len(rates))
        accepted = np.cumprod(rng.random((len(alive), len(rates))) < chances, axis=1).sum(axis=1)
        left[alive] -= np.minimum(accepted, room) + 1
        steps[alive] += 1
        spent[alive] += cost[room]
    full = np.full(texts, float(tokens))
    return Drawn(_ratio(full, steps), _ratio(full, spent))


def _ratio(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> Sampled:
    """Ratio of the sums with its standard error, to first order (the delta method)."""
    value = top.sum() / bottom.sum()
    residual = top - value * bottom
    return Sampled(float(value), float(residual.std(ddof=1) / (bottom.mean() * np.sqrt(len(top)))))
