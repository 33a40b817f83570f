"""`slipstream simulate`: the expected speed-up of speculation, on this machine or on other hardware."""

import json
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rich.padding import Padding

from slipstream.cli import render
from slipstream.cli.loading import load, quieten
from slipstream.cli.measuring import parse_values
from slipstream.cli.option_groups import expand_groups, option
from slipstream.cli.options import ModelOptions, number
from slipstream.cli.table_forms import print_section
from slipstream.core.params import check_integer, check_number
from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError, did_you_mean
from slipstream.measure.roofline import CONTEXT, PRESETS, Hardware, ModelSize, Serving, find_hardware, place_models
from slipstream.templates import FOLDER
from slipstream.theory.cost_curve import CostCurve
from slipstream.theory.forecast import LONGEST_DRAFT, WEIGHTS_READ, ForecastCosts, Rates, forecast
from slipstream.zoo import NAMES

_TIMED_LENGTH = 8
BATCHES = "1,4,16,64,256"
HARDWARE = "h100"
"""Default hardware of the predictions for --pairs."""
ADVICE = FOLDER / "advice.txt"
"""File with advice for each situation; commands are indented further."""


@dataclass(frozen=True)
class AcceptanceOptions:
    PANEL: ClassVar[str] = "Acceptance and drafts"
    alpha: float | None = option(
        None, "Acceptance rate of a draft token.", shown="the published rate of the two models, else 0.7"
    )
    rates: str | None = option(
        None,
        "Acceptance rates by position: share of the steps that accept the 1st, 2nd, ... draft token.",
        metavar="R1,R2,...",
    )
    draft_tokens: int | None = option(None, "Draft length (K).", "--draft-tokens", "-k", shown="the best")


@dataclass(frozen=True)
class CostOptions:
    """Cost of a speculative step, in decode steps of the target or as measured."""

    PANEL: ClassVar[str] = "Costs"
    c: float = option(0.05, "Time of drafting a token, relative to a decode step of the target.")
    row_cost: float = option(0.0, "Time of verifying one more token, relative to a decode step of the target.")
    host: float = option(0.0, "Fixed overhead of a speculative step, relative to a decode step of the target.")
    measure: bool = option(False, "Measure the costs of -m and -md on this machine.")


@dataclass(frozen=True)
class HardwareOptions:
    PANEL: ClassVar[str] = "Hardware"
    hardware: str | None = option(None, "Hardware preset: a100, h100, h200, rtx3090 or rtx4090.")
    gpus: int | None = option(None, "Number of devices.", shown="as few as have enough memory")
    bandwidth: float | None = option(None, "Peak memory bandwidth, GB/s.")
    tflops: float | None = option(None, "Peak 16-bit TFLOP/s.")
    memory: float | None = option(None, "Memory per device, GB.")
    bits: float = option(16, "Bits per weight of the target.")
    draft_bits: float | None = option(None, "Bits per weight of the draft model.", shown="as --bits")
    kv_bits: float = option(16, "Bits per KV cache entry.")
    context: int | None = option(None, "Tokens of context per sequence.", shown="1024")
    latency_ms: float | None = option(None, "Compute the number of users served with at most this time per token.")
    users: int | None = option(None, "Compute how many devices this number of concurrent users needs.")


