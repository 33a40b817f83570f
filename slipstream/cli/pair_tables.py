"""`slipstream simulate --pairs` and `--advice`: known pairs, and what to do when."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.padding import Padding

from slipstream.bench.tables import Column, Table, count, percent, times, words
from slipstream.cli import render

if TYPE_CHECKING:
    from slipstream.plan.hardware import Hardware
    from slipstream.plan.known_pairs import KnownPair, Outlook
    from slipstream.theory.forecast import Forecast

UNKNOWN = "no published figure"
HARDWARE = "h100"
"""Default hardware of predictions for models of the registry."""


def show_known_pairs(place: Hardware, alpha: float | None, as_json: bool) -> None:
    """Print the recommended pairs, with published figures and predictions. alpha: acceptance rate to assume for all;
    None: the published ones."""
    from slipstream.core.params import check_number
    from slipstream.plan.known_pairs import PAIRS, outlook

    if alpha is not None:
        check_number("alpha", alpha, 0.0, 1.0)
    rows = [(pair, outlook(pair, place, alpha)) for pair in PAIRS]
    if as_json:
        print(json.dumps({"pairs": [record(pair, seen) for pair, seen in rows]}))
    else:
        show_pairs(rows, place)


def record(pair: KnownPair, seen: Outlook) -> dict[str, Any]:
    """One pair as plain JSON values."""
    from slipstream.plan.known_pairs import MODELS

    sizes = {
        role: {
            "hub": MODELS[name].hub,
            "parameters": MODELS[name].facts.parameters,
            "tokenizer": MODELS[name].tokenizer,
        }
        for role, name in (("target_model", pair.target), ("draft_model", pair.draft))
    }
    assumed = seen.forecast.rates.source != "published"
    return (
        asdict(pair)
        | sizes
        | {"predicted": seen.forecast.as_dict() | {"assumed": assumed, "hardware": asdict(seen.hardware)}}
    )


def show_pairs(rows: list[tuple[KnownPair, Outlook]], place: Hardware) -> None:
    from slipstream.plan.known_pairs import MODELS

    numbers = sources([pair for pair, _ in rows])
    columns = [words("target + draft"), Column("size"), Column("accept"), Column("speed-up"), Column("GPUs"),
               Column("c, verify"), Column("break-even"), Column("predicted")]  # fmt: skip
    cells = []
    for pair, seen in rows:
        found = seen.forecast
        sizes = [count(MODELS[name].facts.parameters) for name in (pair.target, pair.draft)]
        gain = f"{times(found.speedup)}, K={found.draft_tokens}" if found.draft_tokens else "no speed-up"
        cells.append(
            [
                f"{pair.target}\n+ {pair.draft}",
                "\n".join(sizes),
                published(pair.acceptance, "%", numbers.get(pair.acceptance_source)),
                published(pair.speedup, "x", numbers.get(pair.speedup_source)),
                seen.hardware.devices,
                f"{found.costs.c:.2f}\n{found.costs.verify(found.draft_tokens or 1):.2f}",
                "never" if found.break_even is None else percent(found.break_even),
                f"{gain}\n{rate(found)}",
            ]
        )
    note = f"accept, speed-up: as published; -: {UNKNOWN}. break-even: acceptance rate. {LEGEND} {assumed(place)}"
    render.titled(Table("Recommended pairs", columns, cells, note))
    console = render.out()
    console.print()
    for source, number in numbers.items():
        console.print(f"[{number}] {source}.")
    for pair, _ in rows:
        if pair.note:
            console.print(f"- {pair.target} + {pair.draft}: {pair.note}.")


LEGEND = (
    "c, verify: cost of one draft token and of verifying K draft tokens, in decode steps of the target. predicted: "
    "expected tokens per step divided by the cost of a step, at the best draft length K."
)


def assumed(place: Hardware) -> str:
    """The assumptions of all predictions of a table, in one line."""
    from slipstream.plan.known_pairs import CONTEXT

    basis = f"costs by a roofline of {place.name}, 16-bit weights, {CONTEXT} tokens of context"
    return f"Assumptions: the acceptance rate shown, at every position; batch 1; {basis}."


def rate(found: Forecast) -> str:
    """The acceptance rate of a prediction and its source: "at 78%", "assumed 70%"."""
    shown = percent(found.rates.alpha)
    return f"at {shown}" if found.rates.source == "published" else f"{found.rates.source} {shown}"


def sources(pairs: list[KnownPair]) -> dict[str, int]:
    """The sources of the figures -> their numbers."""
    named = [s for pair in pairs for s in (pair.acceptance_source, pair.speedup_source) if s]
    return {source: i for i, source in enumerate(dict.fromkeys(named), start=1)}


def published(values: tuple[float, float] | None, unit: str, number: int | None = None) -> str:
    """(.75, .8) -> "75-80%", with the number of its source on the next line."""
    from slipstream.plan.known_pairs import span

    return "-" if values is None else span(values, unit) + (f"\n[{number}]" if number else "")


def show_advice(as_json: bool) -> None:
    """Print what to do in which situation, with commands."""
    from slipstream.plan.advice import ADVICE

    if as_json:
        print(json.dumps({"advice": [one.as_dict() for one in ADVICE]}))
        return
    console = render.out()
    for one in ADVICE:
        console.print(one.situation[0].upper() + one.situation[1:], style="bold")
        for text in (one.recommendation, one.why):
            console.print(Padding(f"{text}.", (0, 0, 0, 2)))
        for command in one.commands:
            console.print(f"    {command}", soft_wrap=True)  # stays one line to copy
