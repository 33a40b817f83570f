"""`slipstream demo`: the main job on the embedded models, with its proof and its numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from slipstream.cli import render
from slipstream.cli.engine import banner, load
from slipstream.cli.interrupt import Interrupt
from slipstream.cli.options import ModelOptions, draft_length, grouped
from slipstream.core.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.cli.race import Method, Standing
    from slipstream.llm import LLM

PROMPT_LINES = 4
BUDGET_SECONDS = 25


@dataclass(frozen=True)
class Job:
    """One kind of prompt, the prompts, and the methods that decode them; the first method is plain decoding."""

    kind: str
    titles: list[str]
    prompts: list[list[int]]
    methods: list[Method]


@grouped
def demo(
    models: ModelOptions,
    tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens a prompt.")] = 96,
    prompts: Annotated[int, typer.Option(min=1, max=8, help="Prompts of each kind.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Most timed rounds; fewer on a slow machine.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode held-out prompts plainly and speculatively, show the text in colours, compare it, and time both.

    Exit code 1 if a speculative text differs from the plain one by more than rounding can explain.
    """
    llm = load(models)
    jobs = plan(llm, models, prompts)
    if not as_json:
        render.line(banner(llm, models))
        if render.coloured(render.out()):
            render.err().print(render.legend())
    with Interrupt() as interrupt:
        for job in jobs if not as_json else ():
            for i in range(len(job.prompts)):
                if not show(llm, job, i, tokens, interrupt):
                    raise typer.Exit(130)
    standings = measure(llm, jobs, rounds, tokens)
    if as_json:
        print(json.dumps({kind: [standing.as_dict() for standing in group] for kind, group in standings.items()}))
    else:
        report(jobs, standings)
    raise typer.Exit(0 if all(standing.exact for group in standings.values() for standing in group) else 1)


def plan(llm: LLM, models: ModelOptions, count: int) -> list[Job]:
    """Plain decoding and the draft model on code to continue; the n-gram drafter as well on code to edit."""
    from slipstream import zoo
    from slipstream.cli.race import Method, built_in_prompts

    wanted = (models.drafter,) if models.drafter else ("model", "ngram")
    plain, speculative = Method("plain", None, 0), []
    if "model" in wanted and llm.drafter.name == "model":
        speculative.append(Method("draft model", llm.drafter.drafter, draft_length(models.draft_tokens, "model")))  # type: ignore[attr-defined]
    lookup = [Method("n-gram", "ngram", draft_length(models.draft_tokens, "ngram"))] if "ngram" in wanted else []
    kinds = {"code": [plain, *(speculative or lookup)], "edit": [plain, *speculative, *lookup]}
    return [
        Job(kind, [entry["file"] for entry in zoo.prompts(kind)[:count]], built_in_prompts(llm, kind, count), methods)
        for kind, methods in kinds.items()
    ]


def show(llm: LLM, job: Job, i: int, tokens: int, interrupt: Interrupt) -> bool:
    """Stream one prompt by the last method of its job, and compare the text with plain decoding. False on Ctrl-C."""
    from slipstream.cli.race import decode

    console, params = render.out(), SamplingParams(max_tokens=tokens)
    plain, fast = job.methods[0], job.methods[-1]
    title = {"code": "Continue", "edit": "Edit"}[job.kind]
    console.print(f"\n{title} {i + 1} of {len(job.prompts)}: {job.titles[i]}", style="bold")
    tail = llm.tokenizer.decode(job.prompts[i]).rstrip("\n").splitlines()[-PROMPT_LINES:]
    console.print(Text(render.printable("\n".join(["...", *tail])), style="dim"), no_wrap=True, overflow="ellipsis")
    with render.status("decoding plainly"):
        reference, plain_seconds = decode(llm, plain, job.prompts[i], params)
    if interrupt.asked:
        return False
    writer = render.TextWriter(colours=fast is not plain)
    llm.use(fast.drafter)
    llm.draft_tokens = fast.draft_tokens
    seq = llm.sequence(job.prompts[i], params)
    for chunk in llm.follow(seq):
        for piece in chunk.pieces:
            writer.write(piece.text, piece.drafted)
        if interrupt.asked:
            writer.end()
            return False
    writer.end()
    verdict = "token-identical" if seq.output == reference.token_ids else "NOT token-identical, see below"
    took = f"{render.tokens(seq.stats.tokens)} in {seq.stats.total_seconds:.2f} s by {fast.name}"
    console.print(f"[{took}, {plain_seconds:.2f} s plain; {verdict}]", style="dim")
    return True


def measure(llm: LLM, jobs: list[Job], rounds: int, tokens: int) -> dict[str, list[Standing]]:
    from slipstream.cli.race import race

    passes = sum(len(job.methods) for job in jobs) * (rounds + 1)
    with render.progress("timing, in turns", passes) as advance:
        return {
            job.kind: race(llm, job.methods, job.prompts, rounds, tokens, advance, BUDGET_SECONDS / len(jobs))
            for job in jobs
        }


def report(jobs: list[Job], standings: dict[str, list[Standing]]) -> None:
    console = render.out()
    console.print()
    console.print(render.standings_table(standings))
    for note in notes(standings):
        console.print(note)


def notes(standings: dict[str, list[Standing]]) -> list[str]:
    """What the table cannot say."""
    groups: list[Any] = list(standings.values())
    parted = [
        f"{standing.method.name}, {kind} prompt {i + 1}, {d}."
        for kind, group in standings.items()
        for standing in group
        for i, d in standing.divergences
    ]
    if not parted:
        parted = ["Every speculative text is token-identical to plain decoding."]
    rounds = min(len(standing.rates) for group in groups for standing in group)
    return [
        *parted,
        "Accept rate: guesses that stood; mean length: tokens a step, the target's own too.",
        f"Medians of {rounds} rounds in which the methods take turns; prompt processing included.",
    ]
