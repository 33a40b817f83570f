"""`slipstream check-pair`: do these two fit together, and what would it cost and gain?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import render
from slipstream.cli.demo import summary
from slipstream.cli.loading import checkpoint, load, quieten
from slipstream.cli.options import ModelOptions

if TYPE_CHECKING:
    from slipstream.lab.measure import Run
    from slipstream.models.pair_check import PairReport

SHOWN_RATES = (0.6, 0.8)
ROUNDS, TOKENS = 5, 64


def check_pair(
    target: Annotated[str, typer.Argument(help="Folder, hub id, or 'embedded'.")],
    draft: Annotated[str, typer.Argument(help="Folder, hub id, or 'embedded'.")],
    measure: Annotated[bool, typer.Option("--measure", help="Load both and measure acceptance and speed-up.")] = False,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", "-k", help="Guesses a step while measuring.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the token maps of a target and a draft model, and estimate what the pair would gain.

    Exit code 0 if they fit, 1 if they do not. No weights are loaded unless --measure is given.
    """
    quieten()
    from slipstream.models.pair_check import compare

    models = ModelOptions(target=target, draft=draft, drafter="model", draft_tokens=draft_tokens)
    report = compare(checkpoint(target, "target"), checkpoint(draft, "draft"))
    runs = measured(models) if measure and report.fits else []
    if as_json:
        print(json.dumps(report.as_dict() | {"measured": [summary(run) for run in runs]}))
    else:
        show(report, runs)
    raise typer.Exit(0 if report.fits else 1)


def measured(models: ModelOptions) -> list[Run]:
    from slipstream.core.params import SamplingParams
    from slipstream.lab.measure import Arm, line_up, passes, race
    from slipstream.lab.prompts import built_in

    llm = load(models)
    params = SamplingParams(max_tokens=TOKENS)
    plain = Arm("plain", llm, params=params)
    drafter = llm.drafter
    runs = line_up(
        [plain, Arm("draft model", llm, drafter, llm.draft_tokens, params=params, against=plain)],
        built_in(llm, "code", 3),
    )
    with render.progress("measuring, in turns", passes(runs, ROUNDS)) as advance:
        race(runs, ROUNDS, advance)
    return runs


def show(report: PairReport, runs: list[Run]) -> None:
    console = render.out()
    console.print(sides(report))
    if not report.fits:
        console.print(f"The pair does not fit: {report.problem}.", style="bold")
        return
    agree = f"all {report.common} common token ids agree" if report.compared else "nothing that can be compared differs"
    if report.differing:
        agree = f"all ordinary token ids agree, {report.differing} special ones differ"
    console.print(f"The pair fits: {agree}.", style="bold")
    for line in [*report.notes, *outlook(report)]:
        console.print(f"- {line}.")
    if runs:
        console.print(render.runs_table({"code": runs}))


def sides(report: PairReport) -> Any:
    table = render.table("", "parameters", "stored", "vocabulary", "tokens", "context")
    for name, side in (("target", report.target), ("draft", report.draft)):
        tokens = "none" if side.tokenizer is None else str(len(side.tokenizer.tokens))
        stored = "unknown" if side.stored is None else render.size(sum(side.stored.values()))
        sizes = render.count(side.parameters), stored, str(side.config.vocab_size), tokens, str(side.config.context)
        table.add_row(f"{name} ({side.config.model_type})", *sizes)
    return table


def outlook(report: PairReport) -> list[str]:
    """Cost and gain, in sentences."""
    c = report.cost_ratio
    pays = f"speculation pays above {c:.0%} acceptance" if c < 1 else "no acceptance rate can pay for that"
    lines = [f"a draft token costs about {c:.2f} target steps: {pays}"]
    for acceptance in SHOWN_RATES if c < 1 else ():
        seen = report.expected(acceptance)
        best = f"{seen.speedup:.2f}x plain decoding with K={seen.draft_tokens}" if seen.draft_tokens else "no gain"
        lines.append(f"at {acceptance:.0%} acceptance: {best}")
    return [*lines, f"assumptions: {report.costs.assumptions()}; --measure measures instead"]
