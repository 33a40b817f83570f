"""`slipstream bench`: drafters against plain decoding in one interleaved run, and two such runs against each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from slipstream.cli import render
from slipstream.cli.contenders import LabModels, values_of
from slipstream.cli.loading import load, on
from slipstream.cli.options import grouped
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.lab.results import Result

MS = 1000


@grouped
def bench(
    models: LabModels,
    prompts: Annotated[
        str, typer.Argument(help="A file (Spec-Bench, HumanEval, JSON lines, text), or code, edit, or code,edit.")
    ] = "code,edit",
    count: Annotated[int | None, typer.Option("--prompts", min=1, help="Most prompts, of all categories in turn.")] = 8,
    category: Annotated[list[str] | None, typer.Option(help="Only this category; repeatable.")] = None,
    template: Annotated[str, typer.Option(help="chat, raw, or auto: chat for prompts that ask.")] = "auto",
    tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens a prompt.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes over the prompts.")] = 5,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no further pass after so long (three are run).")] = 60,
    temperature: Annotated[str, typer.Option(help="One or several, as in 0,0.8.")] = "0",
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end of text.")] = False,
    batch: Annotated[str, typer.Option(help="Sequences at once, one or several, as in 1,4.")] = "1",
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the result, with its provenance, to this JSON file.")] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Measure nothing: compare two result files.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure drafters against plain decoding, in turns, on the same prompts.

    Exit code 1 if a greedy text differs from plain decoding's by more than rounding can explain.
    """
    if compare is not None:
        return show_comparison(*compare, as_json)
    from slipstream.lab.benchmark import BenchConfig

    config = BenchConfig(
        tokens=tokens, rounds=rounds, seconds=seconds, seed=seed,
        temperatures=values_of("--temperature", temperature, float), batches=values_of("--batch", batch, int),
        sampling={"top_k": top_k, "top_p": top_p, "ignore_eos": ignore_eos},
    )  # fmt: skip
    contenders = models.contenders()
    if not contenders:
        raise ParameterError("there is no drafter to measure", fix="name one: --drafter ngram")
    writable(out)
    llm = load(models.one("none"), quiet=as_json)
    from slipstream.lab import benchmark as lab, prompts as texts

    chosen = texts.load(llm, prompts, count, category or (), template)
    render.line(f"bench: {len(chosen.prompts)} prompts of {chosen.source}, target={models.target}, {on(llm.target)}")
    with render.progress("measuring, in turns", lab.steps(llm, contenders, chosen, config)) as advance:
        result, code = unfinished(lambda: lab.bench(llm, contenders, chosen, config, out, advance))
    finish(result, out, as_json, show)
    raise typer.Exit(code or (1 if any(arm["texts"] == "BUG" for arm in result.data["arms"]) else 0))


def writable(*paths: Path | None) -> None:
    """Raise ResultError, before anything is measured, unless every file that was named can be written."""
    from slipstream.lab.results import check_writable

    for path in paths:
        if path is not None:
            check_writable(path)


def publish(result: Result, page: Path | None) -> None:
    """Write the page of a result, if one was asked for."""
    if page is not None:
        from slipstream.lab.report_page import write_page

        write_page([result], page)
        render.line(f"wrote {page}")


def unfinished(measure: Callable[[], Result]) -> tuple[Result, int]:
    """The result and an exit code: after Ctrl-C what there is so far, and 130. Other errors say so and go on up."""
    try:
        return measure(), 0
    except KeyboardInterrupt as stop:
        result = getattr(stop, "result", None)
        if result is None:
            raise
        return result, 130


def finish(result: Result, out: Path | None, as_json: bool, show: Callable[[Result], None]) -> None:
    """Print what was measured, what to know about it, and where it is kept."""
    if as_json:
        print(json.dumps(result.as_dict(), ensure_ascii=False))
    else:
        show(result)
    for warning in result.warnings:
        render.message("warning", warning)
    if not result.complete:
        render.message("warning", "the run was interrupted: this is what was measured until then")
    if out is not None:
        render.line(f"wrote {out}; `slipstream report {out}` makes a page of it")


