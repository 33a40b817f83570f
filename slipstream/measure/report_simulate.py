"""Makes reports of predictions: by draft length, for many users on other hardware, and for recommended pairs."""

from collections.abc import Sequence as Seq

from slipstream.core.strict import JsonMapping
from slipstream.measure.report_tune import tabulate_costs
from slipstream.measure.roofline import CONTEXT, Hardware
from slipstream.measure.tables import (
    CellValue,
    Column,
    MakeCell,
    Section,
    Table,
    count,
    percent,
    size,
    span,
    tabulate,
    times,
    words,
)  # fmt: skip
from slipstream.theory.cost_curve import CostCurve
from slipstream.theory.forecast import Forecast

Json = JsonMapping


def value_of(name: str) -> MakeCell:
    """Return a function that returns the value `name` of a row, for the cells of a column."""
    return lambda row: row[name]


def report_lengths(data: Json) -> Section:
    best = data["best"]
    columns = [
        Column("K", cell=value_of("draft_tokens")),
        Column("tokens per step", digits=2, cell=value_of("tau")),
        Column("step cost", digits=2, cell=value_of("step_cost")),
        Column("speed-up", "x", cell=value_of("speedup")),
        Column("break-even", cell=lambda row: show_break_even(row["break_even"])),
        words("", lambda row: "best" if row["draft_tokens"] == best else ""),
    ]
    note = (
        "K: draft length. step cost: in decode steps of the target. break-even: the acceptance rate above which this "
        "length is faster than plain decoding."
    )
    gains = "".join(
        f", {times(row['speedup'])} plain decoding" for row in data["lengths"] if row["draft_tokens"] == best
    )
    section = Section(
        "Speed-up", f"Best: K={best}{gains}." if best else "No draft length is faster than plain decoding."
    )
    section.tables.append(tabulate("Speed-up by draft length", data["lengths"], columns, note))
    curve = data["costs"]["curve"]
    if curve and len(curve["rows"]) > 2:  # measured
        section.tables.append(tabulate_costs(CostCurve(**curve)))
    section.notes = [f"Assumptions: {data['assumptions']}."]
    return section


def show_break_even(rate: float | None) -> str:
    return "never" if rate is None else percent(rate)


def report_plan(data: Json) -> Section:
    hardware, (target, draft) = data["hardware"], data["models"]
    title = hardware["name"] if hardware["devices"] == 1 else f"{hardware['devices']} x {hardware['name']}"
    columns = [
        Column("batch", cell=value_of("batch")),
        Column("K", cell=lambda row: row["draft_tokens"] or "off"),
        Column("speed-up", "x", cell=value_of("speedup")),
        Column("per user, plain", cell=value_of("plain_tokens_per_second_per_user")),
        Column("per user, spec.", cell=value_of("tokens_per_second_per_user")),
        Column("total, plain", cell=value_of("plain_tokens_per_second")),
        Column("total, spec.", cell=value_of("tokens_per_second")),
        Column("memory", "B", cell=value_of("memory")),
        words("", lambda row: "" if row["fits"] else "too large"),
    ]
    note = "Columns 4 to 7: tokens/s."
    if not all(row["fits"] for row in data["loads"]):
        note += f" too large: more than 90% of the memory ({size(hardware['memory'] * hardware['devices'])})."
    section = Section("Plan", describe_users(data, title))
    section.tables.append(tabulate(f"{target['name']} + {draft['name']} on {title}", data["loads"], columns, note))
    section.notes = [f"{line}." for line in list_assumptions(data)]
    return section


def describe_users(data: Json, title: str) -> str:
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


def list_assumptions(data: Json) -> list[str]:
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


def report_pairs(place: Hardware, alpha: float | None) -> Section:
    """Report recommended pairs, with published figures and predictions. alpha: acceptance rate; None: as published."""
    from slipstream.measure.known_pairs import MODELS, PAIRS, predict_pair

    sources = [source for pair in PAIRS for source in (pair.acceptance_source, pair.speedup_source) if source]
    numbers = {source: i for i, source in enumerate(dict.fromkeys(sources), start=1)}
    columns = [words("target + draft"), Column("size"), Column("accept"), Column("speed-up"), Column("GPUs"),
               Column("c, verify"), Column("break-even"), Column("predicted")]  # fmt: skip
    rows: list[list[CellValue]] = []
    for pair in PAIRS:
        hardware, best = predict_pair(pair, place, alpha)
        gain = f"{times(best.speedup)}, K={best.draft_tokens}" if best.draft_tokens else "no speed-up"
        rows.append([
            f"{pair.target}\n+ {pair.draft}",
            "\n".join(count(MODELS[name].shape.parameters) for name in (pair.target, pair.draft)),
            show_published(pair.acceptance, "%", numbers.get(pair.acceptance_source)),
            show_published(pair.speedup, "x", numbers.get(pair.speedup_source)),
            hardware.devices,
            f"{best.costs.c:.2f}\n{best.costs.verify(best.draft_tokens or 1):.2f}",
            show_break_even(best.break_even),
            f"{gain}\n{describe_rate(best)}",
        ])  # fmt: skip
    note = (
        "accept, speed-up: as published; -: no published figure. break-even: acceptance rate. c, verify: cost of one "
        "draft token and of verifying K draft tokens, in decode steps of the target. predicted: expected tokens per "
        "step divided by the cost of a step, at the best draft length K."
    )
    section = Section(
        "Recommended pairs", describe_assumptions(place), [Table("Recommended pairs", columns, rows, note)]
    )
    section.notes = [f"[{number}] {source}." for source, number in numbers.items()]
    section.notes += [f"{pair.target} + {pair.draft}: {pair.note}." for pair in PAIRS if pair.note]
    return section


def describe_assumptions(place: Hardware) -> str:
    """Return the assumptions of all predictions in a table, in one line."""
    basis = f"costs by a roofline of {place.name}, 16-bit weights, {CONTEXT} tokens of context"
    return f"Assumptions: the acceptance rate shown, at every position; batch 1; {basis}."


def describe_rate(predicted: Forecast) -> str:
    """Write the acceptance rate of a prediction and its origin: "at 78%", "assumed 70%"."""
    shown = percent(predicted.rates.alpha)
    return f"at {shown}" if predicted.rates.origin == "published" else f"{predicted.rates.origin} {shown}"


def show_published(values: Seq[float] | None, unit: str, number: int | None = None) -> str:
    """Write published values: (.75, .8) -> "75-80%", with the number of the source on the next line."""
    return "-" if values is None else span(values, unit) + (f"\n[{number}]" if number else "")
