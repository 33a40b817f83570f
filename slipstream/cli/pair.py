"""`slipstream info TARGET DRAFT`: whether a draft model fits a target, and what a speed-up needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from slipstream.bench.tables import Column, Table, words
from slipstream.cli import render
from slipstream.cli.demo import summary
from slipstream.cli.loading import load
from slipstream.cli.options import ModelOptions
from slipstream.errors import PairError
from slipstream.settings import INTERSECTION, STRING

if TYPE_CHECKING:
    from slipstream.bench.measure import Run
    from slipstream.models.pair_check import PairReport

SHOWN_RATES = (0.6, 0.8)
PASSES, TOKENS = 5, 64


def show_pair(
    target: str, draft: str, measure: bool, draft_tokens: int, also: list[str] | None, as_json: bool
) -> NoReturn:
    """Print whether the models are compatible, what a speed-up needs, and what was measured. Exit code 0 if they are,
    else 1. Weights are only loaded with `measure`."""
    from slipstream.models import pair_check

    pairs = {name: beside(target, draft, draft_tokens, name) for name in dict.fromkeys([target, *(also or ())])}
    report = pair_check.check_pair(target, draft)
    runs = measured(pairs) if measure and report.fits else {}
    if as_json:
        all_runs = [{"target": name} | summary(run) for name, own_runs in runs.items() for run in own_runs]
        print(json.dumps(report.as_dict() | {"measured": all_runs}))
    else:
        show(report, runs)
    raise typer.Exit(0 if report.fits else 1)


def beside(target: str, draft: str, draft_tokens: int, also: str) -> ModelOptions:
    """The pair with another target, or with weights in another format: "quantize=int8", "draft_quantize=int4"."""
    name, _, value = also.partition("=")
    pair = ModelOptions(target=target, draft=draft, drafter="model", draft_tokens=str(draft_tokens))
    if name == "draft_quantize":
        return replace(pair, drafter_option=[f"quantize={value}"])  # of a head, too
    return replace(pair, quantize=value) if name == "quantize" else replace(pair, target=also)


def measured(pairs: Mapping[str, ModelOptions]) -> dict[str, list[Run]]:
    """Name of a pair -> plain decoding and the draft model, on the same prompts; all take turns."""
    from slipstream.bench.measure import Arm, line_up, passes, race
    from slipstream.bench.prompts import built_in
    from slipstream.core.params import SamplingParams

    params = SamplingParams(max_tokens=TOKENS)
    runs: dict[str, list[Run]] = {}
    for name, models in pairs.items():
        llm = load(models)
        plain = Arm("plain", llm, params=params)
        drafted = Arm("draft model", llm, llm.drafter, llm.most_draft_tokens, params=params, against=plain)
        runs[name] = line_up([plain, drafted], built_in(llm, "code", 3))
    together = [run for own in runs.values() for run in own]
    with render.progress("measuring (interleaved)", passes(together, PASSES)) as advance:
        race(together, PASSES, advance)
    return runs


def show(report: PairReport, runs: Mapping[str, Seq[Run]]) -> None:
    console = render.out()
    console.print(render.rendered(sides(report)))
    if not report.fits:
        console.print(f"The models are not compatible: {report.problem}.", style="bold")
        if report.target.source_context is report.draft.source_context is None:
            console.print(f"- {with_own_tokenizer(report)}.", highlight=False)
        return
    agree = f"all {report.common} common token ids agree" if report.compared else "only vocabulary sizes were compared"
    if report.differing:
        agree = f"all ordinary token ids agree, {report.differing} special token ids differ"
    console.print(f"The models are compatible: {agree}.", style="bold")
    for line in [*report.notes, *outlook(report)]:
        console.print(f"- {line}.")
    if runs:
        short = [Path(target).name or target for target in runs]
        names = short if len({*short}) == len(short) else list(runs)
        console.print(render.runs_table(dict(zip(names, runs.values(), strict=True)), "target"))


def with_own_tokenizer(report: PairReport) -> str:
    """What `--draft-tokenizer` does for models with different tokenizers, in a sentence."""
    from slipstream.drafters.draft_tokenizers import vocabularies
    from slipstream.models.text import tokenizer_of

    width = report.target.config.vocab_size, report.draft.config.vocab_size
    try:
        both = vocabularies(tokenizer_of(report.target.folder), tokenizer_of(report.draft.folder), width, INTERSECTION)
    except PairError as refused:
        return f"--draft-tokenizer does not help: {refused.what}"
    return f"with --draft-tokenizer {INTERSECTION} or {STRING} the draft model keeps its tokenizer: {both.shared}"


def sides(report: PairReport) -> Table:
    columns = [words(""), *map(Column, ("parameters", "stored", "vocabulary", "tokens", "context"))]
    rows = []
    for name, side in (("target", report.target), ("draft", report.draft)):
        tokens = "none" if side.tokenizer is None else len(side.tokenizer.tokens)
        stored = "unknown" if side.stored is None else render.size(sum(side.stored.values()))
        sizes = render.count(side.parameters), stored, side.config.vocab_size, tokens
        rows.append([f"{name} ({side.config.model_type})", *sizes, render.context(side.config.context)])
    return Table("", columns, rows)


def outlook(report: PairReport) -> list[str]:
    """Estimated cost and speed-up, in sentences."""
    c = report.cost_ratio
    break_even = f"speculation saves time above {c:.0%} acceptance" if c < 1 else "speculation cannot save time"
    lines = [f"a draft token costs about {c:.2f} target steps: {break_even}"]
    for acceptance in SHOWN_RATES if c < 1 else ():
        seen = report.expected(acceptance)
        best = f"{seen.speedup:.2f}x plain decoding with K={seen.draft_tokens}" if seen.draft_tokens else "no speed-up"
        lines.append(f"at {acceptance:.0%} acceptance: {best}")
    from slipstream.plan.known_pairs import published_figures

    lines.append(f"assumptions: {report.costs.assumptions()}; use --measure to measure")
    return [*lines, *published_figures(report.target.source, report.draft.source)]
