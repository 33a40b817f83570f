"""What a measurement varies, and what the closed forms predict for each of its arms.

The prediction for an arm uses the acceptance rates by position of the *longest* draft of its series (arms that differ
only in the draft length), the target's measured cost curve, scaled to plain decoding in the same run, and a drafting
cost that is linear in the draft length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.bench.contender import Contender
from slipstream.bench.measure import Run
from slipstream.core.stats import SpecStats
from slipstream.theory.closed_forms import predict
from slipstream.theory.cost_curve import CostCurve

if TYPE_CHECKING:
    from slipstream.llm import LLM

ROWS = (1, 2, 4, 8, 16, 32)


def varied(contenders: Seq[Contender], conditions: Mapping[str, Seq[Any]]) -> dict[str, list[Any]]:
    """Axis -> its values, of the axes that have several. conditions: those of all contenders. The draft length is an
    axis if a drafter is measured at several."""
    found: dict[str, list[Any]] = {
        "draft_tokens": [],
        "drafter": [c.values.get("drafter", c.label) for c in contenders],
    }
    for c in contenders:
        lengths = [other.length for other in contenders if other.label == c.label]
        found["draft_tokens"] = max(found["draft_tokens"], lengths, key=len)
        for name, value in c.values.items():
            if name != "drafter":
                found.setdefault(name, []).append(value)
    found |= {name: list(values) for name, values in conditions.items()}
    return {name: distinct for name, values in found.items() if len(distinct := list(dict.fromkeys(values))) > 1}


def horizontal(axes: Mapping[str, Seq[Any]]) -> str | None:
    """The horizontal axis of the plots: the numeric axis with the most values, the first one of equals; None if there
    is none."""
    numeric = [n for n in axes if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in axes[n])]
    return max(numeric, key=lambda name: len(axes[name]), default=None)


def costs_of(llm: LLM, runs: Seq[Run]) -> CostCurve:
    """The target's cost curve up to the rows that these runs need, after a text of median length."""
    from slipstream.targets.target_costs import measure_costs

    widest = max(run.arm.batch * (run.arm.draft_tokens + 1) for run in runs)
    past = int(np.median([len(ids) for run in runs for ids in run.prompts]))
    room = llm.target.context - 2
    rows = [n for n in (*(n for n in ROWS if n < widest), widest) if n < room] or [1]
    return measure_costs(llm.target, rows, past=min(past, max(1, room - widest)), plain=True)


def predictions(runs: Seq[Run], curves: Mapping[int, CostCurve]) -> list[dict[str, Any] | None]:
    """`predicted` for each run. curves: by the id of an engine; without one nothing is predicted."""
    found = []
    for run in runs:
        series = [r for r in runs if r.plain is run.plain and r.arm.name == run.arm.name and r.arm.lengths is None]
        costs = curves.get(id(run.arm.llm))
        applies = costs is not None and run.plain is not None and run.arm.lengths is None
        found.append(predicted(run, series, costs) if applies else None)
    return found


def predicted(run: Run, series: Seq[Run], costs: CostCurve | None) -> dict[str, Any] | None:
    """Tokens per second and speed-up predicted by the closed forms; None if they do not apply (trees, no draft)."""
    assert run.plain is not None
    longest = max(series, key=lambda r: r.arm.draft_tokens).stats()
    depth = min(run.arm.draft_tokens, len(longest.position_rates))
    if costs is None or not depth or is_tree(longest):
        return None
    batch, prefill = run.arm.batch, run.plain.first_token_seconds()
    step = {phase: per_step(run.plain, phase, prefill) for phase in ("target", "verify", "host")}
    level = step["target"] / costs(batch)
    stats = run.stats()
    able = max(1, longest.steps - len(run.prompts) * run.rounds)  # the first step of a text is prefill: no draft
    tokens = run.plain.stats().tokens / (len(run.plain.prompts) * run.plain.rounds)
    prediction = predict(
        longest.position_rates[:depth],
        CostCurve(costs.rows, tuple(level * s for s in costs.seconds)),
        draft_line(series, batch)(run.arm.draft_tokens),
        drafted=[min(1.0, longest.drafted_at[j] / able) for j in range(1, depth + 1)],
        step_host=batch * (stats.seconds["host"] + stats.seconds["verify"]) / stats.steps,
        plain_host=step["verify"] + step["host"],
        prefill=prefill,
        draft_prefill=max(0.0, run.first_token_seconds() - prefill),
        tokens=max(1, round(tokens)),
        batch=batch,
    )
    return {
        "tokens_per_second": batch * tokens / prediction.total_seconds,
        "speedup": prediction.speedup,
        "mean_acceptance_length": prediction.tau,
    }


def per_step(run: Run, phase: str, prefill: float) -> float:
    """Seconds of a plain step of the whole batch, without prefill."""
    stats, texts = run.stats(), len(run.prompts) * run.rounds
    reading = prefill * texts / run.arm.batch if phase == "target" else 0.0
    return max(1e-9, run.arm.batch * (stats.seconds[phase] - reading) / max(1, stats.steps - texts))


def draft_line(series: Seq[Run], batch: int) -> Callable[[int], float]:
    """Draft length -> seconds of drafting per step: a straight line fitted to the measurements of the series."""
    lengths = [r.arm.draft_tokens for r in series]
    seconds = [batch * (s := r.stats()).seconds["draft"] / max(1, s.steps) for r in series]
    if len(set(lengths)) < 2:
        return lambda length: float(np.mean(seconds))
    slope, start = np.polyfit(lengths, seconds, 1)
    return lambda length: max(0.0, float(start + slope * length))


def is_tree(stats: SpecStats) -> bool:
    """Whether more draft tokens were verified than a chain of the same depth has."""
    return stats.proposed > sum(stats.drafted_at.values())
