"""`slipstream simulate`: the expected speed-up of speculation, on this machine or on other hardware."""

import json
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.padding import Padding

from slipstream.bench.tables import Column, Section, Table, count, percent, size, span, times, words
from slipstream.cli import render
from slipstream.cli.loading import load, quieten
from slipstream.cli.measuring import values_of
from slipstream.cli.option_groups import grouped, option
from slipstream.cli.options import ModelOptions, number
from slipstream.cli.table_forms import print_section
from slipstream.core.params import check_integer, check_number
from slipstream.errors import ParameterError, did_you_mean
from slipstream.plan.roofline import CONTEXT, PRESETS, Hardware, ModelSize, Serving, find_hardware, placed
from slipstream.templates import FOLDER
from slipstream.theory.cost_curve import CostCurve
from slipstream.theory.forecast import LONGEST_DRAFT, WEIGHTS_READ, Forecast, ForecastCosts, Rates, forecast
from slipstream.zoo import NAMES

_TIMED_LENGTH = 8
BATCHES = "1,4,16,64,256"
HARDWARE = "h100"
"""Default hardware of predictions for models of the registry."""
ADVICE = FOLDER / "advice.txt"
"""What to do in which situation, and why; indented further, with which commands."""


@dataclass(frozen=True)
class AcceptanceOptions:
    PANEL: ClassVar[str] = "Acceptance and drafts"
    alpha: float | None = option(
        None, "Acceptance rate of a draft token.", shown="the published rate of the pair, else 0.7"
    )
    rates: str | None = option(
        None, "Acceptance by position: share of steps that accept the 1st, 2nd, ... draft token.", metavar="R1,R2,..."
    )
    draft_tokens: int | None = option(None, "Draft length (K).", "--draft-tokens", "-k", shown="the best")


@dataclass(frozen=True)
class CostOptions:
    """Cost of a speculative step, in decode steps of the target or as measured."""

    PANEL: ClassVar[str] = "Costs"
    c: float = option(0.05, "Cost of a draft token, in decode steps of the target.")
    row_cost: float = option(0.0, "Cost of verifying one more token, in decode steps of the target.")
    host: float = option(0.0, "Fixed overhead of a speculative step, in decode steps of the target.")
    measure: bool = option(False, "Measure the costs of -m and -md on this machine.")


@dataclass(frozen=True)
class HardwareOptions:
    PANEL: ClassVar[str] = "Hardware"
    hardware: str | None = option(None, "Hardware preset: a100, h100, h200, rtx3090 or rtx4090.")
    gpus: int | None = option(None, "Number of devices.", shown="as many as memory requires")
    bandwidth: float | None = option(None, "Peak memory bandwidth, GB/s.")
    tflops: float | None = option(None, "Peak 16-bit TFLOP/s.")
    memory: float | None = option(None, "Memory per device, GB.")
    bits: float = option(16, "Bits per weight of the target.")
    draft_bits: float | None = option(None, "Bits per weight of the draft model.", shown="as --bits")
    kv_bits: float = option(16, "Bits per KV cache entry.")
    context: int | None = option(None, "Tokens of context per sequence.", shown="1024")
    latency_ms: float | None = option(None, "Find the number of users served with at most this time per token.")
    users: int | None = option(None, "Find the number of devices for this many concurrent users.")


