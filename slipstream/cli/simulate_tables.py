"""What `slipstream simulate` prints: predictions, known pairs, advice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.padding import Padding

from slipstream.bench.tables import Column, Section, Table, count, percent, size, times, words
from slipstream.cli import render

if TYPE_CHECKING:
    from slipstream.plan.roofline import Hardware
    from slipstream.theory.forecast import Forecast


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
    for load in data["loads"]:
        speeds = [load[f"{kind}tokens_per_second{of}"] for of in ("_per_user", "") for kind in ("plain_", "")]
        fits = "" if load["fits"] else "too large"
        rows.append([load["batch"], load["draft_tokens"] or "off", load["speedup"], *speeds, load["memory"], fits])
    note = "Columns 4 to 7: tokens/s."
    if not all(load["fits"] for load in data["loads"]):
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
    hardware, (target, draft), load = data["hardware"], data["models"], data["loads"][0]
    lines = [
        f"Assumptions at batch {load['batch']}: {load['assumptions']}",
        f"{target['name']}: {size(target['weight_bytes'])} of weights at {target['bits']:g} bits, "
        f"{size(target['kv_bytes'])} of KV cache per token; {draft['name']}: {size(draft['weight_bytes'])}, "
        f"{size(draft['kv_bytes'])}; the draft runs on {load['draft_devices']} of {hardware['devices']} devices (one "
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


HARDWARE = "h100"
"""Default hardware of predictions for models of the registry."""


def known_pairs(place: Hardware, alpha: float | None) -> Section:
    """The recommended pairs, with published figures and predictions. alpha: acceptance rate to assume for all; None:
    the published ones."""
    from slipstream.core.params import check_number
    from slipstream.plan.known_pairs import MODELS, PAIRS, outlook

    if alpha is not None:
        check_number("alpha", alpha, 0.0, 1.0)
    sources = [source for pair in PAIRS for source in (pair.acceptance_source, pair.speedup_source) if source]
    numbers = {source: i for i, source in enumerate(dict.fromkeys(sources), start=1)}
    columns = [words("target + draft"), Column("size"), Column("accept"), Column("speed-up"), Column("GPUs"),
               Column("c, verify"), Column("break-even"), Column("predicted")]  # fmt: skip
    rows = []
    for pair in PAIRS:
        hardware, forecast = outlook(pair, place, alpha)
        gain = f"{times(forecast.speedup)}, K={forecast.draft_tokens}" if forecast.draft_tokens else "no speed-up"
        rows.append(
            [
                f"{pair.target}\n+ {pair.draft}",
                "\n".join(count(MODELS[name].facts.parameters) for name in (pair.target, pair.draft)),
                published(pair.acceptance, "%", numbers.get(pair.acceptance_source)),
                published(pair.speedup, "x", numbers.get(pair.speedup_source)),
                hardware.devices,
                f"{forecast.costs.c:.2f}\n{forecast.costs.verify(forecast.draft_tokens or 1):.2f}",
                break_even(forecast.break_even),
                f"{gain}\n{rate(forecast)}",
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
    from slipstream.plan.known_pairs import CONTEXT

    basis = f"costs by a roofline of {place.name}, 16-bit weights, {CONTEXT} tokens of context"
    return f"Assumptions: the acceptance rate shown, at every position; batch 1; {basis}."


def rate(forecast: Forecast) -> str:
    """The acceptance rate of a prediction and its source: "at 78%", "assumed 70%"."""
    shown = percent(forecast.rates.alpha)
    return f"at {shown}" if forecast.rates.source == "published" else f"{forecast.rates.source} {shown}"


def published(values: tuple[float, float] | None, unit: str, number: int | None = None) -> str:
    """(.75, .8) -> "75-80%", with the number of its source on the next line."""
    from slipstream.plan.known_pairs import span

    return "-" if values is None else span(values, unit) + (f"\n[{number}]" if number else "")


def show_advice() -> None:
    from slipstream.plan.advice import ADVICE

    console = render.out()
    for one in ADVICE:
        console.print(one.situation[0].upper() + one.situation[1:], style="bold")
        for text in (one.recommendation, one.why):
            console.print(Padding(f"{text}.", (0, 0, 0, 2)))
        for command in one.commands:
            console.print(f"    {command}", soft_wrap=True)  # stays one line to copy
