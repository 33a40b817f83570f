"""`slipstream verify`: is what speculation says what the target says?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from slipstream.cli import render
from slipstream.cli.bench import finish, named_rows, publish, unfinished, writable
from slipstream.cli.loading import banner, load
from slipstream.cli.options import ModelOptions, SamplingOptions, grouped

if TYPE_CHECKING:
    from slipstream.lab.results import Result

BAD = "bold red"


@grouped
def verify(
    models: ModelOptions,
    sampling: SamplingOptions,
    prompts: Annotated[str, typer.Argument(help="A file, or code, edit, or code,edit.")] = "code,edit",
    count: Annotated[int, typer.Option("--prompts", min=1, help="Most prompts, of all categories in turn.")] = 4,
    template: Annotated[str, typer.Option(help="chat, raw, or auto: chat for prompts that ask.")] = "auto",
    check: Annotated[list[str] | None, typer.Option(help="Only greedy, coupled or law; repeatable.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Texts drawn for each prompt of the law check.")] = 2000,
    law_prompts: Annotated[int, typer.Option(min=1, help="Prompts of the law check.")] = 2,
    first: Annotated[int, typer.Option(min=2, help="First tokens whose joint law is tested.")] = 3,
    level: Annotated[float, typer.Option(help="Chance that the law check suspects a faultless run.")] = 1e-3,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page of it to this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check that speculation leaves the text alone, with your target, drafter, rule and sampling parameters.

    Greedy texts and texts of one seed are compared with and without the drafter, and judged by how far this model's
    logits move when several rows are computed at once; samples are tested against the target's exact law (at the
    temperature given, else 1). Exit code 1 if there is a bug.
    """
    from slipstream.lab.verification import CHECKS, VerifyConfig

    config = VerifyConfig(
        params=sampling.params(), checks=tuple(check) if check else CHECKS, samples=samples, law_prompts=law_prompts,
        length=first, level=level, seed=sampling.seed or 0,
    )  # fmt: skip
    from slipstream.lab import prompts as texts, verification as lab

    writable(out, page)
    llm = load(models, quiet=as_json)
    chosen = texts.load(llm, prompts, count, template=template)
    render.line(f"verify: {len(chosen.prompts)} prompts of {chosen.source}; {banner(llm, models)}")
    with render.progress("checking", lab.steps(chosen, config)) as advance:
        result, code = unfinished(lambda: lab.verify(llm, chosen, config, out, advance, models.method))
    finish(result, out, as_json, show)
    publish(result, page)
    raise typer.Exit(code or (1 if result.data["verdict"] == "BUG" else 0))


def show(result: Result) -> None:
    """The control, a line for each text, a line for each test, and the verdict."""
    console, data = render.out(), result.data
    noise = data["control"]
    console.print("\ncontrol, no drafter", style="bold")
    console.print(
        f"{noise['positions']} positions scored one row a pass and {noise['rows']} rows a pass: logits differ by "
        f"{noise['noise']:.2g} at most (rounding explains {noise['limit']:.2g}), the likeliest token at "
        f"{noise['flips']} positions: {noise['verdict']}",
        style=BAD if noise["verdict"] == "BUG" else None,
    )
    for name, heading in (
        ("greedy", "greedy texts, with and without the drafter"),
        ("coupled", "sampled texts of one seed, with and without the drafter (rule coupled)"),
    ):
        if data[name]:
            console.print(f"\n{heading}", style="bold")
            console.print(text_table(data[name]))
    if data["law"]:
        console.print("\nsamples against the target's own law", style="bold")
        console.print(law_table(data["law"]))
        for row in data["law"]:
            console.print(f"{short(row['prompt'])}: {reach(row)}", style="dim")
            if row["verdict"] == "BUG":
                console.print(deviations(row))
    console.print(Text(f"\n{summary(data, result.settings)}", BAD if data["verdict"] == "BUG" else "bold"))


def text_table(rows: list[dict[str, Any]]) -> Any:
    table = named_rows("prompt", "tokens", "accepted", "first difference", "margin", "noise", "verdict")
    for row in rows:
        parted = row["divergence"]
        place = ["-"] * 3
        if parted is not None:
            place = [f"token {parted['position']}", _small(parted["margin"]), _small(parted["noise"])]
        accepted = f"{row['accepted']} of {row['drafted']}"
        table.add_row(short(row["prompt"]), str(row["tokens"]), accepted, *place, _verdict(row["verdict"]))
    return table


def law_table(rows: list[dict[str, Any]]) -> Any:
    table = named_rows("prompt", "samples", "cells", "p-value", "would see", "verdict")
    for row in rows:
        second = "" if row["second_p"] is None else f", then {row['second_p']:.2g}"
        bias = "-" if row["smallest_bias"] is None else f"TV {row['smallest_bias']:.3f}"
        cells = [str(row["n"]), str(row["cells"]), f"{row['p']:.2g}{second}", bias]
        table.add_row(short(row["prompt"]), *cells, _verdict(row["verdict"]))
    return table


def reach(row: dict[str, Any]) -> str:
    """What the test could have seen."""
    if row["smallest_bias"] is None:
        return "the law is all but certain, or the samples are few: no bias could have been seen"
    return (
        f"any bias of a total variation of {row['smallest_bias']:.3f} or more among these {row['cells']} outcomes "
        f"would have been seen with {row['power']:.0%} certainty, smaller ones of many kinds too"
    )


def deviations(row: dict[str, Any]) -> Any:
    table = render.table("outcome", "expected", "counted")
    for cell in row["largest"]:
        table.add_row(repr(cell["text"]), f"{cell['expected']:.1f}", str(cell["counted"]))
    return table


def summary(data: dict[str, Any], settings: dict[str, Any]) -> str:
    what = f"{settings['drafter']}, K={settings['draft_tokens']}, rule {settings['rule']}"
    said = [row["verdict"] for name in ("greedy", "coupled") for row in data[name]]
    ties = sum(v.startswith("tie") for v in said)
    if data["verdict"] == "BUG":
        return f"BUG: {what} changes what the target says."
    if data["verdict"] == "lossy":
        return f"{what} changes what the target says, as this lossy rule may."
    parts = [f"{len(said) - ties} of {len(said)} texts identical"] if said else []
    parts += [f"{ties} parted at a tie within measured noise"] if ties else []
    laws = [row["verdict"] for row in data["law"]]
    parts += [f"{laws.count(each)} of {len(laws)} tests of the law: {each}" for each in dict.fromkeys(laws)]
    return f"No bug found in {what}: {', '.join(parts) or 'nothing but the control was checked'}."


def short(name: str) -> str:
    """The file's own name of a prompt that is called by its path."""
    return name.rsplit("/", 1)[-1]


def _verdict(text: str) -> Text:
    return Text(text, BAD if text == "BUG" else "")


def _small(value: float | None) -> str:
    return "inf" if value is None else f"{value:.2g}" if value < 100 else f"{value:.0f}"