@expand_groups
def simulate(
    draft: AcceptanceOptions,
    costs: CostOptions,
    place: HardwareOptions,
    target: str | None = option(
        None, "Target model: name (see --pairs), folder, hub id, or a size such as 70B.", "--target", "-m"
    ),
    draft_model: str | None = option(None, "Draft model, given like the target.", "--draft", "-md"),
    batch: str | None = option(
        None, "Batch size: one, or with --hardware several, as in 1,8.", shown=f"1; with --hardware {BATCHES}"
    ),
    pairs: bool = option(
        False, "List recommended pairs of target and draft model, with published figures.", panel="Lists"
    ),
    advice: bool = option(False, "Print advice for common situations, with commands.", panel="Lists"),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Predict the speed-up of speculation, also on other hardware.

    Costs are given (--c, --row-cost), computed from the sizes of the models (-m and -md; with --hardware for other
    hardware), or measured on this machine (--measure). --pairs lists recommended pairs, --advice prints advice for
    common situations.
    """
    quieten()
    given = place.hardware or place.bandwidth or place.tflops
    forms = {"--pairs": pairs, "--advice": advice, "--json": as_json}
    asked = [name for name, wanted in forms.items() if wanted]
    if (pairs or advice) and len(asked) > 1:
        raise ParameterError(f"{' and '.join(asked)} were given together", fix="give only one of them")
    if advice:
        return show_advice()
    from slipstream.measure.report_simulate import report_lengths, report_pairs, report_plan

    if pairs:
        if draft.alpha is not None:
            check_number("alpha", draft.alpha, 0.0, 1.0)
        return print_section(report_pairs(_hardware(place) if given else PRESETS[HARDWARE], draft.alpha))
    if given:
        result = _plan_hardware(draft, place, target, draft_model, parse_values("--batch", batch or BATCHES, int))
    else:
        result = _compare_lengths(draft, costs, target, draft_model, parse_values("--batch", batch or "1", int))
    if as_json:
        print(json.dumps(result))
    else:
        print_section(report_plan(result) if given else report_lengths(result))


def _compare_lengths(
    draft: AcceptanceOptions, options: CostOptions, target: str | None, model: str | None, batches: Seq[int]
) -> JsonObject:
    if len(batches) > 1:
        raise ParameterError(
            f"{len(batches)} batch sizes were given, but only --hardware compares several",
            fix="give one --batch, or add --hardware",
        )
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
        return _measure_costs(target or "embedded", model, batch, options.host)
    check_number("row_cost", options.row_cost, 0.0, float("inf"))
    curve = CostCurve.flat(options.row_cost) if options.row_cost else None
    if target is None and model is None:
        return ForecastCosts(options.c, curve, batch, options.host)
    if target is None or model is None or options.c != CostOptions.c:
        raise ParameterError(
            "only one of --target and --draft was given, or --c as well",
            why="the cost of a draft token is computed from the sizes of both models, or given by --c",
            fix="give both models without --c; --measure times them here, --hardware h100 predicts for that hardware",
        )
    ratio = _model(model, "draft").step / _model(target, "target").step
    return ForecastCosts(ratio, curve, batch, options.host, WEIGHTS_READ)


def _measure_costs(target: str, model: str | None, batch: int, host: float) -> ForecastCosts:
    from slipstream.targets.target_costs import measure_costs, measure_draft_costs

    llm = load(ModelOptions(target=target, draft=model))
    with render.status("measuring"):
        curve = measure_costs(llm.target)
        drafting = measure_draft_costs(llm.target, llm.drafter, (1, _TIMED_LENGTH))
    draft = drafting(_TIMED_LENGTH)
    basis = f"measured here: one row takes {1e3 * curve(1):.2f} ms, {_TIMED_LENGTH} draft tokens {1e3 * draft:.2f} ms"
    return ForecastCosts(draft / _TIMED_LENGTH / curve(batch), curve, batch, host, basis)


def _plan_hardware(
    draft: AcceptanceOptions, place: HardwareOptions, target: str | None, model: str | None, batches: Seq[int]
) -> JsonObject:
    hardware = _hardware(place)
    if target is None or model is None:
        raise ParameterError(
            "--hardware was given without --target and --draft",
            why="the cost of a step is computed from the sizes of both models",
            fix="give --target and --draft: names (see --pairs), folders, or sizes such as 70B and 8B",
        )
    context = CONTEXT if place.context is None else place.context
    check_number("context", context, 0.0, float("inf"))
    rates = _rates(draft, target, model)
    draft_bits = place.bits if place.draft_bits is None else place.draft_bits
    whole, small = _model(target, "target").at(place.bits, place.kv_bits), _model(model, "draft")
    models = whole, small.at(draft_bits, place.kv_bits)
    hardware = place_models(models, hardware, context, place.gpus)
    serving = Serving(*models, hardware, rates, context)
    bound = None if place.latency_ms is None else place.latency_ms / 1e3
    if bound is not None:
        check_number("latency_ms", place.latency_ms, 0.0, float("inf"), open_low=True)
    each = {kind: serving.users(bound, speculative) for kind, speculative in (("plain", False), ("speculative", True))}
    if place.users is not None and place.users < 1:
        raise ParameterError(f"--users is {place.users}, but must be at least 1", fix="give a number of users")
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
    """Return the size of a model that is given as a registry name, a size, or a checkpoint."""
    from slipstream.checkpoints.load_settings import LoadSettings
    from slipstream.measure.known_pairs import MODELS, find_model
    from slipstream.targets.describe import describe

    known = find_model(name)
    if known is not None:
        return known.size
    unit = {"B": 1e9, "M": 1e6}.get(name[-1:].upper())
    figure = number(name[:-1])
    if unit and not isinstance(figure, str):
        return ModelSize.like_llama(figure * unit, name)
    if "/" in name or name in NAMES or Path(name).exists():
        return ModelSize.of(describe(name, LoadSettings(role=role)).config, name)
    raise ParameterError(
        f"{name!r} is neither a folder, a hub id, a size such as 8B, nor a model that --pairs lists",
        fix=did_you_mean(name, [*MODELS, *NAMES]),
    )


def _hardware(place: HardwareOptions) -> Hardware:
    asked = {"bandwidth": (place.bandwidth, 1e9), "flops": (place.tflops, 1e12), "memory": (place.memory, 1e9)}
    given: JsonObject = {name: value * unit for name, (value, unit) in asked.items() if value is not None}
    if place.hardware is not None:
        return replace(find_hardware(place.hardware), **given)
    lacking = [name for name in ("bandwidth", "tflops", "memory") if getattr(place, name) is None]
    if lacking:
        raise ParameterError(
            "the description of the hardware lacks --" + ", --".join(lacking),
            fix="give --bandwidth, --tflops and --memory, or a preset with --hardware",
        )
    return Hardware("your hardware", **given)


def _rates(draft: AcceptanceOptions, target: str | None, model: str | None) -> Rates:
    """Return the acceptance rates by position: as given, or of the pair (see `choose_rates`)."""
    from slipstream.measure.known_pairs import choose_rates

    longest = max(LONGEST_DRAFT, draft.draft_tokens or 0)
    if draft.draft_tokens is not None:
        check_integer("draft_tokens", draft.draft_tokens, 1)
    if draft.alpha is not None:
        check_number("alpha", draft.alpha, 0.0, 1.0)
        if draft.rates is not None:
            raise ParameterError("--alpha and --rates both give the acceptance rate", fix="give one of them")
    if draft.rates is None:
        return choose_rates(target, model, draft.alpha, longest)
    try:
        given = tuple(map(float, draft.rates.split(",")))
    except ValueError as fault:
        raise ParameterError(f"--rates is {draft.rates!r}", fix="give a list of numbers: 0.73,0.52,0.35") from fault
    return Rates(given).up_to(longest)


def _acceptance(rates: Rates) -> JsonObject:
    return {"alpha": rates.alpha, "position_rates": list(rates.by_position), "source": rates.origin}


def show_advice() -> None:
    console = render.out()
    for line in ADVICE.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            console.print(line, soft_wrap=True)  # without line breaks, so that a command can be copied
        elif line.startswith("  "):
            console.print(Padding(line.strip(), (0, 0, 0, 2)))
        else:
            console.print(line, style="bold")
