"""Report of `tune` on a running server."""

from __future__ import annotations

from typing import Any

from slipstream.bench.counters import NAMES, NOT_REPORTED, SERVERS, name_of
from slipstream.bench.results import Result
from slipstream.bench.tables import Section, Table, percent, remark, times, words
from slipstream.plan.diagnosis import NOTHING, UNKNOWN


def section(result: Result) -> Section:
    made = Section("Does speculation pay on this server?", "Nothing was seen before the run ended.")
    if result.data:
        counters, found = result.data["counters"], result.data["diagnosis"]
        made.lead = lead(found)
        made.tables += [reported(counters, result.settings["watch"])] if counters else []
        made.notes += [remark(line) for line in found["evidence"]]
    return made


def lead(found: dict[str, Any]) -> str:
    if found["cause"] == UNKNOWN:
        return f"Not diagnosed: {found['reason']}. Fix: {found['fix']}."
    f = found["forecast"]
    gain = f and f"predicted {times(f['now'])}"
    if found["cause"] == NOTHING:
        return f"Nothing is wrong: {gain}."
    return f"Cause: {found['cause']}{f', {gain}' if gain else ''}. Fix: {found['fix']}."


def reported(counters: dict[str, Any], seconds: float) -> Table:
    rows = []
    for quantity in (*NAMES, "acceptance_rate"):
        value, share = counters[quantity], quantity in ("accepted_at", "kv_usage", "acceptance_rate")
        several = value if isinstance(value, list) else [value]
        text = ", ".join(percent(each) if share else f"{each:.0f}" for each in several if each is not None)
        name = name_of(quantity, counters["server"]) if quantity in NAMES else "computed"
        rows.append([quantity.replace("_", " "), text or NOT_REPORTED, name])
    title = f"What {SERVERS[counters['server']]} reports, {seconds:g} s watched"
    return Table(title, [words(""), words("value"), words("its name")], rows)
