"""`slipstream simulate`: what speculation would gain, on paper and by drawing, here or on hardware that is not here."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import render, simulate_tables as tables
from slipstream.cli.loading import checkpoint, load, quieten
from slipstream.cli.options import ModelOptions, grouped, number
from slipstream.cli.simulate_options import CostOptions, DraftOptions, DrawingOptions, HardwareOptions
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.lab.hardware import Hardware
    from slipstream.lab.roofline import ModelSize
    from slipstream.lab.simulation import Setting

_MEASURED_STEPS = 8
BATCHES = "1,4,16,64,256"


@grouped
def simulate(
    draft: DraftOptions,
    costs: CostOptions,
    place: HardwareOptions,
    draw: DrawingOptions,
    target: Annotated[
        str | None,
        typer.Option("--target", "-m", help="Name (slipstream pairs), folder, hub id, or a size: 70B."),
    ] = None,
    draft_model: Annotated[str | None, typer.Option("--draft", "-md", help="The draft model, likewise.")] = None,
    batch: Annotated[
        str | None, typer.Option(help="Sequences a step.", show_default=f"1; with --hardware {BATCHES}")
    ] = None,
    rules_of_thumb: Annotated[
        bool, typer.Option("--rules-of-thumb", help="Known rules beside the closed form.")
    ] = False,
    presets: Annotated[
        bool, typer.Option("--presets", help="List the hardware and where its figures are from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan speculation before running it: closed forms beside texts drawn at random.

    From an acceptance rate and a draft cost; from what --measure finds on this machine; or, with --hardware, for
    models and batches that do not fit here.
    """
    quieten()
    if rules_of_thumb or presets:
        found = _rules() if rules_of_thumb else _presets()
    elif place.hardware or place.bandwidth or place.tflops:
        found = _plan(draft, place, draw, target, draft_model, _numbers("batch", batch or BATCHES, int))
    else:
        found = _lengths(draft, costs, draw, target, draft_model, _numbers("batch", batch or "1", int))
    if as_json:
        print(json.dumps(found))
    else:
        tables.show(found)


def _rules() -> dict[str, Any]:
    from slipstream.lab.thumb import RULES_OF_THUMB

    return {"rules_of_thumb": [rule.as_dict() | {"holds": rule.holds} for rule in RULES_OF_THUMB]}


def _presets() -> dict[str, Any]:
    from slipstream.lab.hardware import PRESETS

    return {"presets": {key: vars(hardware) | {"ridge": hardware.ridge} for key, hardware in PRESETS.items()}}


def _lengths(
    draft: DraftOptions,
    costs: CostOptions,
    draw: DrawingOptions,
    target: str | None,
    model: str | None,
    batches: Seq[int],
) -> dict[str, Any]:
    from slipstream.core.theory import best_length
    from slipstream.lab.simulation import compare_lengths

    rates = _rates(draft)
    if len(batches) > 1:
        raise ParameterError(f"{len(batches)} batch sizes were given", fix="give one, or plan for --hardware")
    setting, assumptions = _setting(costs, target, model, batches[0])
    best = best_length(rates, setting.c, setting.costs, setting.batch, setting.host)
    shown = {*range(1, min(len(rates), max(best + 2, 5)) + 1)} if draft.draft_tokens is None else {draft.draft_tokens}
    shown = {k for k in shown if k <= 6 or abs(k - best) <= 2 or k == draft.draft_tokens}
    rows = compare_lengths(rates, sorted(shown), setting, draw.spread, **draw.drawing)
    return {
        "acceptance": _acceptance(draft, rates),
        "costs": {"c": setting.c, "batch": setting.batch, "host": setting.host, "curve": tables.curve(setting.costs)},
        "assumptions": assumptions,
        "lengths": [row.as_dict() for row in rows],
        "best": best,
        "tree": _tree(draft, setting, draw),
    }


def _setting(costs: CostOptions, target: str | None, model: str | None, batch: int) -> tuple[Setting, list[str]]:
    from slipstream.core.cost_curve import CostCurve
    from slipstream.core.params import check_number
    from slipstream.lab.simulation import Setting

    if costs.measure:
        return _measured(target or "embedded", model, batch, costs.host)
    if target or model:
        raise ParameterError(
            "models were named, but neither --measure nor --hardware",
            fix="--measure times them here, --hardware h100 plans for elsewhere",
        )
    check_number("row_cost", costs.row_cost, 0.0, float("inf"))
    curve = CostCurve.flat(costs.row_cost) if costs.row_cost else None
    checking = "checking is free" if curve is None else f"each further row costs {costs.row_cost:g} of a one-row step"
    assumed = [f"a draft step costs {costs.c:g} target steps; {checking}", "guesses stand independently of each other"]
    return Setting(costs.c, curve, batch, costs.host), assumed


