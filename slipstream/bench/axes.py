"""What a measurement varies, and what the closed forms predict for each of its arms: from the *longest* draft of its
series (arms that differ only in the draft length), and the shortest, which tells the cost of a draft token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.bench.contender import Contender
from slipstream.bench.measure import Run
from slipstream.bench.measured_steps import measured, target_costs
from slipstream.core.stats import SpecStats
from slipstream.theory.cost_curve import CostCurve

if TYPE_CHECKING:
    from slipstream.llm import LLM


def varied(contenders: Seq[Contender], conditions: Mapping[str, Seq[Any]]) -> dict[str, list[Any]]:
    """Axis -> its values, of the axes that have several. conditions: those of all contenders. The draft length is an
    axis if a drafter is measured at several."""
    found: dict[str, list[Any]] = {"draft_tokens": [], "drafter": [c.label for c in contenders]}
    for c in contenders:
        lengths = [other.length for other in contenders if other.label == c.label]
        found["draft_tokens"] = max(found["draft_tokens"], lengths, key=len)
    found |= {name: list(values) for name, values in conditions.items()}
    return {name: distinct for name, values in found.items() if len(distinct := list(dict.fromkeys(values))) > 1}


def horizontal(axes: Mapping[str, Seq[Any]]) -> str | None:
    """The horizontal axis of the plots: the numeric axis with the most values, the first one of equals; None if there
    is none."""
    numeric = [n for n in axes if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in axes[n])]
    return max(numeric, key=lambda name: len(axes[name]), default=None)


def costs_of(llm: LLM, runs: Seq[Run]) -> CostCurve:
    """The target's cost curve up to the rows that these runs need, after a text of median length."""
    widest = max(run.arm.batch * (run.arm.draft_tokens + 1) for run in runs)
    return target_costs(llm.target, int(np.median([len(ids) for run in runs for ids in run.prompts])), widest)


def predictions(runs: Seq[Run], costs: CostCurve | None) -> list[dict[str, Any] | None]:
    """`predicted` for each run. costs: of the target; without them nothing is predicted."""
    found = []
    for run in runs:
        series = [r for r in runs if r.plain is run.plain and r.arm.name == run.arm.name and r.arm.lengths is None]
        applies = costs is not None and run.plain is not None and run.arm.lengths is None
        found.append(predicted(run, series, costs) if applies else None)
    return found


def predicted(run: Run, series: Seq[Run], costs: CostCurve | None) -> dict[str, Any] | None:
    """Tokens per second and speed-up predicted by the closed forms; None if they do not apply (trees, no draft)."""
    shortest, longest = (f(series, key=lambda r: r.arm.draft_tokens) for f in (min, max))
    stats = longest.stats()
    if costs is None or not stats.position_rates or is_tree(stats):
        return None
    m = measured(longest, costs, shortest)
    found = m.prediction(run.arm.draft_tokens)
    return {
        "tokens_per_second": m.batch * m.tokens / found.total_seconds,
        "speedup": found.speedup,
        "mean_acceptance_length": found.tau,
    }


def is_tree(stats: SpecStats) -> bool:
    """Whether more draft tokens were verified than a chain of the same depth has."""
    return stats.proposed > sum(stats.drafted_at.values())
