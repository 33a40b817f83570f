"""`slipstream report`: turns result files into one page, or into plots for a paper."""

from __future__ import annotations

from pathlib import Path

from slipstream.cli import render
from slipstream.cli.option_groups import argument, grouped, option
from slipstream.errors import ParameterError


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
