"""`slipstream pairs` and `slipstream suggest-draft`: which draft for which target, and what to do where."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding

from slipstream.cli import render
from slipstream.cli.loading import quieten

if TYPE_CHECKING:
    from slipstream.lab.advice import Advice
    from slipstream.lab.known_pairs import KnownPair, Outlook
    from slipstream.lab.suggest import Suggestions

UNKNOWN = "no published figure"


def pairs(
    hardware: Annotated[
        str, typer.Option(help="Where predictions are for: see slipstream simulate --presets.")
    ] = "h100",
    acceptance: Annotated[
        float | None, typer.Option(help="Assume this for all.", show_default="the published rate, else 0.7")
    ] = None,
    advice: Annotated[bool, typer.Option("--advice", help="What to do in which situation, with commands.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List recommended pairs of target and draft: what is published, and what the closed form predicts."""
    quieten()
    from slipstream.core.params import check_number
    from slipstream.lab.advice import ADVICE
    from slipstream.lab.hardware import find_hardware
    from slipstream.lab.known_pairs import PAIRS, outlook

    if advice:
        if as_json:
            print(json.dumps({"advice": [one.as_dict() for one in ADVICE]}))
        else:
            show_advice(ADVICE)
        return
    if acceptance is not None:
        check_number("acceptance", acceptance, 0.0, 1.0)
    place = find_hardware(hardware)
    rows = [(pair, outlook(pair, place, acceptance)) for pair in PAIRS]
    if as_json:
        print(json.dumps({"pairs": [record(pair, seen) for pair, seen in rows]}))
    else:
        show_pairs(rows)


def record(pair: KnownPair, seen: Outlook) -> dict[str, Any]:
    """One pair as plain JSON values."""
    from slipstream.lab.known_pairs import MODELS

    sizes = {
        role: {
            "hub": MODELS[name].hub,
            "parameters": MODELS[name].facts.parameters,
            "tokenizer": MODELS[name].tokenizer,
        }
        for role, name in (("target_model", pair.target), ("draft_model", pair.draft))
    }
    return asdict(pair) | sizes | {"predicted": asdict(seen)}


def show_pairs(rows: list[tuple[KnownPair, Outlook]]) -> None:
    from slipstream.lab.known_pairs import MODELS

    console = render.out()
    said = sources([pair for pair, _ in rows])
    made = render.table("target + draft", "size", "accept", "speed-up", "on", "c,\nabove", "predicted")
    for pair, seen in rows:
        sizes = [render.count(MODELS[name].facts.parameters) for name in (pair.target, pair.draft)]
        predicted = f"{seen.speedup:.2f}x, K={seen.draft_tokens}" if seen.draft_tokens else "no gain"
        made.add_row(
            f"{pair.target}\n + {pair.draft}",
            "\n".join(sizes),
            interval(pair.acceptance, "%", said.get(pair.acceptance_source)),
            interval(pair.speedup, "x", said.get(pair.speedup_source)),
            seen.hardware.title,
            f"{seen.c:.2f}\n" + ("never" if seen.break_even is None else render.percent(seen.break_even)),
            predicted + ("\nassumed " if seen.assumed else "\nat ") + f"{seen.acceptance:.0%}",
        )
    console.print(made)
    for source, mark in said.items():
        console.print(f"[{mark}] {source}.")
    console.print(
        f"Acceptance and speed-up as published; -: {UNKNOWN}. c: cost of a draft step in target steps at batch 1 and "
        "16 bits, by a roofline; above: the acceptance from which some draft length is faster than plain decoding. "
        "Predicted: the closed form at the published acceptance, else at an assumed one, with the best draft length K; "
        "real acceptance falls with depth."
    )
    for pair, _ in rows:
        if pair.note:
            console.print(f"- {pair.target} + {pair.draft}: {pair.note}.")


def sources(pairs: list[KnownPair]) -> dict[str, int]:
    """Every source of a figure, numbered."""
    named = [s for pair in pairs for s in (pair.acceptance_source, pair.speedup_source) if s]
    return {source: i for i, source in enumerate(dict.fromkeys(named), start=1)}


