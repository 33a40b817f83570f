"""Measures the cost of drafting on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq

from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.step import step
from slipstream.core.target import Target
from slipstream.targets.target_costs import made_up_text
from slipstream.theory.cost_curve import CostCurve


def measure_draft_costs(
    target: Target, drafter: Drafter, lengths: Seq[int], past: int = 64, repeats: int = 5
) -> CostCurve:
    """Median seconds of drafting in a greedy step with n draft tokens, after another step of that length. Includes
    proposing and observing, and verification in excess of a plain decode step. `rows` of the curve are draft tokens, or
    levels of trees. lengths: increasing, beginning with 1; those for which the target's context has no room are left
    out.

    Decodes a made-up text for 2 * (len(lengths) + 1) * (repeats + 1) steps (fewer if the target's context is too short)
    and releases it; running sequences are not affected.
    """
    lengths = list(lengths)
    while len(lengths) > 1 and 2 * _pass_tokens(lengths) + 3 > target.context:
        lengths.pop()
    pass_tokens = _pass_tokens(lengths)
    passes = max(2, min(repeats + 1, (target.context - 3) // pass_tokens))
    past = max(1, min(past, target.context - passes * pass_tokens - 2))
    seq = made_up_text(target, past, SamplingParams(max_tokens=passes * pass_tokens + 2, seed=0))
    times: dict[int, list[float]] = {n: [] for n in lengths}

    def timed_step(draft_tokens: int) -> dict[str, float]:
        """Seconds of a step by phase."""
        before = dict(seq.stats.seconds)
        step([seq], target, drafter, RULES["rejection"], draft_tokens)
        return {phase: seconds - before[phase] for phase, seconds in seq.stats.seconds.items()}

    try:
        timed_step(0)
        for i in range(passes):
            timed_step(0)  # a runtime may prepare kernels when the number of rows changes
            plain = timed_step(0)
            for n in lengths:
                timed_step(n)
                seconds = timed_step(n)
                if i:  # the first pass compiles and binds
                    above = seconds["verify"] + seconds["host"] - plain["verify"] - plain["host"]
                    times[n].append(seconds["draft"] + above)
        return CostCurve.monotone(lengths, [max(statistics.median(times[n]), 1e-9) for n in lengths])
    finally:
        target.release(seq.id)
        drafter.release(seq.id)


def _pass_tokens(lengths: Seq[int]) -> int:
    """Most tokens that a pass over these lengths adds: two steps of each, and two plain ones."""
    return 2 * (sum(lengths) + len(lengths) + 1)
