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
    target: Target,
    drafter: Drafter,
    lengths: Seq[int],
    past: int = 64,
    repeats: int = 5,
    temperature: float = 0.0,
    costs: CostCurve | None = None,
) -> CostCurve:
    """Median seconds of drafting in a step with n draft tokens, after another step of that length. Includes proposing
    and observing, and verification in excess of a plain decode step. `rows` of the curve are draft tokens, or levels of
    trees. lengths: increasing, beginning with 1; those for which the target's context has no room are left out.

    costs  of the target's forward by rows; None: the forward is not part of the curve. If given, the forward's time in
           excess of it is included: a forward may be slower because its rows form a tree, or because the drafter has
           displaced the target in the caches. (For a drafter that uses the target's own early exit, the forward runs
           the remaining layers.) With other load, the machine's speed can change by half within seconds. Therefore each
           repetition includes a plain step, and times are scaled so that its forward takes costs(1).

    Decodes a made-up text for 2 * (len(lengths) + 1) * (repeats + 1) steps (fewer if the target's context is too short)
    and releases it; running sequences are not affected. A drafter that keeps texts across requests would remember the
    made-up text.
    """
    lengths = list(lengths)
    while len(lengths) > 1 and 2 * _pass_tokens(lengths) + 3 > target.context:
        lengths.pop()
    pass_tokens = _pass_tokens(lengths)
    passes = max(2, min(repeats + 1, (target.context - 3) // pass_tokens))
    past = max(1, min(past, target.context - passes * pass_tokens - 2))
    params = SamplingParams(temperature=temperature, max_tokens=passes * pass_tokens + 2, seed=0)
    seq = made_up_text(target, past, params)
    times: dict[int, list[float]] = {n: [] for n in lengths}

    def timed_step(draft_tokens: int) -> tuple[dict[str, float], int]:
        """Seconds of a step by phase, and its rows."""
        before, proposed = dict(seq.stats.seconds), seq.stats.proposed
        step([seq], target, drafter, RULES["rejection"], draft_tokens)
        seconds = {phase: seconds - before[phase] for phase, seconds in seq.stats.seconds.items()}
        return seconds, 1 + seq.stats.proposed - proposed

    try:
        timed_step(0)
        for i in range(passes):
            timed_step(0)  # a runtime may prepare kernels when the number of rows changes: `costs` includes that
            plain, _ = timed_step(0)
            scale = 1.0 if costs is None else costs(1) / plain["target"]
            for n in lengths:
                timed_step(n)
                seconds, rows = timed_step(n)
                own = seconds["draft"] + seconds["verify"] + seconds["host"] - plain["verify"] - plain["host"]
                if costs is not None:
                    expected = costs(rows) - (costs.jump() * costs(1) if rows > 1 else 0.0)
                    own = scale * (own + seconds["target"]) - expected
                if i:  # the first pass compiles and binds
                    times[n].append(own)
        return CostCurve.monotone(lengths, [max(statistics.median(times[n]), 1e-9) for n in lengths])
    finally:
        target.release(seq.id)
        drafter.release(seq.id)


def _pass_tokens(lengths: Seq[int]) -> int:
    """Most tokens that a pass over these lengths adds: two steps of each, and two plain ones."""
    return 2 * (sum(lengths) + len(lengths) + 1)
