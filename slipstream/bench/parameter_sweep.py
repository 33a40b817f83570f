"""`slipstream sweep`: measures acceptance and speed over draft length, temperature, drafter, drafter options, dtype or
batch size. All settings take turns in one run, and measurements are compared with predictions of the closed forms.

The prediction for a setting uses the acceptance rates by position of the *longest* draft of its series (same drafter,
temperature, batch and dtype), the cost curve of `measure_costs` scaled to plain decoding in the same run, and a
drafting cost that is linear in the draft length. So only one setting of a series is predicted from its own acceptance
rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.bench.benchmark import BenchConfig, Contender, checkpoints, text_verdict, warnings
from slipstream.bench.measure import Arm, Run, line_up, load_weights_once, passes, race
from slipstream.bench.prompts import PromptSet
from slipstream.bench.provenance import OtherProcesses, provenance
from slipstream.bench.results import Result, kept, recording
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError
from slipstream.theory.closed_forms import predict
from slipstream.theory.cost_curve import CostCurve

if TYPE_CHECKING:
    from slipstream.llm import LLM

MOST_SETTINGS = 60
ROWS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Setting:
    """One point of the grid. values: axis -> value, as the user named them."""

    contender: Contender
    temperature: float
    batch: int
    dtype: str | None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def condition(self) -> tuple[float, int, str | None]:
        """The values that plain decoding depends on too."""
        return self.temperature, self.batch, self.dtype


def grid(axes: dict[str, Seq[Any]]) -> list[dict[str, Any]]:
    """Every combination of values. Raises ParameterError for fewer than two or too many combinations."""
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(points) < 2:
        raise ParameterError("there is nothing to sweep over", fix="give a range, as in --draft-tokens 2:8")
    if len(points) > MOST_SETTINGS:
        raise ParameterError(
            f"{len(points)} settings were requested, at most {MOST_SETTINGS} are measured in one run",
            fix="give fewer values, or a step as in 2:16:2",
        )
    return points


def horizontal(axes: dict[str, Seq[Any]]) -> str:
    """The horizontal axis of the plots: the numeric axis with the most values, the first one of equals."""
    varied = [name for name, values in axes.items() if len(values) > 1]
    numeric = [n for n in varied if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in axes[n])]
    return max(numeric or varied, key=lambda name: len(axes[name]))


def sweep(
    engines: dict[str | None, LLM],
    settings: Seq[Setting],
    axes: dict[str, Seq[Any]],
    prompts: PromptSet,
    config: BenchConfig,
    out: str | Path | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """Measures every setting. engines: dtype -> engine; the key is None if dtype is not varied. An interruption keeps
    the measurements so far, as in `bench`."""
    llm = next(iter(engines.values()))
    asked = {"axes": {name: list(map(_plain, values)) for name, values in axes.items()}, "x": horizontal(axes)}
    read = checkpoints([setting.contender for setting in settings])
    source = provenance(llm, config.seed, prompts=prompts.digest, drafts=read)
    result = Result("sweep", asked | asdict(config), source)
    runs: list[Run] = []
    curves: dict[str | None, CostCurve] = {}
    neighbours = OtherProcesses()

    def collect() -> dict[str, Any]:
        result.provenance["neighbours"] = neighbours.share()
        result.warnings = [*prompts.warnings, *warnings(runs, result.provenance["neighbours"])]
        return {
            "prompts": prompts.as_dict(),
            "costs": {str(dtype): asdict(curve) for dtype, curve in curves.items()},
            "arms": points(runs, settings, curves),
        }

    with kept(result), recording(result, out, collect) as save:
        runs += line_up(arms(engines, settings, config), prompts.ids, prompts.categories)
        for dtype, engine in engines.items():
            curves[dtype] = costs_of(engine, settings, prompts)
        race(runs, config.rounds, advance, config.seconds, save, config.seed)
    return result


def steps(settings: Seq[Setting], llm: LLM, prompts: PromptSet, config: BenchConfig) -> int:
    """How often `sweep` calls `advance`."""
    plain = {s.condition: s.batch for s in settings}
    made = [Arm("", llm, batch=batch) for batch in (*plain.values(), *(s.batch for s in settings))]
    return passes(line_up(made, prompts.ids, prompts.categories), config.rounds)


def arms(engines: dict[str | None, LLM], settings: Seq[Setting], config: BenchConfig) -> list[Arm]:
    """For each condition, plain decoding followed by the settings that are compared with it. A drafter with weights is
    loaded once for each engine."""
    out: list[Arm] = []
    loaded: dict[Any, tuple[Any, dict[str, Any]]] = {}
    for condition in dict.fromkeys(setting.condition for setting in settings):
        temperature, batch, dtype = condition
        llm = engines[dtype]
        common: dict[str, Any] = {"params": config.params(temperature), "batch": batch}
        plain = Arm("plain", llm, **common)
        out.append(plain)
        for setting in settings:
            if setting.condition == condition:
                c = setting.contender
                key = (dtype, str(c.drafter), repr(c.options))
                if key not in loaded:
                    loaded[key] = load_weights_once(llm, c.drafter, c.options)
                drafter, options = loaded[key]
                out.append(Arm(c.label, llm, drafter, c.draft_tokens, options, against=plain, **common))
    return out


def costs_of(llm: LLM, settings: Seq[Setting], prompts: PromptSet) -> CostCurve:
    """The target's cost curve up to the rows that the settings need, after a text of median length."""
    from slipstream.targets.target_costs import measure_costs

    widest = max(s.batch * (s.contender.draft_tokens + 1) for s in settings)
    past = int(np.median([len(p.ids) for p in prompts.prompts]))
    room = llm.target.context - 2
    rows = [n for n in ROWS if n < widest] + [widest]
    return measure_costs(
        llm.target, [n for n in rows if n < room] or [1], past=min(past, max(1, room - widest)), plain=True
    )


