"""`slipstream bench`: measures drafters against plain decoding in one interleaved run.

`slipstream.core.stats` defines the terms. Speeds include prefill; intervals: `slipstream.measure.estimates`.
"""

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict
from itertools import product
from math import prod
from pathlib import Path

import numpy as np

from slipstream.engine.draft_lengths import DraftLengths
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.measure import loops
from slipstream.measure.arms import Arm, Run, group_prompts, line_up, load_weights_once, race
from slipstream.measure.configs import Contender
from slipstream.measure.estimates import NO_DRAFTS, REASONS
from slipstream.measure.lab_settings import BenchConfig
from slipstream.measure.measured_steps import measure_steps, time_target
from slipstream.measure.measurements import BenchArm, BenchData, Figures, Forecasted, NamedDivergence
from slipstream.measure.prompts import PromptSet
from slipstream.measure.provenance import QUIET, OtherProcesses, note_drafts, note_provenance
from slipstream.measure.results import Result, record
from slipstream.measure.tables import spell
from slipstream.settings import AUTO
from slipstream.theory.cost_curve import CostCurve

MOST_ARMS = 100
"""Largest number of arms of one run, plain decoding included."""
LOOPS = 0.1
"""The report warns if more than this share of the output tokens is in loops (see `measure.loops`)."""


def count_steps(contenders: Seq[Contender], prompts: PromptSet, config: BenchConfig) -> int:
    """Return how often `bench` calls `advance`."""
    arms = len(config.contexts) * len(config.temperatures) * (len(contenders) + 1)
    return arms * (config.rounds + 1) * sum(len(group_prompts(prompts.categories, batch)) for batch in config.batches)


def line_up_contenders(llm: LLM, contenders: Seq[Contender], prompts: PromptSet, config: BenchConfig) -> list[Run]:
    """Make the runs: for each context, temperature and batch size, plain decoding and then every contender. Contenders
    with the same label share one loaded drafter."""
    loaded = {c.label: load_weights_once(llm, c.drafter, c.options) for c in {c.label: c for c in contenders}.values()}
    runs: list[Run] = []
    for context, temperature, batch in product(config.contexts, config.temperatures, config.batches):
        ids = prompts.ids if context is None else prompts.in_context(context, llm.target.context - config.tokens)
        plain = Arm("plain", llm, params=config.params(temperature), batch=batch)
        arms = [plain]
        for c in contenders:
            drafter, options = loaded[c.label]
            lengths = DraftLengths(c.draft_tokens) if c.adaptive else None
            arms.append(Arm(c.label, llm, drafter, c.draft_tokens, options, plain.params, batch, lengths, plain))
        for run in line_up(arms, ids, prompts.categories):
            run.context = context
            runs.append(run)
    return runs


def find_axes(contenders: Seq[Contender], conditions: Mapping[str, Seq[object]]) -> dict[str, list[object]]:
    """Return name -> values, for every setting with several values. conditions: settings that all contenders share. The
    draft length is among the results if a drafter is measured at several lengths."""
    axes: dict[str, Seq[object]] = {"draft_tokens": [], "drafter": [c.label for c in contenders]}
    for c in contenders:
        lengths: Seq[object] = [other.length for other in contenders if other.label == c.label]
        axes["draft_tokens"] = max(axes["draft_tokens"], lengths, key=len)
    axes |= {name: list(values) for name, values in conditions.items()}
    return {name: distinct for name, values in axes.items() if len(distinct := list(dict.fromkeys(values))) > 1}


def choose_x_axis(axes: Mapping[str, Seq[object]]) -> str | None:
    """Choose the horizontal axis of plots: the first numeric axis with the most values; None if no axis is numeric."""
    numeric = [n for n in axes if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in axes[n])]
    return max(numeric, key=lambda name: len(axes[name]), default=None)