def _measured(target: str, model: str | None, batch: int, host: float) -> tuple[Setting, list[str]]:
    from slipstream.drafters.draft_costs import measure_draft_costs
    from slipstream.lab.simulation import Setting
    from slipstream.targets.target_costs import measure_costs

    llm = load(ModelOptions(target=target, draft=model))
    with render.status("measuring"):
        curve = measure_costs(llm.target)
        drafting = measure_draft_costs(llm.target, llm.drafter, (1, _MEASURED_STEPS))
    c = drafting(_MEASURED_STEPS) / _MEASURED_STEPS / curve(batch)
    return Setting(c, curve, batch, host), [
        f"measured here: one row takes {1e3 * curve(1):.2f} ms, {_MEASURED_STEPS} guesses "
        f"{1e3 * drafting(_MEASURED_STEPS):.2f} ms",
        "target by rows: " + ", ".join(f"{rows}: {curve.relative(rows):.2f}" for rows in curve.rows),
        "acceptance is as given: --alpha or --rates",
    ]


def _plan(
    draft: DraftOptions, place: HardwareOptions, draw: DrawingOptions,
    target: str | None, model: str | None, batches: Seq[int],
) -> dict[str, Any]:  # fmt: skip
    from slipstream.core.params import check_number
    from slipstream.lab.capacity import Serving, groups_needed
    from slipstream.lab.roofline import devices_needed, pair_costs
    from slipstream.lab.simulation import Setting, compare_lengths

    hardware = _hardware(place)
    if target is None or model is None:
        raise ParameterError(
            "--hardware was given without both models",
            why="what a step reads and computes follows from their sizes",
            fix="give --target and --draft: names (slipstream pairs), folders, or sizes such as 70B and 8B",
        )
    check_number("context", place.context, 0.0, float("inf"))
    rates = _rates(draft)
    draft_bits = place.bits if place.draft_bits is None else place.draft_bits
    whole, small = _model(target, "target").at(place.bits, place.kv_bits), _model(model, "draft")
    if place.kv_bytes is not None:
        check_number("kv_bytes", place.kv_bytes, 0.0, float("inf"))
        whole = replace(whole, kv=8 * place.kv_bytes / place.kv_bits)
    models = whole, small.at(draft_bits, place.kv_bits)
    devices = devices_needed(models, hardware, 1, place.context) if place.gpus is None else place.gpus
    if devices is None:
        raise ParameterError(
            f"{target} and {model} do not fit into 64 x {hardware.name}", fix="give --gpus, or fewer --bits"
        )
    hardware = hardware.times(devices)
    serving = Serving(*models, hardware, tuple(rates), place.context)
    loads = [serving.load(b, draft.draft_tokens) for b in batches]
    rows = []
    for load_ in loads:
        costs = pair_costs(*models, hardware, load_.batch, place.context)
        setting = Setting(costs.c, costs.target, load_.batch)
        drawn = (
            compare_lengths(rates, [load_.draft_tokens], setting, draw.spread, **draw.drawing)
            if load_.draft_tokens
            else []
        )
        rows.append(
            load_.as_dict()
            | {"c": costs.c, "draft_devices": costs.draft_devices, "tree": _tree(draft, setting, draw)}
            | {"drawn": drawn[0].drawn.as_dict() if drawn else None}
        )
    bound = None if place.latency_ms is None else place.latency_ms / 1e3
    if bound is not None:
        check_number("latency_ms", place.latency_ms, 0.0, float("inf"), open_low=True)
    each = {kind: serving.users(bound, speculative) for kind, speculative in (("plain", False), ("speculative", True))}
    if place.users is not None and place.users < 1:
        raise ParameterError(f"users is {place.users}, must be at least 1")
    groups = {kind: place.users and groups_needed(place.users, n) for kind, n in each.items()}
    return {
        "acceptance": _acceptance(draft, rates),
        "hardware": vars(hardware),
        "models": [vars(m) | {"weight_bytes": m.weight_bytes, "kv_bytes": m.kv_bytes} for m in models],
        "context": place.context,
        "loads": rows,
        "latency_ms": place.latency_ms,
        "users_a_group": each,
        "users": place.users,
        "groups": groups,
    }