def interval(values: tuple[float, float] | None, unit: str, mark: int | None = None) -> str:
    """(.75, .8) -> "75-80%", and the number of its source below."""
    if values is None:
        return "-"
    shown = [f"{100 * v:.0f}" if unit == "%" else f"{v:g}" for v in values]
    return (shown[0] if values[0] == values[1] else "-".join(shown)) + unit + (f"\n[{mark}]" if mark else "")


def show_advice(advice: tuple[Advice, ...]) -> None:
    console = render.out()
    for one in advice:
        console.print(one.situation[0].upper() + one.situation[1:], style="bold")
        for text in (one.recommendation, one.why):
            console.print(Padding(f"{text}.", (0, 0, 0, 2)))
        for command in one.commands:
            console.print(f"    {command}", soft_wrap=True)  # stays one line to copy


def suggest_draft(
    target: Annotated[str, typer.Argument(help="Name (slipstream pairs), folder, hub id, or 'embedded'.")],
    models: Annotated[
        list[Path] | None,
        typer.Option(help="Folder that holds models; repeatable.", show_default="the Hugging Face cache"),
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="Assume this for all.", show_default="the published rate, else 0.7")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens that the draft must be able to hold.")] = 0,
    hardware: Annotated[
        str | None, typer.Option(help="Price draft steps for this.", show_default="by the bytes they read")
    ] = None,
    gpus: Annotated[int, typer.Option(help="Devices of that kind.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find a draft for a target among known and local models; every other one is listed with what is against it.

    Exit code 0 if something fits, 1 if nothing does. No weights are loaded.
    """
    quieten()
    from slipstream.lab.hardware import find_hardware
    from slipstream.lab.suggest import embedded_models, hub_cache, suggest

    folders = list(models) if models else hub_cache()
    if target == "embedded":
        folders += embedded_models()
    place = find_hardware(hardware).times(gpus) if hardware else None
    found = suggest(target, folders, acceptance=acceptance, context=context, hardware=place)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        show_suggestions(found)
    raise typer.Exit(0 if found.fitting else 1)


def show_suggestions(found: Suggestions) -> None:
    from slipstream.lab.suggest import REGISTRY

    console = render.out()
    console.print(f"Drafts for {found.target} ({render.count(found.parameters)}):", style="bold")
    if found.fitting:
        made = render.table("draft", "predicted", "K", "c", "acceptance", "where", left=1)
        for one in found.fitting:
            made.add_row(
                one.name,
                f"{one.speedup:.2f}x",
                str(one.draft_tokens),
                f"{one.c:.3f}",
                f"{one.acceptance:.0%} {one.basis}",
                "registry, not here" if one.place == REGISTRY else "here",
            )
        console.print(made)
        for one in found.fitting:
            for note in one.notes:
                console.print(f"- {one.name}: {note}.")
        best = found.fitting[0]
        console.print(
            "Ranked by the closed form. Where the acceptance is assumed, the smallest draft comes out first, although "
            "smaller drafts are accepted less: measure the best few."
        )
        console.print(f"  slipstream check-pair {found.loadable} {where(best)} --measure", soft_wrap=True)
    else:
        console.print("Nothing fits.")
    show_rejected(found)
    show_alternatives(found)


def where(candidate: Any) -> str:
    """What to give a command for a candidate."""
    from slipstream import zoo
    from slipstream.lab.known_pairs import MODELS
    from slipstream.lab.suggest import REGISTRY

    if candidate.place == REGISTRY:
        return MODELS[candidate.name].hub
    return "embedded" if Path(candidate.place) == zoo.draft_dir() else candidate.place


def show_rejected(found: Suggestions) -> None:
    """Those of the registry that share a reason stand together."""
    reasons: dict[str, list[str]] = {}
    for one in found.rejected:
        reasons.setdefault(one.rejected, []).append(one.name)
    console = render.out()
    if reasons:
        console.print("Rejected:", style="bold")
    for reason, names in reasons.items():
        console.print(f"- {', '.join(names)}: {reason}.")


def show_alternatives(found: Suggestions) -> None:
    from slipstream.lab.suggest import ALTERNATIVES

    console = render.out()
    console.print("Without a second model:", style="bold")
    for one in ALTERNATIVES:
        console.print(f"- {one.name}: {one.when}.")
        console.print(f"    {one.command.format(target=found.loadable)}", soft_wrap=True)
