"""Report of `tune` on a running server."""

from __future__ import annotations

from typing import Any

from slipstream.bench.counters import NAMES, NOT_REPORTED, SERVERS, name_of
from slipstream.bench.results import Result
from slipstream.bench.tables import Column, Section, Table, percent, remark, times, words
from slipstream.plan.diagnosis import NOTHING, UNKNOWN


def section(result: Result) -> Section:
    arms, found = result.data["arms"], result.data["diagnosis"]
    made = Section("Does speculation pay on this server?", "Nothing was measured before the run ended.")
    if arms:
        made.lead = lead(arms, found)
        made.tables.append(loads(arms, found["forecasts"]))
        made.tables += [reported(arm["counters"], arm["load"]) for arm in arms[-1:] if arm["counters"]]
        made.notes += [remark(line) for line in found["evidence"]]
    return made


def lead(arms: list[dict[str, Any]], found: dict[str, Any]) -> str:
    if found["cause"] == UNKNOWN:
        return f"Not diagnosed: {found['reason']}. Fix: {found['fix']}."
    both = zip(arms, found["forecasts"], strict=True)
    gains = ", ".join(f"{times(f['now'])} with {arm['load']}" for arm, f in both if f)
    if found["cause"] == NOTHING:
        return f"Nothing is wrong: predicted {gains}."
    return f"Cause: {found['cause']}{f', predicted {gains}' * bool(gains)}. Fix: {found['fix']}."


def loads(arms: list[dict[str, Any]], forecasts: list[dict[str, Any] | None]) -> Table:
    columns = [words("load"), Column("tok/s"), Column("next token", "ms", 1), Column("accept", "%"),
               Column("tau", digits=2), Column("speed-up", "x"), words("best K")]  # fmt: skip
    rows = []
    for arm, f in zip(arms, forecasts, strict=True):
        speed, after = arm["tokens_per_second"], arm["next"]
        told = [arm[x] if arm[x] is not None else NOT_REPORTED for x in ("acceptance_rate", "mean_acceptance_length")]
        best = f and f"{f['best_length']} ({times(f['best'])})"
        rows.append([arm["load"], speed and speed["value"], after and after["p50"], *told, f and f["now"], best])
    return Table(
        "Loads", columns, rows,
        "accept, tau: accepted draft tokens over verified ones, and tokens of a step with a draft. speed-up: predicted "
        "over plain decoding. best K: draft length up to the present one, with its predicted speed-up; 0: none.",
    )  # fmt: skip


def reported(counters: dict[str, Any], load: str) -> Table:
    rows = []
    for quantity in NAMES:
        value, share = counters[quantity], quantity in ("accepted_at", "kv_usage")
        several = value if isinstance(value, list) else [value]
        text = ", ".join(percent(each) if share else f"{each:.0f}" for each in several if each is not None)
        rows.append([quantity.replace("_", " "), text or NOT_REPORTED, name_of(quantity, counters["server"])])
    title = f"What {SERVERS[counters['server']]} reports, {load}"
    return Table(title, [words(""), words("value"), words("its name")], rows)