@grouped
def simulate(
    draft: AcceptanceOptions,
    costs: CostOptions,
    place: HardwareOptions,
    target: str | None = option(
        None, "Target model: name (see --pairs), folder, hub id, or a size such as 70B.", "--target", "-m"
    ),
    draft_model: str | None = option(None, "Draft model, given in the same way.", "--draft", "-md"),
    batch: str | None = option(None, "Batch size, one or several.", shown=f"1; with --hardware {BATCHES}"),
    pairs: bool = option(False, "Recommended pairs of target and draft model, with published figures.", panel="Lists"),
    advice: bool = option(False, "What to do in which situation, with commands.", panel="Lists"),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Predict the speed-up of speculation, also on other hardware.

    Costs are given (--c, --row-cost), computed from the sizes of the models (-m and -md; with --hardware for other
    hardware), or measured on this machine (--measure). --pairs lists recommended pairs, --advice what to do in which
    situation.
    """
    quieten()
    given = place.hardware or place.bandwidth or place.tflops
    forms = {"--pairs": pairs, "--advice": advice, "--json": as_json}
    asked = [name for name, wanted in forms.items() if wanted]
    if (pairs or advice) and len(asked) > 1:
        raise ParameterError(f"{' and '.join(asked)} are given", fix="ask for one list, as text")
    if advice:
        return show_advice()
    if pairs:
        return print_section(known_pairs(_hardware(place) if given else PRESETS[HARDWARE], draft.alpha))
    if given:
        result = _plan(draft, place, target, draft_model, values_of("--batch", batch or BATCHES, int))
    else:
        result = _lengths(draft, costs, target, draft_model, values_of("--batch", batch or "1", int))
    if as_json:
        print(json.dumps(result))
    else:
        print_section(plan(result) if given else lengths(result))


def _lengths(
    draft: AcceptanceOptions, options: CostOptions, target: str | None, model: str | None, batches: Seq[int]
) -> dict[str, Any]:
    if len(batches) > 1:
        raise ParameterError(f"{len(batches)} batch sizes were given", fix="give one, or plan for --hardware")
    rates, costs = _rates(draft, target, model), _costs(options, target, model, batches[0])
    forecasts, longest = forecast(rates, costs), len(rates.by_position)
    best = forecasts.draft_tokens
    shown = {*range(1, min(longest, max(best + 2, 5)) + 1)} if draft.draft_tokens is None else {draft.draft_tokens}
    shown = {k for k in shown if k <= 6 or abs(k - best) <= 2 or k == draft.draft_tokens}
    curve = costs.target and {"rows": costs.target.rows, "seconds": costs.target.seconds}
    return {
        "acceptance": _acceptance(rates),
        "costs": {"c": costs.c, "batch": costs.batch, "host": costs.host, "curve": curve},
        "assumptions": forecasts.assumptions,
        "lengths": [forecast(rates, costs, k).as_dict() for k in sorted(shown)],
        "best": best,
    }


def _costs(options: CostOptions, target: str | None, model: str | None, batch: int) -> ForecastCosts:
    if options.measure:
        return _measured(target or "embedded", model, batch, options.host)
    check_number("row_cost", options.row_cost, 0.0, float("inf"))
    curve = CostCurve.flat(options.row_cost) if options.row_cost else None
    if target is None and model is None:
        return ForecastCosts(options.c, curve, batch, options.host)
    if target is None or model is None or options.c != CostOptions.c:
        raise ParameterError(
            "--target and --draft give the cost of a draft token together, and in place of --c",
            fix="name both, add --measure to time them here, or --hardware h100 to predict for that hardware",
        )
    ratio = _model(model, "draft").step / _model(target, "target").step
    return ForecastCosts(ratio, curve, batch, options.host, WEIGHTS_READ)


def _measured(target: str, model: str | None, batch: int, host: float) -> ForecastCosts:
    from slipstream.targets.target_costs import measure_costs, measure_draft_costs

    llm = load(ModelOptions(target=target, draft=model))
    with render.status("measuring"):
        curve = measure_costs(llm.target)
        drafting = measure_draft_costs(llm.target, llm.drafter, (1, _TIMED_LENGTH))
    draft = drafting(_TIMED_LENGTH)
    basis = f"measured here: one row takes {1e3 * curve(1):.2f} ms, {_TIMED_LENGTH} draft tokens {1e3 * draft:.2f} ms"
    return ForecastCosts(draft / _TIMED_LENGTH / curve(batch), curve, batch, host, basis)


def _plan(
    draft: AcceptanceOptions, place: HardwareOptions, target: str | None, model: str | None, batches: Seq[int]
) -> dict[str, Any]:
    hardware = _hardware(place)
    if target is None or model is None:
        raise ParameterError(
            "--hardware was given without both models",
            why="the cost of a step is computed from their sizes",
            fix="give --target and --draft: names (see --pairs), folders, or sizes such as 70B and 8B",
        )
    context = CONTEXT if place.context is None else place.context
    check_number("context", context, 0.0, float("inf"))
    rates = _rates(draft, target, model)
    draft_bits = place.bits if place.draft_bits is None else place.draft_bits
    whole, small = _model(target, "target").at(place.bits, place.kv_bits), _model(model, "draft")
    models = whole, small.at(draft_bits, place.kv_bits)
    hardware = placed(models, hardware, context, place.gpus)
    serving = Serving(*models, hardware, rates, context)
    bound = None if place.latency_ms is None else place.latency_ms / 1e3
    if bound is not None:
        check_number("latency_ms", place.latency_ms, 0.0, float("inf"), open_low=True)
    each = {kind: serving.users(bound, speculative) for kind, speculative in (("plain", False), ("speculative", True))}
    if place.users is not None and place.users < 1:
        raise ParameterError(f"users is {place.users}, must be at least 1")
    groups = {kind: math.ceil(place.users / n) if place.users and n else None for kind, n in each.items()}
    return {
        "acceptance": _acceptance(rates),
        "hardware": vars(hardware),
        "models": [vars(m) | {"weight_bytes": m.weight_bytes, "kv_bytes": m.kv_bytes} for m in models],
        "context": context,
        "loads": [serving.load(batch, draft.draft_tokens) for batch in batches],
        "latency_ms": place.latency_ms,
        "users_a_group": each,
        "users": place.users,
        "groups": groups,
    }


def _model(name: str, role: str) -> ModelSize:
    """The size of a model given as a registry name, a size, or a checkpoint."""
    from slipstream.checkpoints.load_settings import LoadSettings
    from slipstream.plan.known_pairs import MODELS, known_model
    from slipstream.targets.describe import describe

    known = known_model(name)
    if known is not None:
        return known.size
    unit = {"B": 1e9, "M": 1e6}.get(name[-1:].upper())
    figure = number(name[:-1])
    if unit and not isinstance(figure, str):
        return ModelSize.like_llama(figure * unit, name)
    if "/" in name or name in NAMES or Path(name).exists():
        return ModelSize.of(describe(name, LoadSettings(role=role)).config, name)
    raise ParameterError(f"{name!r} is not a folder, nor a model of --pairs", fix=did_you_mean(name, [*MODELS, *NAMES]))


def _hardware(place: HardwareOptions) -> Hardware:
    asked = {"bandwidth": (place.bandwidth, 1e9), "flops": (place.tflops, 1e12), "memory": (place.memory, 1e9)}
    given: dict[str, Any] = {name: value * unit for name, (value, unit) in asked.items() if value is not None}
    if place.hardware is not None:
        return replace(find_hardware(place.hardware), **given)
    lacking = [name for name in ("bandwidth", "tflops", "memory") if getattr(place, name) is None]
    if lacking:
        raise ParameterError(
            "custom hardware lacks --" + ", --".join(lacking), fix="give all three, or a preset with --hardware"
        )
    return Hardware("your hardware", **given)


def _rates(draft: AcceptanceOptions, target: str | None, model: str | None) -> Rates:
    """Acceptance rates by position: as given, or of the pair (see `acceptance_rates`)."""
    from slipstream.plan.known_pairs import acceptance_rates

    longest = max(LONGEST_DRAFT, draft.draft_tokens or 0)
    if draft.draft_tokens is not None:
        check_integer("draft_tokens", draft.draft_tokens, 1)
    if draft.alpha is not None:
        check_number("alpha", draft.alpha, 0.0, 1.0)
        if draft.rates is not None:
            raise ParameterError("both --alpha and --rates were given", fix="give one")
    if draft.rates is None:
        return acceptance_rates(target, model, draft.alpha, longest)
    try:
        given = tuple(map(float, draft.rates.split(",")))
    except ValueError as fault:
        raise ParameterError(f"--rates is {draft.rates!r}", fix="give numbers, as in 0.73,0.52,0.35") from fault
    rates = Rates(given)
    if draft.draft_tokens is not None and draft.draft_tokens > len(rates.by_position):
        raise ParameterError(
            f"draft_tokens is {draft.draft_tokens}, but {len(rates.by_position)} rates were given",
            why="acceptance at later positions is unknown",
            fix=f"choose --draft-tokens up to {len(rates.by_position)}",
        )
    return rates.up_to(longest)


def _acceptance(rates: Rates) -> dict[str, Any]:
    return {"alpha": rates.alpha, "position_rates": list(rates.by_position), "source": rates.origin}


def lengths(data: dict[str, Any]) -> Section:
    columns = [Column("K"), Column("tokens per step", digits=2), Column("step cost", digits=2), Column("speed-up", "x"),
               Column("break-even"), words("")]  # fmt: skip
    rows = [
        [row["draft_tokens"], row["tau"], row["step_cost"], row["speedup"], break_even(row["break_even"]),
         "best" if row["draft_tokens"] == data["best"] else ""]
        for row in data["lengths"]
    ]  # fmt: skip
    note = (
        "K: draft length. step cost: in decode steps of the target. break-even: the acceptance rate above which this "
        "length is faster than plain decoding."
    )
    shown = next((row for row in data["lengths"] if row["draft_tokens"] == data["best"]), None)
    lead = f"Best: K={data['best']}" + (f", {times(shown['speedup'])} plain decoding." if shown else ".")
    section = Section("Speed-up", lead if data["best"] else "No draft length is faster than plain decoding.")
    section.tables.append(Table("Speed-up by draft length", columns, rows, note))
    if data["costs"]["curve"] and len(data["costs"]["curve"]["rows"]) > 2:  # measured
        from slipstream.plan.report_tune import costs

        section.tables.append(costs(data["costs"]["curve"]))
    section.notes = [f"Assumptions: {data['assumptions']}."]
    return section


def break_even(rate: float | None) -> str:
    return "never" if rate is None else percent(rate)


def plan(data: dict[str, Any]) -> Section:
    hardware, (target, draft) = data["hardware"], data["models"]
    title = hardware["name"] if hardware["devices"] == 1 else f"{hardware['devices']} x {hardware['name']}"
    columns = [Column("batch"), Column("K"), Column("speed-up", "x"), Column("per user, plain"),
               Column("per user, spec."), Column("total, plain"), Column("total, spec."), Column("memory", "B"),
               words("")]  # fmt: skip
    rows = []
    for row in data["loads"]:
        speeds = [row[f"{kind}tokens_per_second{of}"] for of in ("_per_user", "") for kind in ("plain_", "")]
        fits = "" if row["fits"] else "too large"
        rows.append([row["batch"], row["draft_tokens"] or "off", row["speedup"], *speeds, row["memory"], fits])
    note = "Columns 4 to 7: tokens/s."
    if not all(row["fits"] for row in data["loads"]):
        note += f" too large: more than 90% of the memory ({size(hardware['memory'] * hardware['devices'])})."
    section = Section("Plan", users(data, title))
    section.tables.append(Table(f"{target['name']} + {draft['name']} on {title}", columns, rows, note))
    section.notes = [f"{line}." for line in assumptions(data)]
    return section


def users(data: dict[str, Any], title: str) -> str:
    each, bound = data["users_a_group"], data["latency_ms"]
    limit = "that fit into memory" if bound is None else f"with at most {bound:g} ms per token"
    text = f"Concurrent users {limit}: {each['plain']} plain, {each['speculative']} with speculation, on {title}."
    if data["users"]:
        devices = data["hardware"]["devices"]
        needed = [
            f"{kind} "
            + ("impossible with any number of devices" if n is None else f"{n * devices} devices ({n} groups)")
            for kind, n in data["groups"].items()
        ]
        text += f" For {data['users']} users: {', '.join(needed)}."
    return text


def assumptions(data: dict[str, Any]) -> list[str]:
    hardware, (target, draft), first = data["hardware"], data["models"], data["loads"][0]
    lines = [
        f"Assumptions at batch {first['batch']}: {first['assumptions']}",
        f"{target['name']}: {size(target['weight_bytes'])} of weights at {target['bits']:g} bits, "
        f"{size(target['kv_bytes'])} of KV cache per token; {draft['name']}: {size(draft['weight_bytes'])}, "
        f"{size(draft['kv_bytes'])}; the draft runs on {first['draft_devices']} of {hardware['devices']} devices (one "
        "or all, whichever is faster)",
        f"A forward pass reads at {hardware['reading']:.0%} of the peak bandwidth, computes at "
        f"{hardware['computing']:.0%} of the peak, and has {1e3 * hardware['overhead']:g} ms of overhead",
    ]
    if hardware["devices"] > 1:
        lines.append(
            f"Two exchanges per layer between devices, {1e6 * hardware['exchange']:g} us each and "
            f"{hardware['talking']:.0%} of {hardware['link'] / 1e9:.0f} GB/s"
        )
    if target["experts"]:
        lines.append(
            f"{target['picked']} of {target['experts']} experts per row, chosen uniformly and independently: more rows "
            "read more experts"
        )
    if min(target["bits"], draft["bits"]) < 16:
        lines.append("This is optimistic: kernels for quantised weights reach less of the bandwidth in practice")
    return [*lines, "Prefill and queueing are not included"]


def known_pairs(place: Hardware, alpha: float | None) -> Section:
    """The recommended pairs, with published figures and predictions. alpha: acceptance rate to assume for all; None:
    the published ones."""
    from slipstream.plan.known_pairs import MODELS, PAIRS, outlook

    if alpha is not None:
        check_number("alpha", alpha, 0.0, 1.0)
    sources = [source for pair in PAIRS for source in (pair.acceptance_source, pair.speedup_source) if source]
    numbers = {source: i for i, source in enumerate(dict.fromkeys(sources), start=1)}
    columns = [words("target + draft"), Column("size"), Column("accept"), Column("speed-up"), Column("GPUs"),
               Column("c, verify"), Column("break-even"), Column("predicted")]  # fmt: skip
    rows = []
    for pair in PAIRS:
        hardware, best = outlook(pair, place, alpha)
        gain = f"{times(best.speedup)}, K={best.draft_tokens}" if best.draft_tokens else "no speed-up"
        rows.append(
            [
                f"{pair.target}\n+ {pair.draft}",
                "\n".join(count(MODELS[name].shape.parameters) for name in (pair.target, pair.draft)),
                published(pair.acceptance, "%", numbers.get(pair.acceptance_source)),
                published(pair.speedup, "x", numbers.get(pair.speedup_source)),
                hardware.devices,
                f"{best.costs.c:.2f}\n{best.costs.verify(best.draft_tokens or 1):.2f}",
                break_even(best.break_even),
                f"{gain}\n{rate(best)}",
            ]
        )
    note = (
        "accept, speed-up: as published; -: no published figure. break-even: acceptance rate. c, verify: cost of one "
        "draft token and of verifying K draft tokens, in decode steps of the target. predicted: expected tokens per "
        "step divided by the cost of a step, at the best draft length K."
    )
    section = Section("Recommended pairs", assumed(place), [Table("Recommended pairs", columns, rows, note)])
    section.notes = [f"[{number}] {source}." for source, number in numbers.items()]
    section.notes += [f"{pair.target} + {pair.draft}: {pair.note}." for pair in PAIRS if pair.note]
    return section


def assumed(place: Hardware) -> str:
    """The assumptions of all predictions of a table, in one line."""
    basis = f"costs by a roofline of {place.name}, 16-bit weights, {CONTEXT} tokens of context"
    return f"Assumptions: the acceptance rate shown, at every position; batch 1; {basis}."


def rate(predicted: Forecast) -> str:
    """The acceptance rate of a prediction and its origin: "at 78%", "assumed 70%"."""
    shown = percent(predicted.rates.alpha)
    return f"at {shown}" if predicted.rates.origin == "published" else f"{predicted.rates.origin} {shown}"


def published(values: tuple[float, float] | None, unit: str, number: int | None = None) -> str:
    """(.75, .8) -> "75-80%", with the number of its source on the next line."""
    return "-" if values is None else span(values, unit) + (f"\n[{number}]" if number else "")


def show_advice() -> None:
    console = render.out()
    for line in ADVICE.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            console.print(line, soft_wrap=True)  # a command stays one line to copy
        elif line.startswith("  "):
            console.print(Padding(line.strip(), (0, 0, 0, 2)))
        else:
            console.print(line, style="bold")
