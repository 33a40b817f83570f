"""Estimates with 95 % intervals from paired timings, medians and quartiles; pure functions.

How an interval is made. The timings [prompts, passes] of two ways of decoding are paired cell by cell, so a disturbance
of both sides of a pair cancels. Each pass over all prompts gives one speed-up; prompts are crossed with passes, and
both are replicates. On a logarithmic scale the variance has three parts:

    passes    variance of the speed-ups of single passes, over their number: effects that a whole pass shares (order
              effects, too, because the order rotates from pass to pass), and noise of the cells
    cells     the part of `passes` that is noise of single cells
    prompts   variance of the gains of single prompts, over their number; it contains the noise of the cells, too

The interval is the estimate times exp(+-w), with w^2 the larger of

    t(passes - 1)^2 passes                                                   for the same prompts in new passes
    t(prompts - 1)^2 prompts + t(passes - 1)^2 max(0, passes - cells)        for new prompts in new passes

The first line is the t interval of paired passes: without it, identical work could seem to differ. The second line adds
the variances of both clusterings and subtracts the part that both contain [1]. With few clusters, each part needs the
quantile of Student's t with (number of clusters - 1) degrees of freedom [2]. Prompts with unequal weights count as an
effective number of equal prompts: (sum of weights)^2 / sum of squared weights [3]. For timings of programs see [4].

[1] Cameron, Gelbach, Miller: Robust inference with multiway clustering. J. Business & Economic Statistics 29 (2011).
[2] Cameron, Miller: A practitioner's guide to cluster-robust inference. J. Human Resources 50 (2015), section VI.
[3] Kish: Survey Sampling (1965), section 11.7.
[4] Kalibera, Jones: Rigorous benchmarking in reasonable time. ISMM 2013.

Simulations check the intervals (`tests/measure/test_interval_coverage.py`; docs/log.md has the figures): for identical
work, at most 7 % of them exclude 1 for every number of prompts and passes; if prompts differ, 93 to 98 % contain the
true value. With fewer than 3 passes or 3 prompts there is no interval.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from slipstream.measure.tables import Estimate as Estimate, remark

FEWEST_PASSES = FEWEST_PROMPTS = 3
"""Fewest passes and prompts for an interval: with two, Student's t makes the interval too wide to be useful."""
FEW_PASSES, FEW_PROMPTS, NO_DRAFTS, REJECTED = "few passes", "few prompts", "no drafts", "no draft accepted"
"""Notes of estimates without an interval. NO_DRAFTS: nothing was drafted, so plain decoding is compared with itself."""
CHANCE = (NO_DRAFTS, REJECTED)
"""Notes of a difference in speed that drafts cannot have caused."""
REASONS = {
    FEW_PASSES: f"not enough passes for an interval: raise --rounds to {FEWEST_PASSES} or more",
    FEW_PROMPTS: f"not enough prompts for an interval: raise --prompts, to {FEWEST_PROMPTS} batches or more",
    NO_DRAFTS: "nothing was drafted: this is plain decoding, and a difference from it is chance",
    REJECTED: "no draft token was accepted, so drafts cannot have saved time: a gain is chance",
}


def explain_doubt(e: Estimate) -> str:
    """Return a sentence that a ratio is not significantly different from 1; an empty text if it is."""
    if e.low is None or e.high is None:
        return f" {remark(REASONS[e.note])}"
    return " Not statistically significant: the 95% interval includes 1." if e.low <= 1 <= e.high else ""


def estimate_ratio(top: ArrayLike, bottom: ArrayLike, weights: ArrayLike | None = None) -> Estimate:
    """Estimate the ratio of the typical `top` to the typical `bottom`. Both are positive and paired: [prompts, passes],
    or [passes] over all prompts; then the interval is for further passes over the same prompts.

    The typical value is the geometric mean over passes for each prompt, summed over prompts with `weights` ([prompts];
    None: 1 each).
    """
    above, below = np.asarray(top, float), np.asarray(bottom, float)
    if above.shape != below.shape or above.ndim not in (1, 2) or not above.size:
        raise ValueError(f"paired [prompts, passes] or [passes] expected, got {above.shape} and {below.shape}")
    logs = np.log(np.atleast_2d(above)), np.log(np.atleast_2d(below))
    prompts, passes = logs[0].shape
    heavy = np.ones(prompts) if weights is None else np.asarray(weights, float)
    sums = [heavy * np.exp(log.mean(1)) for log in logs]  # [prompts]: the parts of the typical top and bottom
    value = float(sums[0].sum() / sums[1].sum())
    if passes < FEWEST_PASSES:
        return Estimate(value, None, None, FEW_PASSES)
    shares = [each / each.sum() for each in sums]
    many = 2 / float((shares[0] ** 2 + shares[1] ** 2).sum())  # effective number of equal prompts
    if above.ndim == 2 and (prompts < FEWEST_PROMPTS or many < 2):
        return Estimate(value, None, None, FEW_PROMPTS)
    parts = shares[0][:, None] * logs[0] - shares[1][:, None] * logs[1]  # [prompts, passes]: of the logarithm
    by_pass = float(parts.sum(0).var(ddof=1)) / passes
    wide = (few := t_quantile(0.975, passes - 1) ** 2) * by_pass
    if above.ndim == 2:
        cells = float(parts.var(1, ddof=1).sum()) / passes
        by_prompt = float(((shares[0] - shares[1]) ** 2).sum())
        shared = few * max(0.0, by_pass - cells)
        wide = max(wide, (t_quantile(0.975, many - 1) ** 2 * by_prompt + shared) * many / (many - 1))
    factor = math.exp(math.sqrt(wide))
    return Estimate(value, value / factor, value * factor)


def estimate_mean(cells: ArrayLike, weights: ArrayLike | None = None) -> Estimate:
    """Estimate the mean of the prompts' typical values, weighted by `weights`. cells: as `top` of `estimate_ratio`."""
    return estimate_ratio(cells, np.ones_like(cells, float), weights)


@cache
def t_quantile(p: float, freedom: float) -> float:
    """Compute the quantile p > 1/2 of Student's t. Its density for x = sqrt(freedom) tan(a) is cos(a)^(freedom - 1)."""
    angles = np.linspace(0.0, math.pi / 2, 4001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp((2 * p - 1) * area[-1], area, angles)))
