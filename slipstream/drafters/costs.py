"""Measure what a drafter's own work costs on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq

from slipstream.core.costs import CostCurve
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.verify import RULES
from slipstream.drafters.base import Drafter
from slipstream.targets.base import Target


def measure_draft_costs(
    target: Target,
    drafter: Drafter,
    lengths: Seq[int],
    past: int = 64,
    repeats: int = 5,
    temperature: float = 0.0,
    costs: CostCurve | None = None,
) -> CostCurve:
    """Median seconds that a round with so many guesses spends on drafting, proposing and observing together, and on
    verifying beyond what a plain round does; `rows` of the curve are guesses, or levels of trees. lengths: increasing,
    beginning with 1.

    costs  of the target's forward by rows. What the forward takes beyond that is then counted, too: it runs the rows of
           a tree, not of a chain, behind a drafter that took its place in the caches (or, of a drafter that is the
           target's own exit, the layers that are left). Without it the forward is not in the curve.

    Decodes a made-up text for (len(lengths) + 1) * (repeats + 1) rounds and releases it again; running sequences are
    not touched. A drafter that keeps texts across requests would remember it: lookups are not measured (see `bandit`).
    """
    rounds = (len(lengths) + 1) * (repeats + 1)
    context = target.context - rounds * (max(lengths) + 1)
    params = SamplingParams(temperature=temperature, max_tokens=rounds * (max(lengths) + 1) + 2, seed=0)
    seq = Sequence([i % target.vocab_size for i in range(max(1, min(past, context - 2)))], params)
    times: dict[int, list[float]] = {n: [] for n in (0, *lengths)}
    try:
        step([seq], target, drafter, RULES["rejection"], 0)
        for turn in range(repeats + 1):
            for n in times:
                before, proposed = dict(seq.stats.seconds), seq.stats.proposed
                step([seq], target, drafter, RULES["rejection"], n)
                if turn:  # the first turn compiles and binds
                    spent = {phase: seconds - before[phase] for phase, seconds in seq.stats.seconds.items()}
                    seconds = spent["verify"] + spent["host"] + (spent["draft"] if n else 0.0)
                    if n and costs is not None:
                        seconds += spent["target"] - costs(1 + seq.stats.proposed - proposed)
                    times[n].append(seconds)
        plain = statistics.median(times[0])
        return CostCurve.monotone(lengths, [max(statistics.median(times[n]) - plain, 1e-9) for n in lengths])
    finally:
        target.release(seq.id)
        drafter.release(seq.id)
