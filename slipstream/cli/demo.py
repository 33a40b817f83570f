"""`slipstream demo`: speculative decoding with the embedded models, compared with plain decoding."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from slipstream.cli import render
from slipstream.cli.loading import banner, load
from slipstream.cli.option_groups import grouped, option
from slipstream.cli.options import ModelOptions
from slipstream.core.params import SamplingParams
from slipstream.host.interrupt import Interrupt

if TYPE_CHECKING:
    from slipstream.bench.measure import Arm, Run
    from slipstream.llm import LLM

PROMPT_LINES = 4
SHOWN = 2
"""Prompts of each kind whose texts are shown; all are timed."""
BUDGET_SECONDS = 25


@dataclass(frozen=True)
class Job:
    """Prompts of one kind, and the methods (arms) that decode them; the first is plain decoding."""

    kind: str
    titles: list[str]
    prompts: list[list[int]]
    arms: list[Arm]


@grouped
def demo(
    models: ModelOptions,
    tokens: int = option(96, "Tokens generated for each prompt.", "--max-new-tokens", "-n", min=1),
    prompts: int = option(4, "Number of prompts of each kind.", min=1, max=8),
    rounds: int = option(7, "Maximum number of timed passes; fewer on a slow machine.", min=1),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Decode held-out prompts plainly and speculatively: show the text in colours, compare the texts, and time both.

    Exit code 1 if a speculative text differs from the plain text by more than rounding can explain.
    """
    llm = load(models)
    jobs = plan(llm, models, prompts, tokens)
    if not as_json:
        render.line(banner(llm, models))
        if render.coloured(render.out()):
            render.err().print(render.legend())
    with Interrupt() as interrupt:
        if not as_json:
            warm_up(llm, jobs)
        for job in jobs if not as_json else ():
            for i in range(min(SHOWN, len(job.prompts))):
                if not show(llm, job, i, interrupt):
                    raise typer.Exit(130)
    from slipstream.bench.provenance import OtherProcesses

    neighbours = OtherProcesses()
    found = measure(jobs, rounds)
    if as_json:
        print(json.dumps({kind: [summary(run) for run in runs] for kind, runs in found.items()}))
    else:
        report(found, neighbours.share())
    raise typer.Exit(0 if all(run.exact for runs in found.values() for run in runs) else 1)


def plan(llm: LLM, models: ModelOptions, count: int, tokens: int) -> list[Job]:
    """Plain decoding and the draft model on code to continue; also the n-gram drafter on code to edit."""
    from slipstream import zoo
    from slipstream.bench.measure import Arm
    from slipstream.bench.prompts import built_in

    params = SamplingParams(max_tokens=tokens)
    wanted = (models.drafter,) if models.drafter else ("model", "ngram")
    plain, speculative, lookup = Arm("plain", llm, params=params), [], []
    if "model" in wanted and llm.drafter.name == "model":
        drafter, length = llm.drafter, replace(models, drafter="model").fixed_length
        speculative.append(Arm("draft model", llm, drafter, length, params=params, against=plain))
    if "ngram" in wanted:
        length = replace(models, drafter="ngram").fixed_length
        lookup.append(Arm("n-gram", llm, "ngram", length, params=params, against=plain))
    kinds = {"code": [plain, *(speculative or lookup)], "edit": [plain, *speculative, *lookup]}
    return [
        Job(kind, [entry["file"] for entry in zoo.prompts(kind)[:count]], built_in(llm, kind, count), arms)
        for kind, arms in kinds.items()
    ]


def warm_up(llm: LLM, jobs: list[Job]) -> None:
    """Decode a few tokens with each arm, so that the first times shown are not those of first calls."""
    from slipstream.bench.measure import decode

    with render.status("warming up"):
        for job in jobs:
            for arm in job.arms:
                short = replace(arm, params=replace(arm.params, max_tokens=8))
                decode(short, short.prepare(), job.prompts[:1], [0])


def show(llm: LLM, job: Job, i: int, interrupt: Interrupt) -> bool:
    """Stream one prompt with the last arm of its job, and compare the text with plain decoding. False on Ctrl-C."""
    from slipstream.bench.measure import decode

    console = render.out()
    plain, fast = job.arms[0], job.arms[-1]
    title = {"code": "Continue", "edit": "Edit"}[job.kind]
    console.print(f"\n{title} {i + 1} of {min(SHOWN, len(job.prompts))}: {job.titles[i]}", style="bold")
    tail = llm.tokenizer.decode(job.prompts[i]).rstrip("\n").splitlines()[-PROMPT_LINES:]
    console.print(Text(render.printable("\n".join(["...", *tail])), style="dim"), no_wrap=True, overflow="ellipsis")
    with render.status("decoding plainly"):
        (reference,), plain_seconds = decode(plain, None, [job.prompts[i]], [0])
    if interrupt.asked:
        return False
    writer = render.TextWriter(colours=fast is not plain)
    llm.use(fast.drafter)
    llm.draft_tokens = fast.draft_tokens
    seq = llm.sequence(job.prompts[i], fast.params)
    for chunk in llm.follow(seq):
        for piece in chunk.pieces:
            writer.write(piece.text, piece.drafted)
        if interrupt.asked:
            writer.end()
            return False
    writer.end()
    verdict = "token-identical" if seq.output == reference.token_ids else "NOT token-identical, see below"
    took = f"{render.counted(seq.stats.tokens, 'token')} in {seq.stats.total_seconds:.2f} s with {fast.name}"
    console.print(f"[{took}, {plain_seconds:.2f} s with plain decoding; {verdict}]", style="dim")
    return True


def measure(jobs: list[Job], rounds: int) -> dict[str, list[Run]]:
    from slipstream.bench.measure import line_up, passes, race

    found = {job.kind: line_up(job.arms, job.prompts) for job in jobs}
    with render.progress("timing (interleaved)", sum(passes(runs, rounds) for runs in found.values())) as advance:
        for runs in found.values():
            race(runs, rounds, advance, BUDGET_SECONDS / len(jobs))
    return found


def summary(run: Run) -> dict[str, Any]:
    """One run as plain JSON values."""
    return {
        "method": run.arm.name,
        "draft_tokens": run.arm.draft_tokens,
        "tokens_per_second": run.tokens_per_second().value,
        "speedup": vars(run.speedup()),
        "lossless": run.exact,
        "token_identical": not run.divergences,
        "divergences": [{"prompt": i, **vars(d), "near_tie": d.near_tie} for i, d in run.divergences],
        "stats": run.stats().as_dict(),
    }


def report(found: dict[str, list[Run]], neighbours: float | None) -> None:
    """Print the table, its notes, and the warnings that `bench` would give. neighbours: see `benchmark.warnings`."""
    from slipstream.bench.benchmark import warnings

    console = render.out()
    console.print()
    console.print(render.runs_table(found))
    for note in notes(found):
        console.print(note)
    for said in dict.fromkeys(said for runs in found.values() for said in warnings(runs, neighbours)):
        render.message("warning", said)


def notes(found: dict[str, list[Run]]) -> list[str]:
    """Notes below the table: differing texts, and what the columns mean."""
    differing = [
        f"{run.arm.name}, {kind} prompt {i + 1}, {d}."
        for kind, runs in found.items()
        for run in runs
        for i, d in run.divergences
    ]
    if not differing:
        differing = ["Every speculative text is token-identical to plain decoding."]
    passes = min(run.rounds for runs in found.values() for run in runs)
    return [
        *differing,
        "accept rate: share of draft tokens accepted; mean length: tokens per step, including the target's own.",
        f"{passes} interleaved passes; prefill is included.",
    ]
