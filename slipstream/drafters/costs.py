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
    target: Target, drafter: Drafter, lengths: Seq[int], past: int = 64, repeats: int = 5, temperature: float = 0.0
) -> CostCurve:
    """Median seconds that a round with so many guesses spends on drafting, proposing and observing together, and on
    verifying beyond what a plain round does; `rows` of the curve are guesses. The target's forward is not in it.
    lengths: increasing, beginning with 1.

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
                before = dict(seq.stats.seconds)
                step([seq], target, drafter, RULES["rejection"], n)
                if turn:  # the first turn compiles and binds
                    spent = {phase: seconds - before[phase] for phase, seconds in seq.stats.seconds.items()}
                    times[n].append(spent["verify"] + spent["host"] + (spent["draft"] if n else 0.0))
        plain = statistics.median(times[0])
        return CostCurve.monotone(lengths, [max(statistics.median(times[n]) - plain, 1e-9) for n in lengths])
    finally:
        target.release(seq.id)
        drafter.release(seq.id)
