"""`slipstream doctor`: why is it slow?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import render
from slipstream.cli.bench import finish, publish, unfinished, writable
from slipstream.cli.contenders import LabModels
from slipstream.cli.loading import load, on
from slipstream.cli.options import SamplingOptions, grouped
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.lab.results import Result

MS = 1000


@grouped
def doctor(
    models: LabModels,
    sampling: SamplingOptions,
    prompts: Annotated[str, typer.Argument(help="A file, or code, edit, or code,edit.")] = "code,edit",
    count: Annotated[int, typer.Option("--prompts", min=1, help="Most prompts, of all categories in turn.")] = 6,
    template: Annotated[str, typer.Option(help="chat, raw, or auto: chat for prompts that ask.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes over the prompts.")] = 4,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no further pass after so long (three are run).")] = 40,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page of it to this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Say why speculation is slow, or that nothing is wrong: the cause, the fix, and the numbers that led there."""
    from slipstream.lab.diagnosis import DoctorConfig

    params = sampling.params()
    config = DoctorConfig(
        tokens=min(params.max_tokens, 64), rounds=rounds, seconds=seconds, batch=batch, seed=params.seed or 0,
        params=params,
    )  # fmt: skip
    contenders = models.contenders()
    if models.drafter is None and models.drafters is None:
        contenders = contenders[:1]
    if len(contenders) != 1:
        raise ParameterError(
            f"{len(contenders)} drafters were named, one is examined", fix="name one: --drafter model; A+B stacks two"
        )
    from slipstream.lab import diagnosis as lab, prompts as texts

    writable(out, page)
    llm = load(models.one("none"), quiet=as_json)
    chosen = texts.load(llm, prompts, count, template=template)
    patient = contenders[0]
    render.line(
        f"doctor: {patient.label}, K={patient.draft_tokens}, {len(chosen.prompts)} prompts of {chosen.source}, "
        f"target={models.target}, {on(llm.target)}"
    )
    with render.progress("measuring, in turns", lab.steps(llm, chosen, config)) as advance:
        result, code = unfinished(lambda: lab.doctor(llm, patient, chosen, config, out, advance))
    finish(result, out, as_json, show)
    publish(result, page)
    raise typer.Exit(code)


def show(result: Result) -> None:
    """The verdict, the numbers behind it, and what each cause costs."""
    console, data = render.out(), result.data
    if "diagnosis" not in data:
        console.print("Too little was measured for a diagnosis.")
        return
    m, d = data["measured"], data["diagnosis"]
    value, low, high = m["speedup"]
    console.print(f"\n{verdict(d)}", style="bold")
    if d["fix"]:
        console.print(f"Fix: {d['fix']}.")
    console.print(
        f"Measured {render.times(value)}x ({render.times(low)}-{render.times(high)}), predicted from the parts "
        f"{render.times(d['predicted'])}x."
    )
    for line in d["evidence"]:
        console.print(f"- {line}.")
    even, best = d["break_even"], d["best_length"]
    console.print(f"- break-even acceptance: {'none, not even 100%' if even is None else render.percent(even)}.")
    length = f"{best} ({render.times(d['best_speedup'])}x)" if best else "none: no length pays"
    console.print(f"- best draft length up to {m['draft_tokens']}: {length}.")
    console.print()
    console.print(cost_table(m))
    table = render.table("if this were gone", "speed-up")
    for row in d["counterfactuals"]:
        table.add_row(row["cause"], f"{render.times(row['speedup'])}x")
    console.print(table)


def verdict(d: dict[str, Any]) -> str:
    if d["cause"] == "nothing is wrong":
        return f"Nothing is wrong: {render.times(d['speedup'])} times as fast as plain decoding."
    how = f"{render.times(d['speedup'])} times as fast as plain decoding"
    alone = "" if d["enough"] else " No single change makes it pay; this one helps most."
    return f"Cause: {d['cause']} ({how}).{alone}"


def cost_table(m: dict[str, Any]) -> Any:
    """The target's curve, one row a line of 80 columns."""
    rows, seconds = m["costs"]["rows"], m["costs"]["seconds"]
    shown = [i for i, n in enumerate(rows) if n & (n - 1) == 0]
    table = render.table("rows a pass", *(str(rows[i]) for i in shown))
    table.add_row("ms", *(f"{MS * seconds[i]:.1f}" for i in shown))
    table.add_row("times one row", *(f"{seconds[i] / seconds[0]:.2f}" for i in shown))
    return table