def bench(
    llm: LLM,
    contenders: Seq[Contender],
    prompts: PromptSet,
    config: BenchConfig,
    out: str | Path | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """Measure the contenders, and write the result to `out` after every pass. If the run is interrupted, the file holds
    the measurements so far, with `complete` false; so does the attribute `result` of the raised exception. Raises
    ParameterError for more than `MOST_ARMS` arms.
    """
    conditions = {"temperature": config.temperatures, "batch": config.batches, "context": config.contexts}
    axes = find_axes(contenders, conditions)
    count = (len(contenders) + 1) * prod(map(len, conditions.values()))
    if count > MOST_ARMS:
        raise ParameterError(
            f"the options give {count} combinations, but one run measures at most {MOST_ARMS}",
            fix="give fewer values, or a step as in 2:16:2",
        )
    x = choose_x_axis(axes)
    origin = note_provenance(llm, config.seed, prompts=prompts.digest, drafts=note_drafts(contenders))
    named = [
        {"label": c.label, "draft_tokens": c.length, "options": {k: str(v) for k, v in c.options.items()}}
        for c in contenders
    ]
    result = Result("bench", {"contenders": named, **asdict(config), "axes": axes, "x": x}, origin)
    runs: list[Run] = []
    costs: CostCurve | None = None
    neighbours = OtherProcesses()

    def collect() -> BenchData:
        result.provenance["neighbours"] = neighbours.share()
        result.warnings = [*prompts.warnings, *collect_warnings(runs, result.provenance["neighbours"])]
        ready = [run for run in runs if run.measured]
        return BenchData(prompts.as_dict(), [compute_arm(run, prompts, ready, costs) for run in ready])

    with record(result, out, collect) as save:
        runs += line_up_contenders(llm, contenders, prompts, config)
        if x and not all(c.adaptive for c in contenders):
            past = int(np.median([len(ids) for run in runs for ids in run.prompts]))
            costs = time_target(llm.target, past, max(run.arm.batch * (run.arm.draft_tokens + 1) for run in runs))
        race(runs, config.rounds, advance, config.seconds, save, config.seed)
    return result


def compute_arm(run: Run, prompts: PromptSet, runs: Seq[Run], costs: CostCurve | None) -> BenchArm:
    """Compute the figures of one arm over all prompts and by category. runs, costs: as for `predict_arm`."""
    kinds = dict.fromkeys(prompts.categories)
    groups = {kind: [g for g, group in enumerate(run.groups) if prompts.categories[group[0]] == kind] for kind in kinds}
    return BenchArm(
        label=run.arm.name,
        plain=run.plain is None,
        draft_tokens=run.arm.draft_tokens if run.arm.lengths is None else AUTO,
        temperature=run.arm.params.temperature,
        batch=run.arm.batch,
        against=None if run.plain is None else runs.index(run.plain),
        context=run.context,
        rounds=run.rounds,
        exact=run.exact,
        texts=judge_texts(run),
        divergences=[NamedDivergence(**vars(d), prompt=prompts.prompts[i].name) for i, d in run.divergences],
        overall=compute_figures(run),
        categories={kind: compute_figures(run, of_kind) for kind, of_kind in groups.items()},
        loops={"share": loops.measure_loops(run.texts), "prompts": loops.find_looping(run.texts)},
        cells={
            "prompts": run.groups,
            "seconds": [[cell.seconds for cell in row] for row in run.cells],
            "tokens": [[cell.tokens for cell in row] for row in run.cells],
        },
        predicted=predict_arm(run, runs, costs),
    )


def compute_figures(run: Run, groups: Seq[int] | None = None) -> Figures:
    """Compute the figures of one arm over all prompt groups or some."""
    stats = run.stats(groups)
    wall = float((run.seconds_per_token(groups).mean(1) * run.weights(groups)).sum()) * run.rounds
    spent = dict(stats.seconds)
    spent["outside"] = max(0.0, wall - stats.total_seconds)
    return Figures(
        tokens_per_second=run.tokens_per_second(groups),
        speedup=run.speedup(groups),
        first_token_seconds=run.first_token_seconds(groups),
        seconds_per_later_token=run.seconds_per_later_token(groups),
        acceptance_rate=stats.acceptance_rate,
        mean_acceptance_length=stats.mean_acceptance_length,
        position_rates=list(stats.position_rates),
        shares={phase: seconds / sum(spent.values()) for phase, seconds in spent.items()},
        stats=stats.as_dict(),
    )


def predict_arm(run: Run, runs: Seq[Run], costs: CostCurve | None) -> Forecasted | None:
    """Predict tokens per second and speed-up of an arm by the closed forms. The prediction uses two of the `runs` that
    differ only in the draft length: the longest, and the shortest, which shows the cost of a draft token. costs: cost
    curve of the target. None if the closed forms do not apply (plain decoding, chosen lengths, trees, no costs)."""
    if costs is None or run.plain is None or run.arm.lengths is not None:
        return None
    series = [r for r in runs if r.plain is run.plain and r.arm.name == run.arm.name and r.arm.lengths is None]
    shortest, longest = (pick(series, key=lambda r: r.arm.draft_tokens) for pick in (min, max))
    stats = longest.stats()
    tree = stats.proposed > sum(stats.drafted_at.values())  # a tree has more draft tokens than levels
    if not stats.position_rates or tree:
        return None
    m = measure_steps(longest, costs, shortest)
    expected = m.prediction(run.arm.draft_tokens)
    return Forecasted(m.batch * m.tokens / expected.total_seconds, expected.speedup, expected.tau)


def judge_texts(run: Run) -> str:
    """Return the verdict on an arm's texts compared with plain decoding's: "plain" (plain decoding itself), "sampled"
    (not comparable), "identical", "near-tie" or "BUG"."""
    if run.plain is None:
        return "plain"
    if not run.arm.params.greedy:
        return "sampled"
    if not run.divergences:
        return "identical"
    return "near-tie" if all(d.near_tie for _, d in run.divergences) else "BUG"


def collect_warnings(runs: Seq[Run], neighbours: float | None) -> list[str]:
    """Return the warnings about the results. neighbours: share of the machine's time that other processes used."""
    texts = []
    if neighbours is not None and neighbours > QUIET:
        texts.append(f"{neighbours:.0%} of the machine's time went to other processes: absolute speeds are too low")
    notes = {run.tokens_per_second().note for run in runs if run.measured} - {""}
    texts += [REASONS[note] for note in sorted(notes)]
    texts += warn_of_loops(runs)
    for run in runs:
        where = f"{run.arm.name} (temperature {run.arm.params.temperature:g}, batch {run.arm.batch})"
        where = where if run.context is None else f"{where[:-1]}, context {run.context})"
        stats = run.stats() if run.measured else None
        if judge_texts(run) == "BUG":
            i, d = next((i, d) for i, d in run.divergences if not d.near_tie)
            texts.append(f"{where}: the text of prompt {i + 1} differs from that of plain decoding at {d}")
        if stats is not None and stats.drafter_faults:
            texts.append(
                f"{where}: the drafter failed {spell(stats.drafter_faults, 'time')}; plain decoding continued instead"
            )
        if stats is not None and run.plain is not None and not stats.proposed:
            texts.append(f"{where}: {REASONS[NO_DRAFTS]}")
    return texts


def warn_of_loops(runs: Seq[Run]) -> list[str]:
    """Return a warning if much of plain decoding's text is a loop, with the condition whose share is the largest."""
    plain = [run for run in runs if run.plain is None and run.texts]
    worst = max(plain, key=lambda run: loops.measure_loops(run.texts), default=None)
    if worst is None or loops.measure_loops(worst.texts) <= LOOPS:
        return []
    share, many = loops.measure_loops(worst.texts), len(loops.find_looping(worst.texts))
    return [
        f"{share:.0%} of the output tokens are in repetitive loops ({many} of {len(worst.texts)} texts). "
        "Loops are easy to draft, so other text gains less"
    ]
