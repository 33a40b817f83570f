"""`slipstream demo`: decodes the same prompts plainly and speculatively, shows the texts and compares the speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from slipstream.cli import generate, render
from slipstream.cli.loading import banner, load
from slipstream.cli.option_groups import expand_groups, option
from slipstream.cli.options import ModelOptions
from slipstream.cli.table_forms import print_section
from slipstream.core.params import SamplingParams
from slipstream.measure.tables import Alarm, CellValue, Column, Section, Table, words
from slipstream.zoo import EMBEDDED, SMOLLM2, prompts as embedded_prompts

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.measure.arms import Arm, ArmDrafter, Run

PROMPT_LINES = 4
BUDGET_SECONDS = 25
SCENES = {
    "proofread": "Correct a text that is in the prompt",
    "summary": "Answer from a text",
    "chat": "Answer an open question",
    "code": "Continue code",
    "edit": "Edit code",
}
"""Kind of prompts -> task of the model."""


@dataclass(frozen=True)
class Job:
    """Prompts of one kind, and the methods that decode them, plain decoding first."""

    kind: str
    prompts: list[list[int]]
    arms: list[Arm]


@expand_groups
def demo(
    models: ModelOptions,
    tokens: int = option(96, "Tokens generated for each prompt.", "--max-new-tokens", "-n", min=1),
    prompts: int = option(3, "Number of prompts of each kind; the text of the first is shown.", min=1, max=8),
    rounds: int = option(7, "Maximum number of timed passes; a slow machine runs fewer.", min=1),
) -> None:
    """Show plain and speculative decoding of the same prompts, and compare their speed.

    Exit code 1 if a speculative text differs from the plain text by more than rounding can explain.
    """
    llm = load(models)
    jobs = plan_jobs(llm, models, prompts, tokens)
    render.line(banner(llm, models))
    if render.has_colour(render.out()):
        render.err().print(render.legend())
    from slipstream.measure.arms import count_passes, decode, line_up, race
    from slipstream.measure.benchmark import collect_warnings
    from slipstream.measure.provenance import OtherProcesses

    with render.status("warming up"):  # first calls are slower
        for job in jobs:
            for arm in job.arms:
                short = replace(arm, params=replace(arm.params, max_tokens=8))
                decode(short, short.prepare(), job.prompts[:1], [0])
    for job in jobs:
        show(llm, job)
    neighbours = OtherProcesses()
    runs_of = {job.kind: line_up(job.arms, job.prompts) for job in jobs}
    with render.progress(
        "timing (interleaved)", sum(count_passes(runs, rounds) for runs in runs_of.values())
    ) as advance:
        for runs in runs_of.values():
            race(runs, rounds, advance, BUDGET_SECONDS / len(jobs))
    share = neighbours.share()
    print_section(make_section(runs_of))
    for said in dict.fromkeys(said for runs in runs_of.values() for said in collect_warnings(runs, share)):
        render.message("warning", said)
    raise typer.Exit(0 if all(run.exact for runs in runs_of.values() for run in runs) else 1)


def plan_jobs(llm: LLM, models: ModelOptions, count: int, tokens: int) -> list[Job]:
    """Choose the drafters for each kind of prompt. By default, the embedded target uses its draft model to continue
    code, and to edit code also the suffix lookup. Other targets use the drafter that the options choose."""
    from slipstream.engine.draft_lengths import DraftLengths
    from slipstream.measure.arms import Arm
    from slipstream.measure.prompts import choose_prompts

    params = SamplingParams(max_tokens=tokens)
    plain = Arm("plain", llm, params=params)

    def arm(name: str, drafter: ArmDrafter, length: int, chosen: bool = False) -> Arm:
        lengths = DraftLengths(length) if chosen else None
        return Arm(name, llm, drafter, length, params=params, lengths=lengths, against=plain)

    if models.target == EMBEDDED and not models.drafter:
        model = arm("draft model", llm.drafter, models.fixed_length)
        lookup = arm("suffix", "suffix", replace(models, drafter="suffix").fixed_length)
        kinds = {"code": [plain, model], "edit": [plain, model, lookup]}
    else:
        in_use = arm(llm.drafter.name, llm.drafter, llm.most_draft_tokens, not isinstance(llm.draft_tokens, int))
        names = ("proofread", "summary", "chat") if models.target == SMOLLM2 else ("code", "edit")
        kinds = {kind: [plain, in_use] for kind in names}
    return [Job(kind, choose_prompts(llm, kind, count).ids, arms) for kind, arms in kinds.items()]


def show(llm: LLM, job: Job) -> None:
    """Stream the texts of the job's first prompt, from plain decoding and from the last drafter, and compare them."""
    console = render.out()
    first = embedded_prompts(job.kind)[0]
    console.print(f"\n{SCENES[job.kind]}: {first.get('name') or first['file']}", style="bold")
    tail = first["prompt"].rstrip("\n").splitlines()[-PROMPT_LINES:]
    console.print(Text(render.printable("\n".join(["...", *tail])), style="dim"), no_wrap=True, overflow="ellipsis")
    texts: list[list[int]] = []
    for arm in (job.arms[0], job.arms[-1]):
        llm.use(arm.drafter)
        llm.draft_tokens = arm.lengths or arm.draft_tokens
        done, finish = generate.run(llm, job.prompts[0], arm.params, shown=True, legend=False)
        if finish == "interrupted":
            raise typer.Exit(130)
        texts.append(done.token_ids)
        took = f"{render.spell(done.stats.tokens, 'token')} in {done.stats.total_seconds:.2f} s, {arm.name}"
        if arm.against is not None:
            took += "; token-identical" if texts[0] == texts[1] else "; NOT token-identical, see below"
        console.print(f"[{took}]", style="dim")


def make_section(runs_of: dict[str, list[Run]]) -> Section:
    """Report speed, speed-up with its 95 % interval, acceptance and losslessness of each method, in 80 columns."""
    columns = [words("task"), words("method"), Column("tokens/s"), Column("speed-up (95% interval)", "x"),
               Column("accept rate", "%"), Column("mean length", digits=2), Column("lossless")]  # fmt: skip
    rows, differing = list[list[CellValue]](), list[str]()
    for kind, runs in runs_of.items():
        for i, run in enumerate(runs):
            stats, length = run.stats(), f", K={run.arm.draft_tokens}" if run.plain and run.arm.lengths is None else ""
            rows.append(
                ["" if i else kind, run.arm.name + length, run.tokens_per_second().value,
                 run.speedup() if run.plain else "1", stats.acceptance_rate, stats.mean_acceptance_length or 0.0,
                 "yes" + "*" * bool(run.divergences) if run.exact else Alarm("NO")]
            )  # fmt: skip
            differing += [f"{run.arm.name}, {kind} prompt {at + 1}, {d}." for at, d in run.divergences]
    note = (
        f"{min(run.rounds for runs in runs_of.values() for run in runs)} interleaved passes; prefill is included. "
        "accept rate: share of draft tokens accepted; mean length: tokens per step, including the target's own."
    )
    same = "Every speculative text is token-identical to plain decoding."
    lead = f"Texts that differ from plain decoding: {len(differing)}." if differing else same
    return Section("Plain and speculative decoding", lead, [Table("Speed", columns, rows, note)], notes=differing)
