"""Medians, quartiles and bootstrap intervals of paired timings; pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def spread(samples: ArrayLike) -> dict[str, float]:
    """Median and quartiles."""
    q1, q2, q3 = np.percentile(np.asarray(samples, float), [25, 50, 75])
    return {"median": float(q2), "q1": float(q1), "q3": float(q3)}


def ratio(
    top: ArrayLike, bottom: ArrayLike, resamples: int = 2000, seed: int = 0, weights: ArrayLike | None = None
) -> Estimate:
    """Ratio of the typical `top` to the typical `bottom`; both [prompts, passes], paired cell by cell.

    Typical: the median over passes of each prompt, then the median of those, or their mean weighted by `weights`
    [prompts]. A resample draws prompts and passes with replacement and uses the same cells of both, so a disturbed pass
    affects both sides equally.
    """
    top, bottom = np.asarray(top, float), np.asarray(bottom, float)
    if top.shape != bottom.shape or top.ndim != 2 or not top.size:
        raise ValueError(f"paired [prompts, passes] expected, got {top.shape} and {bottom.shape}")
    heavy = None if weights is None else np.asarray(weights, float)  # [prompts]
    rng = np.random.default_rng(seed)
    prompts = rng.integers(top.shape[0], size=(resamples, top.shape[0], 1))
    rounds = rng.integers(top.shape[1], size=(resamples, 1, top.shape[1]))
    drawn = None if heavy is None else heavy[prompts[..., 0]]  # [resamples, prompts]
    samples = _typical(top[prompts, rounds], drawn) / _typical(bottom[prompts, rounds], drawn)
    low, high = np.percentile(samples, [2.5, 97.5])
    return Estimate(float(_typical(top, heavy) / _typical(bottom, heavy)), float(low), float(high))


def mean(cells: ArrayLike, weights: ArrayLike, resamples: int = 2000, seed: int = 0) -> Estimate:
    """Mean, weighted by `weights` [prompts], of each prompt's median over passes; `cells` [prompts, passes]."""
    values, heavy = np.asarray(cells, float), np.asarray(weights, float)
    rng = np.random.default_rng(seed)
    prompts = rng.integers(values.shape[0], size=(resamples, values.shape[0], 1))
    rounds = rng.integers(values.shape[1], size=(resamples, 1, values.shape[1]))
    low, high = np.percentile(_typical(values[prompts, rounds], heavy[prompts[..., 0]]), [2.5, 97.5])
    return Estimate(float(_typical(values, heavy)), float(low), float(high))


def _typical(cells: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """[..., prompts, passes] -> [...]; weights [..., prompts]."""
    each = np.median(cells, axis=-1)
    return np.median(each, axis=-1) if weights is None else (each * weights).sum(-1) / weights.sum(-1)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Compares two lists of outputs, prompt by prompt.

    identical: share of the prompts with equal outputs. divergences: for each other prompt, its index and the index of
    the first token that differs (or the length of the shorter output).
    """
    divergences = []
    for prompt, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            divergences.append({"prompt": prompt, "token": first})
    return {"identical": 1 - len(divergences) / len(ours), "divergences": divergences}