def _tree(draft: DraftOptions, setting: Setting, draw: DrawingOptions) -> dict[str, Any] | None:
    from slipstream.core.trees import expected_tokens
    from slipstream.lab.simulation import best_tree, simulate_tree

    if draft.tree_rates is None:
        return None
    rates = _numbers("tree-rates", draft.tree_rates, float)
    tree, gain = best_tree(rates, setting, draft.nodes, draft.longest)
    drawn = simulate_tree(tree, rates, setting, **draw.drawing).as_dict() if len(tree) else None
    return {
        "nodes": len(tree), "height": tree.height, "parents": tree.parents, "ranks": tree.ranks,
        "tau": float(expected_tokens(tree, rates)), "speedup": gain, "drawn": drawn,
    }  # fmt: skip


def _model(name: str, role: str) -> ModelSize:
    """A name of the registry, a size, or a checkpoint."""
    from slipstream.lab.known_pairs import known_model
    from slipstream.lab.roofline import ModelSize
    from slipstream.models.facts import facts

    known = known_model(name)
    if known is not None:
        return known.size
    unit = {"B": 1e9, "M": 1e6}.get(name[-1:].upper())
    size = number(name[:-1])
    if unit and not isinstance(size, str):
        return ModelSize.like_llama(size * unit, name)
    if "/" in name or "\\" in name or name == "embedded" or name.startswith("."):
        return ModelSize.of(facts(checkpoint(name, role)), name)
    from slipstream.lab.known_pairs import require_model

    return require_model(name).size


def _hardware(place: HardwareOptions) -> Hardware:
    from slipstream.lab.hardware import Hardware, find_hardware

    own = {"bandwidth": place.bandwidth, "flops": place.tflops, "memory": place.memory, "link": place.link}
    units = {"bandwidth": 1e9, "flops": 1e12, "memory": 1e9, "link": 1e9}
    given: dict[str, Any] = {name: value * units[name] for name, value in own.items() if value is not None}
    if place.hardware is not None:
        return replace(find_hardware(place.hardware), **given)
    lacking = [name for name in ("bandwidth", "tflops", "memory") if getattr(place, name) is None]
    if lacking:
        raise ParameterError(
            "hardware of your own lacks --" + ", --".join(lacking), fix="give all three, or a preset by --hardware"
        )
    return Hardware("your hardware", **given)


def _rates(draft: DraftOptions) -> list[float]:
    """Rates by position, as long as drafts may get."""
    from slipstream.core.params import check_integer, check_number
    from slipstream.core.theory import check_rates, geometric_rates

    check_integer("longest", draft.longest, 1)
    if draft.draft_tokens is not None:
        check_integer("draft_tokens", draft.draft_tokens, 1)
    if draft.alpha is not None and draft.rates is not None:
        raise ParameterError("both --alpha and --rates were given", fix="give one")
    if draft.rates is None:
        alpha = 0.8 if draft.alpha is None else draft.alpha
        check_number("alpha", alpha, 0.0, 1.0)
        return geometric_rates(alpha, max(draft.longest, draft.draft_tokens or 0))
    rates = _numbers("rates", draft.rates, float)
    check_rates(rates)
    if draft.draft_tokens is not None and draft.draft_tokens > len(rates):
        raise ParameterError(
            f"draft_tokens is {draft.draft_tokens}, and {len(rates)} rates were given",
            why="what stands deeper than was measured is not known",
            fix=f"choose --draft-tokens up to {len(rates)}",
        )
    return list(rates)[: draft.longest]


def _acceptance(draft: DraftOptions, rates: Seq[float]) -> dict[str, Any]:
    alpha = None if draft.rates else 0.8 if draft.alpha is None else draft.alpha
    return {"alpha": alpha, "position_rates": list(rates)}


def _numbers(name: str, text: str, kind: type) -> list[Any]:
    """Numbers between commas. Raises ParameterError for what is none."""
    values = []
    wanted, example = ("whole number above 0", "1,8,64") if kind is int else ("number", "0.73,0.52,0.35")
    for part in text.split(","):
        value = number(part.strip())
        if isinstance(value, str) or (kind is int and not (isinstance(value, int) and value >= 1)):
            raise ParameterError(
                f"--{name} {text!r} has {part.strip()!r}, which is no {wanted}",
                fix=f"write numbers between commas, as in {example}",
            )
        values.append(value)
    return values
