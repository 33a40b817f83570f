"""`slipstream report`: turns result files into one page or plots. `section` is the contents of the report of a result,
which `report_page` renders as HTML and the command line as text."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from slipstream.bench.results import Result
from slipstream.bench.tables import Section
from slipstream.cli import render
from slipstream.cli.option_groups import argument, grouped, option
from slipstream.errors import ParameterError, ResultError, did_you_mean


@grouped
def report(
    results: list[str] = argument("Result files of bench, tune, trace, verify."),
    out: Path = option(Path("report.html"), "HTML file to write.", "--out", "-o"),
    svg: Path | None = option(None, "Write the plots as SVG files to this folder instead."),
) -> None:
    """Turn result files into one self-contained HTML page (offline, light and dark, printable), or into plots."""
    from slipstream.bench.results import read_all
    from slipstream.cli.report_page import export, write_page

    found = [result for path in results for result in read_all(path)]
    if svg is None:
        write_page(found, out)
        render.line(f"wrote {out}")
        return
    if svg.exists() and not svg.is_dir():
        raise ParameterError(f"--svg is {str(svg)!r}, which is a file", fix="name a folder")
    if svg.parent.is_dir():
        svg.mkdir(exist_ok=True)
    for path in export(found, svg):
        render.line(f"wrote {path}")


SECTIONS: dict[str, str] = {
    "bench": "slipstream.bench.report_bench",
    "bench-served": "slipstream.bench.report_load",
    "trace": "slipstream.bench.report_trace",
    "verify": "slipstream.verify.report_verify",
    "verify-served": "slipstream.verify.served",
    "tune": "slipstream.plan.report_tune",
    "tune-served": "slipstream.plan.diagnosis_served",
}
"""Kind of result -> module with `section(result) -> Section`."""


def section(result: Result) -> Section:
    """Raises ResultError for a kind without a report, and for a result that lacks data that its report needs."""
    if result.kind not in SECTIONS:
        raise ResultError(
            f"there is no report for a result of kind {result.kind!r}", fix=did_you_mean(result.kind, SECTIONS)
        )
    try:
        made: Section = import_module(SECTIONS[result.kind]).section(result)
    except (KeyError, TypeError, IndexError) as fault:
        raise ResultError(
            f"the result of kind {result.kind!r} lacks data that its report needs: {fault!r}",
            why="the file is damaged, or was edited",
            fix="measure again",
        ) from fault
    return made