def points(runs: Seq[Run], settings: Seq[Setting], curves: dict[str | None, CostCurve]) -> list[dict[str, Any]]:
    """The measurement and the prediction for each setting. Plain decoding has a point for each condition."""
    from slipstream.bench.benchmark import figures

    speculative = iter(settings_in_order(settings))
    out, measured = [], []
    for run in runs:
        setting = None if run.plain is None else next(speculative)
        if run.measured:
            measured.append((run, setting))
    for run, setting in measured:
        point = {
            "label": run.arm.name,
            "plain": setting is None,
            "temperature": run.arm.params.temperature,
            "batch": run.arm.batch,
            "draft_tokens": run.arm.draft_tokens,
            "values": {} if setting is None else {k: _plain(v) for k, v in setting.values.items()},
            "rounds": run.rounds,
            "texts": text_verdict(run),
            "peak_memory": run.peak_memory,
            "overall": figures(run),
        }
        if setting is not None:
            series = [r for r, s in measured if s is not None and same_series(s, setting)]
            point["predicted"] = predicted(run, series, curves.get(setting.dtype))
        out.append(point)
    return out


def settings_in_order(settings: Seq[Setting]) -> list[Setting]:
    """The settings in the order of `arms`."""
    return [s for c in dict.fromkeys(s.condition for s in settings) for s in settings if s.condition == c]


def same_series(a: Setting, b: Setting) -> bool:
    """Whether two settings differ only in the draft length."""
    rest = [{k: v for k, v in s.values.items() if k != "draft_tokens"} for s in (a, b)]
    return rest[0] == rest[1] and a.condition == b.condition


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
    own = run.stats()
    able = max(1, longest.steps - len(run.prompts) * run.rounds)  # the first step of a text is prefill: no draft
    texts = len(run.plain.prompts) * run.plain.rounds
    tokens = run.plain.stats().tokens / texts
    found = predict(
        longest.position_rates[:depth],
        CostCurve(costs.rows, tuple(level * s for s in costs.seconds)),
        draft_line(series, batch)(run.arm.draft_tokens),
        drafted=[min(1.0, longest.drafted_at[j] / able) for j in range(1, depth + 1)],
        step_host=batch * (own.seconds["host"] + own.seconds["verify"]) / own.steps,
        plain_host=step["verify"] + step["host"],
        prefill=prefill,
        draft_prefill=max(0.0, run.first_token_seconds() - prefill),
        tokens=max(1, round(tokens)),
        batch=batch,
    )
    return {
        "tokens_per_second": batch * tokens / found.total_seconds,
        "speedup": found.speedup,
        "mean_acceptance_length": found.tau,
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


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
