"""Renders the results as Markdown. Missed figures come first."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import document, noise
from benchmarks.markdown_tables import render_markdown as table, render_markdown_rows as table_rows
from benchmarks.serve.figures import Row
from slipstream.measure.measurements import TrafficData
from slipstream.measure.results import Result
from slipstream.measure.tables import Estimate, ends
from slipstream.measure.traffic_figures import tabulate_latencies, tabulate_throughput

ORDER = ("missed", "not measured", "reached")


def markdown(results: dict[str, Any], rows: list[Row]) -> str:
    """Return the complete page."""
    return document(results, [lambda _: figures(rows), *(_group(name) for name in results["runs"]), _notes])


def figures(rows: list[Row]) -> list[str]:
    body = []
    for row in sorted(rows, key=lambda row: ORDER.index(row.verdict)):
        verdict = f"**{row.verdict}**" if row.verdict == "missed" else row.verdict
        if row.value is None:
            body.append([row.figure, row.must, "", "", verdict, row.reason])
        else:
            interval = ends(Estimate(row.value, row.low, row.high), row.show, " to ")
            body.append([row.figure, row.must, row.show(row.value), interval, verdict, row.detail])
    heads = ["figure", "must reach", "measured", "95 % interval", "", ""]
    return [table_rows(heads, body, range(len(heads)))]


def _group(name: str) -> Any:
    def part(results: dict[str, Any]) -> list[str]:
        result = Result(**{key: results["runs"][name][key] for key in FIELDS})
        source = result.provenance
        share = source.get("neighbours")
        machine = source["machine"]
        lines = [f"## {name}", "", *noise({"provenance": source}), ""]
        arms = result.read_data(TrafficData).arms
        for section in (tabulate_throughput(arms), tabulate_latencies(arms)):
            lines += [f"{section.title}. {section.note}", "", table(section), ""]
        other = "" if share is None else f"; {100 * share:.0f} % of the machine's time went to other work"
        lines.append(
            f"{source['date']}, commit {source['commit']}; {machine['cpu']}, {machine['cores']} cores; "
            f"{min(arm.rounds for arm in arms)} passes{other}."
        )
        return lines

    return part


FIELDS = ("kind", "settings", "provenance", "data", "warnings", "complete")


def _notes(results: dict[str, Any]) -> list[str]:
    lines = [f"- {name}: not measured: {why}" for name, why in results["skipped"].items()]
    commands = dict.fromkeys(run["provenance"]["command"] for run in results["runs"].values())
    return [*lines, "", *(f"    {command}" for command in commands)]
