"""Report of a tune result: the choice, what limits each setting, and what was measured."""

import json
from typing import Any

from slipstream.bench.results import Result
from slipstream.bench.tables import Alarm, Column, Section, Table, interval, percent, remark, times, words
from slipstream.plan.diagnosis import NOTHING

SHOWN_POSITIONS = 4


def section(result: Result) -> Section:
    data = result.data
    report = Section(
        "Which drafter and draft length?", "The run ended before any setting was confirmed, so nothing is chosen."
    )
    if data["raced"]:
        best = max(data["raced"], key=lambda row: row["speedup"]["value"])
        report.lead = lead(data["choice"], best)
        report.tables.append(raced(data["raced"], data["choice"]))
        shown = next((row for row in data["raced"] if is_chosen(row, data["choice"])), best)
        report.tables += [without(data["raced"]), costs(shown["measured"]["costs"])]
        report.notes += [*map(reason, data["raced"]), *map(remark, shown["diagnosis"]["evidence"])]
    if data["drafters"]:
        report.tables.append(recorded(data["drafters"]))
    for name, entry in (data["configs"] or {}).items():
        own = name == "slipstream"
        report.configs.append((name, json.dumps(entry) if own else entry["text"], "" if own else entry["note"]))
    if data["choice"] and data["choice"]["break_even"] is not None:
        report.notes.append(
            f"Disable speculation if the acceptance rate falls below {percent(data['choice']['break_even'])}."
        )
    return report


def lead(choice: dict[str, Any] | None, best: dict[str, Any]) -> str:
    if choice is None:
        return (
            "Choice: none. No drafter was significantly faster than plain decoding, so use plain decoding. The best: "
            f"{reason(best)}"
        )
    return (
        f"Choice: {choice['label']}, K={choice['draft_tokens']}: {interval(choice['speedup'])} over plain decoding "
        f"measured, {times(choice['predicted'])} predicted."
    )


def is_chosen(row: dict[str, Any], choice: dict[str, Any] | None) -> bool:
    return choice is not None and all(choice[k] == row[k] for k in ("contender", "draft_tokens"))


def raced(rows: list[dict[str, Any]], choice: dict[str, Any] | None) -> Table:
    cells = []
    for row in rows:
        gain = row["speedup"]
        texts = "as plain" if row["exact"] else Alarm("DIFFERENT")
        off = f"{row['predicted'] / gain['value'] - 1:+.0%}"
        cells.append([setting(row), row["predicted"], gain, off, texts, "chosen" if is_chosen(row, choice) else ""])
    columns = [words("setting"), Column("predicted", "x"), Column("measured (95%)", "x"), Column("off by"),
               words("texts"), words("")]  # fmt: skip
    return Table("Measured against plain decoding", columns, cells)


def recorded(rows: list[dict[str, Any]]) -> Table:
    cells = []
    for row in rows:
        m, gains = row["measured"], row["predicted"]
        best = max(range(len(gains)), key=gains.__getitem__)
        rates = [percent(rate) for rate in m["position_rates"]]
        tau = row.get("mean_acceptance_length")
        gain = times(gains[best]) + ("?" if row.get("noisy") else "") + f", K={best + 1}"
        step = m["costs"]["seconds"][0] + m["plain_host"]
        cost = (m["draft_fixed"] + m["draft_each"] * m["draft_tokens"]) / step
        drafted = m["drafted"][0] if m["drafted"] else 0.0
        shown = " ".join(rates[:SHOWN_POSITIONS]) + " ..." * (len(rates) > SHOWN_POSITIONS)
        cells.append([row["label"], drafted, shown, tau, cost, gain])
    columns = [words("drafter"), Column("drafts", "%"), words("accepted by position"), Column("tau", digits=2),
               Column("cost", digits=2), Column("predicted")]  # fmt: skip
    note = (
        "drafts: share of the steps that draft. tau: tokens per step, prefill included. cost: of drafting per step, in "
        "plain steps. predicted: at the best draft length."
    )
    if any(row.get("noisy") for row in rows):
        note += " ?: rough, because timings of the same work differ."
    return Table("Measured at the longest draft", columns, cells, note)


def setting(row: dict[str, Any]) -> str:
    return f"{row['label']}, K={row['draft_tokens']}"


def reason(row: dict[str, Any]) -> str:
    """What limits a setting, and what to do about it, in sentences."""
    d = row["diagnosis"]
    who = f"{setting(row)}, {interval(row['speedup'])}"
    if d["reason"]:
        return f"{who}: not diagnosed: {d['reason']}. Fix: {d['fix']}."
    if d["cause"] == NOTHING:
        return f"{who}: nothing is wrong."
    alone = "" if d["enough"] else " No single change is enough for a speed-up; this one helps most."
    return f"{who}: {d['cause']}. Fix: {d['fix']}.{alone}"


def without(rows: list[dict[str, Any]]) -> Table:
    """The predicted speed-ups without one cause, a column each."""
    causes = list(dict.fromkeys(cause for row in rows for cause in row["diagnosis"]["counterfactuals"]))
    cells = [
        [setting(row), row["diagnosis"]["predicted"], *map(row["diagnosis"]["counterfactuals"].get, causes)]
        for row in rows
    ]
    columns = [words("setting"), Column("as it is", "x"), *(Column(cause, "x") for cause in causes)]
    note = "Predicted from the parts measured beside plain decoding. Other columns: without that cause."
    return Table("What limits the speed-up", columns, cells, note)


def costs(curve: dict[str, Any]) -> Table:
    """A `CostCurve` of the target, {"rows", "seconds"}: powers of two only."""
    rows, seconds = curve["rows"], curve["seconds"]
    shown = [i for i, n in enumerate(rows) if n & (n - 1) == 0]
    columns = [words("rows per pass"), *(Column(str(rows[i]), digits=2) for i in shown)]
    cells = [
        ["ms", *(f"{1e3 * seconds[i]:.1f}" for i in shown)],
        ["relative to one row", *(seconds[i] / seconds[0] for i in shown)],
    ]
    return Table("Time of a target pass by its rows", columns, cells)
