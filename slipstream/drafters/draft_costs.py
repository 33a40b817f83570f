"""Measure what a drafter's own work costs on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq

from slipstream.core.cost_curve import CostCurve
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import Target


def measure_draft_costs(
    target: Target,
    drafter: Drafter,
    lengths: Seq[int],
    past: int = 64,
    repeats: int = 5,
    temperature: float = 0.0,
    costs: CostCurve | None = None,
) -> CostCurve:
    """Median seconds that a round with so many guesses, behind another such round, spends on drafting, proposing and
    observing together, and on verifying beyond what a plain round does; `rows` of the curve are guesses, or levels of
    trees. lengths: increasing, beginning with 1.

    costs  of the target's forward by rows. What the forward takes beyond that is then counted, too: it runs the rows of
           a tree, not of a chain, behind a drafter that took its place in the caches (or, of a drafter that is the
           target's own exit, the layers that are left). Without it the forward is not in the curve. A machine that
           others use may have become faster or slower since `costs` was measured, by a half within seconds: each
           turn has a plain round, and all times are given at the pace at which its forward takes costs(1).

    Decodes a made-up text for 2 * (len(lengths) + 1) * (repeats + 1) rounds, fewer where the target's context cannot
    hold them, and releases it again; running sequences are not touched. A drafter that keeps texts across requests
    would remember it: lookups are not measured (see `bandit`).
    """
    turn_tokens = 2 * (sum(lengths) + len(lengths) + 1)
    turns = max(2, min(repeats + 1, (target.context - 3) // turn_tokens))
    past = max(1, min(past, target.context - turns * turn_tokens - 2))
    params = SamplingParams(temperature=temperature, max_tokens=turns * turn_tokens + 2, seed=0)
    seq = Sequence([i % target.vocab_size for i in range(past)], params)
    times: dict[int, list[float]] = {n: [] for n in lengths}

    def spent(guesses: int) -> tuple[dict[str, float], int]:
        """Seconds of a round by phase, and its rows."""
        before, proposed = dict(seq.stats.seconds), seq.stats.proposed
        step([seq], target, drafter, RULES["rejection"], guesses)
        seconds = {phase: seconds - before[phase] for phase, seconds in seq.stats.seconds.items()}
        return seconds, 1 + seq.stats.proposed - proposed

    try:
        spent(0)
        for turn in range(turns):
            spent(0)  # where the number of rows changes, a runtime may prepare its kernels: `costs` has that
            plain, _ = spent(0)
            pace = 1.0 if costs is None else costs(1) / plain["target"]
            for n in lengths:
                spent(n)
                seconds, rows = spent(n)
                own = seconds["draft"] + seconds["verify"] + seconds["host"] - plain["verify"] - plain["host"]
                if costs is not None:
                    settled = costs(rows) - (costs.jump() * costs(1) if rows > 1 else 0.0)
                    own = pace * (own + seconds["target"]) - settled
                if turn:  # the first turn compiles and binds
                    times[n].append(own)
        return CostCurve.monotone(lengths, [max(statistics.median(times[n]), 1e-9) for n in lengths])
    finally:
        target.release(seq.id)
        drafter.release(seq.id)
