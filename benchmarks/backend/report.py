"""The results of a finished session: a JSON document, and tables created from it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.backend.lineup import (
    CONTENDERS,
    FIGURES,
    FIRST_USES,
    GROUPS,
    REFERENCES,
    Figure,
    FirstUse,
    figure_label,
    first_use_label,
    pass_label,
)
from benchmarks.figures import spread
from benchmarks.markdown import beside, bound, document, noise, rows, versions
from slipstream.bench.estimates import ratio
from slipstream.bench.tables import ends

SCHEMA = 1
ORDER = ("missed", "not measured", "reached")

Series = dict[str, dict[str, dict[str, list[float]]]]


def judge(figure: Figure, series: Series, skipped: dict[str, str]) -> dict[str, Any]:
    """The row of one ratio, with its 95 % interval over rounds."""
    row: dict[str, Any] = {"figure": figure_label(figure), "reach": figure.reach, "unit": "x"}
    seconds = []
    for name in (figure.top, figure.bottom):
        timed = series.get(figure.group, {}).get(name, {}).get(str(figure.rows))
        if not timed:
            why = "not available, see below" if f"{figure.group} {name}" in skipped else "not part of this run"
            return {**row, "verdict": "not measured", "reason": f"{CONTENDERS[name].label}: {why}"}
        seconds.append(timed)
    estimate = ratio(*seconds)
    return {**row, **vars(estimate), "verdict": "reached" if estimate.value <= figure.reach else "missed"}


def judge_first_use(figure: FirstUse, uses: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
    """The row of one first use: the median over processes, with their range."""
    row: dict[str, Any] = {"figure": first_use_label(figure), "reach": figure.reach, "unit": "s"}
    seconds = [use["seconds"] for use in uses if use["cached"] == figure.cached]
    if not seconds:
        return {**row, "verdict": "not measured", "reason": reason or "not part of this run"}
    value = float(np.median(seconds))
    verdict = "reached" if value <= figure.reach else "missed"
    return {**row, "value": value, "low": min(seconds), "high": max(seconds), "verdict": verdict}


def deviation(logits: list[float], reference: list[float]) -> float:
    """Root mean square of the difference over that of the reference: near 1 or above for another model."""
    computed, exact = np.asarray(logits), np.asarray(reference)
    return float(np.sqrt(np.square(computed - exact).mean() / np.square(exact).mean()))


def reference(names: Iterable[str]) -> str | None:
    """The reference contender for times and logits."""
    names = list(names)
    return next((name for name in REFERENCES if name in names), names[0] if names else None)


def times(series: Series, logits: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """A row for each group, contender and pass that was timed."""
    rows = []
    for group, contenders in series.items():
        base = reference(contenders)
        for name, passes in contenders.items():
            for count, seconds in passes.items():
                row: dict[str, Any] = {"group": group, "contender": name, "rows": int(count), "rounds": len(seconds)}
                row["seconds"] = spread(seconds)
                base_times = contenders[base].get(count) if base else None
                if base_times and name != base:
                    row["ratio"] = {"to": base, **vars(ratio(seconds, base_times))}
                if base and name != base and base in logits.get(group, {}) and name in logits.get(group, {}):
                    row["deviation"] = deviation(logits[group][name], logits[group][base])
                rows.append(row)
    return sorted(rows, key=lambda row: (list(GROUPS).index(row["group"]), row["rows"]))


def assemble(
    series: Series,
    logits: dict[str, dict[str, list[float]]],
    skipped: dict[str, str],
    first_uses: dict[str, list[dict[str, Any]]],
    notes: dict[str, str],
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """The results as plain JSON values."""
    figures = [judge(figure, series, skipped) for figure in FIGURES]
    reason = skipped.get("first_use now")
    figures += [judge_first_use(figure, first_uses.get("now", []), reason) for figure in FIRST_USES]
    return {
        "schema": SCHEMA,
        "provenance": provenance,
        "figures": figures,
        "times": times(series, logits),
        "first_uses": first_uses,
        "skipped": skipped,
        "notes": notes,
        "seconds": series,
    }


# --- tables ---------------------------------------------------------------------------------------------------------


def markdown(results: dict[str, Any]) -> str:
    """The tables for people."""
    return document(results, [noise, figure_table, time_tables, first_use_table, skipped_list, origin])


def figure_table(results: dict[str, Any]) -> list[str]:
    """The table of figures; missed ones come first."""
    body = []
    for row in sorted(results["figures"], key=lambda row: ORDER.index(row["verdict"])):
        unit = row["unit"] if row["unit"] == "x" else f" {row['unit']}"
        measured, verdict = row.get("reason", ""), row["verdict"]
        if "value" in row:
            show = partial(beside, bar=row["reach"], unit=unit)
            measured = f"{show(row['value'])} ({ends(row, show, ' to ')})"
        if verdict == "missed":
            verdict = "**missed**"
        body.append([row["figure"], f"at most {bound(row['reach'], unit=unit)}", measured, verdict])
    return [rows(["figure", "must reach", "measured (95 % interval)", "verdict"], body, (0, 3))]


def time_tables(results: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for group in dict.fromkeys(row["group"] for row in results["times"]):
        base = reference(results["seconds"][group])
        against = CONTENDERS[base].label if base else "-"
        heads = ["pass", "contender", "ms, median (quartiles)", f"time / that of {against}", "logits off by"]
        body = []
        for row in results["times"]:
            if row["group"] != group:
                continue
            ms = [f"{1e3 * row['seconds'][part]:.3g}" for part in ("median", "q1", "q3")]
            estimate = row.get("ratio")
            ratio_text = f"{estimate['value']:.2f} ({ends(estimate, '{:.2f}'.format, ' to ')})" if estimate else "-"
            off = "-" if "deviation" not in row else f"{100 * row['deviation']:.2g} %"
            who = CONTENDERS[row["contender"]].label
            body.append([pass_label(row["rows"]), who, f"{ms[0]} ({ms[1]} to {ms[2]})", ratio_text, off])
        lines += [*([""] if lines else []), f"**{GROUPS[group].label}**", "", rows(heads, body, (0, 1))]
    return lines


def first_use_table(results: dict[str, Any]) -> list[str]:
    labels = {"now": "this checkout", "before": "before"}
    body = []
    for worker, uses in results["first_uses"].items():
        for cached in (False, True):
            seconds = [use["seconds"] for use in uses if use["cached"] == cached]
            if seconds:
                where = "on disk" if cached else "empty cache"
                values = f"{np.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
                body.append([labels.get(worker, worker), where, values, len(seconds)])
    heads = ["first use of the native backend", "compiled kernels", "s, median (range)", "processes"]
    return [rows(heads, body, (0, 1))] if body else []


def skipped_list(results: dict[str, Any]) -> list[str]:
    if not results["skipped"]:
        return []
    lines = ["Not measured:", ""]
    for name, reason in results["skipped"].items():
        group, contender = name.split(" ", 1)
        who = CONTENDERS[contender].label if contender in CONTENDERS else contender
        where = GROUPS[group].label if group in GROUPS else group.replace("_", " ")
        lines.append(f"- {where}, {who}: {reason}")
    return lines


def origin(results: dict[str, Any]) -> list[str]:
    source, machine = results["provenance"], results["provenance"]["machine"]
    rounds = [row["rounds"] for row in results["times"]]
    span = f"{min(rounds)} to {max(rounds)} rounds" if rounds else "no rounds"
    return [
        f"{source['date']}, commit {source['commit']}, before: {source['before']}; {machine['cpu']} "
        f"({', '.join(machine['vector'])}), {machine['cores']} cores, {source['threads']} threads, {span}. "
        f"{versions(source)}",
        "",
        f"    {source['command']}",
    ]