def show(result: Result) -> None:
    """The tables."""
    console, arms = render.out(), result.data["arms"]
    for condition in dict.fromkeys((arm["temperature"], arm["batch"]) for arm in arms):
        own = [arm for arm in arms if (arm["temperature"], arm["batch"]) == condition]
        console.print(f"\ntemperature {condition[0]:g}, batch {condition[1]}", style="bold")
        console.print(speed_table(own))
        if len(own[0]["categories"]) > 1:
            console.print(category_table(own))
        console.print(split_table(own))
    rounds = min((arm["rounds"] for arm in arms), default=0)
    console.print(
        f"{rounds} rounds in turns; speed-up over plain decoding with its 95 % interval; tau: tokens a round, bonus "
        "included; first, next: ms to the first token and for each later one. * near-ties: the text parts where "
        "rounding decides.",
        style="dim",
    )


def speed_table(arms: list[dict[str, Any]]) -> Any:
    table = named_rows("method", "tok/s", "speed-up (95 %)", "accept", "tau", "first", "next", "text")
    for arm in arms:
        f, gain = arm["overall"], arm["overall"]["speedup"]
        later = f["seconds_per_later_token"]
        text = {"near-tie": "identical*", "plain": "", "sampled": "sampled"}.get(arm["texts"], arm["texts"])
        table.add_row(
            label(arm),
            f"{f['tokens_per_second']['value']:.0f}",
            "1"
            if arm["plain"]
            else f"{render.times(gain['value'])}x ({render.times(gain['low'])}-{render.times(gain['high'])})",
            render.percent(f["acceptance_rate"]),
            f"{f['mean_acceptance_length']:.2f}",
            f"{f['first_token_seconds'] * MS:.0f}",
            "-" if later is None else f"{later * MS:.1f}",
            Text(text, "bold red" if text == "BUG" else ""),
        )
    return table


def category_table(arms: list[dict[str, Any]]) -> Any:
    """Speed-up (plain decoding: tokens/s) by category."""
    table = named_rows("speed-up by category", *(label(arm) if not arm["plain"] else "plain tok/s" for arm in arms))
    for kind in arms[0]["categories"]:
        cells = []
        for arm in arms:
            f = arm["categories"][kind]
            cells.append(
                f"{f['tokens_per_second']['value']:.0f}" if arm["plain"] else f"{render.times(f['speedup']['value'])}x"
            )
        table.add_row(kind, *cells)
    return table


def split_table(arms: list[dict[str, Any]]) -> Any:
    """Where the time goes, acceptance by position, and memory."""
    table = named_rows("method", "draft", "target", "verify", "host", "peak", "accepted by position")
    table.columns[-1].justify = "left"
    for arm in arms:
        shares, rates = arm["overall"]["shares"], arm["overall"]["position_rates"]
        memory = "-" if arm["peak_memory"] is None else render.size(arm["peak_memory"])
        table.add_row(
            label(arm),
            *(render.percent(shares[phase]) for phase in ("draft", "target", "verify")),
            render.percent(shares["host"] + shares["outside"]),
            memory,
            " ".join(f"{rate:.0%}" for rate in rates[:5]) + (" ..." if len(rates) > 5 else ""),
        )
    return table


def named_rows(*columns: str) -> Any:
    """A table whose first column wraps: labels carry options and may be long."""
    table = render.table(*columns)
    table.columns[0].no_wrap, table.columns[0].overflow, table.columns[0].min_width = False, "fold", 12
    return table


def label(arm: dict[str, Any]) -> str:
    return arm["label"] + (f", K={arm['draft_tokens']}" if not arm["plain"] else "")


def show_comparison(first: str, second: str, as_json: bool) -> None:
    from slipstream.lab.bench_compare import compare

    found = compare(first, second)
    if as_json:
        print(json.dumps(found))
        return
    table = named_rows("method", "T", "batch", "speed-up", "change (95 %)", "accept", "tau", "")
    for row in found["rows"]:
        (old, new), factor = (e["value"] for e in row["speedup"]), row["factor"]
        moved = f"{factor['value'] - 1:+.0%} ({factor['low'] - 1:+.0%} to {factor['high'] - 1:+.0%})"
        verdict = ("faster" if factor["value"] > 1 else "slower") if row["significant"] else "no change"
        table.add_row(
            row["label"],
            f"{row['temperature']:g}",
            str(row["batch"]),
            "1" if row["plain"] else f"{render.times(old)} to {render.times(new)}",
            "" if row["plain"] else moved,
            "" if row["plain"] else " to ".join(render.percent(rate) for rate in row["acceptance_rate"]),
            " to ".join(f"{tau:.2f}" for tau in row["mean_acceptance_length"]),
            "" if row["plain"] else verdict,
        )
    console = render.out()
    console.print(table)
    for line in found["differences"]:
        console.print(f"- not the same {line}.")
    for line in found["missing"]:
        console.print(f"- only in one of the files: {line}.")
