"""`slipstream info TARGET DRAFT`: whether a draft model fits a target, and what a speed-up needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn

import typer

from slipstream.bench.tables import Column, Table, words
from slipstream.cli import render
from slipstream.errors import PairError
from slipstream.settings import INTERSECTION, STRING

if TYPE_CHECKING:
    from slipstream.models.pair_check import PairReport

SHOWN_RATES = (0.6, 0.8)


def show_pair(target: str, draft: str, as_json: bool) -> NoReturn:
    """Print whether the models are compatible, and what a speed-up needs. Exit code 0 if they are, else 1."""
    from slipstream.models import pair_check

    report = pair_check.check_pair(target, draft)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        show(report)
    raise typer.Exit(0 if report.fits else 1)


def show(report: PairReport) -> None:
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

    lines.append(f"assumptions: {report.costs.assumptions()}; slipstream bench measures them")
    return [*lines, *published_figures(report.target.source, report.draft.source)]
