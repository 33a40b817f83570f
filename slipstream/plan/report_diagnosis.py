"""Why a setting is as fast as it is, in the report of `tune`."""

from __future__ import annotations

from typing import Any

from slipstream.bench.tables import Column, Section, Table, interval, percent, remark, times, words
from slipstream.plan.diagnosis import NOTHING

MS = 1000


def explain(made: Section, rows: list[dict[str, Any]], shown: dict[str, Any]) -> None:
    """Add why each setting is as fast as it is. rows: settings with "measured" and "diagnosis"; shown: the one whose
    parts are listed."""
    m, d = shown["measured"], shown["diagnosis"]
    made.tables += [without(rows), numbers(m, d, setting(shown)), costs(m["costs"])]
    made.notes += [reason(row) for row in rows]
    made.notes += [remark(line) for line in d["evidence"]]


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
    causes = list(dict.fromkeys(c["cause"] for row in rows for c in row["diagnosis"]["counterfactuals"]))
    cells = []
    for row in rows:
        gains = {c["cause"]: c["speedup"] for c in row["diagnosis"]["counterfactuals"]}
        cells.append([setting(row), row["diagnosis"]["predicted"], *map(gains.get, causes)])
    columns = [words("setting"), Column("as it is", "x"), *(Column(cause, "x") for cause in causes)]
    note = "Predicted from the parts measured beside plain decoding. Other columns: without that cause."
    return Table("What limits the speed-up", columns, cells, note)


def numbers(m: dict[str, Any], d: dict[str, Any], who: str) -> Table:
    step = m["costs"]["seconds"][0] + m["plain_host"]
    draft = m["draft_fixed"] + m["draft_each"] * m["draft_tokens"]
    even, best = d["break_even"], d["best_length"]
    rows = [
        ("acceptance of one draft token", percent(d["acceptance"])),
        ("break-even acceptance", "none, not even 100%" if even is None else percent(even)),
        ("draft length", str(m["draft_tokens"])),
        (
            "best draft length up to that",
            f"{best} ({times(d['best_speedup'])})" if best else "none: no length saves time",
        ),
        ("target pass of one row", f"{m['costs']['seconds'][0] * MS:.2f} ms"),
        ("drafting, per step", f"{draft * MS:.2f} ms, {draft / step:.2f} plain steps"),
        ("host, per speculative step", f"{m['step_host'] * MS:.2f} ms"),
        ("host, per plain step", f"{m['plain_host'] * MS:.2f} ms"),
        ("prefill", f"{m['prefill'] * MS:.1f} ms, plus {m['draft_prefill'] * MS:.1f} ms for the drafter"),
        ("sequences at once", str(m["batch"])),
    ]
    return Table(f"Measured: {who}", [words(""), words("value")], rows)


def costs(curve: dict[str, Any]) -> Table:
    """A `CostCurve` of the target, {"rows", "seconds"}: powers of two only."""
    rows, seconds = curve["rows"], curve["seconds"]
    shown = [i for i, n in enumerate(rows) if n & (n - 1) == 0]
    columns = [words("rows per pass"), *(Column(str(rows[i]), digits=2) for i in shown)]
    cells = [
        ["ms", *(f"{MS * seconds[i]:.1f}" for i in shown)],
        ["relative to one row", *(seconds[i] / seconds[0] for i in shown)],
    ]
    return Table("Time of a target pass by its rows", columns, cells)
