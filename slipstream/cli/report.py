"""`slipstream report`: turns result files into one page, or into plots for a paper."""

from __future__ import annotations

from pathlib import Path

from slipstream.cli import render
from slipstream.cli.option_groups import argument, grouped, option
from slipstream.errors import ParameterError


@grouped
def report(
    results: list[str] = argument("Result files of bench, sweep, trace, ..."),
    out: Path = option(Path("report.html"), "HTML file to write.", "--out", "-o"),
    png: Path | None = option(None, "Write the plots as PNG files to this folder instead."),
    svg: Path | None = option(None, "Write the plots as SVG files to this folder instead."),
) -> None:
    """Turn result files into one self-contained HTML page (offline, light and dark, printable), or into plots."""
    from slipstream.bench.results import read_all
    from slipstream.cli.report_page import export, write_page

    found = [result for path in results for result in read_all(path)]
    folders = [(kind, folder) for kind, folder in (("png", png), ("svg", svg)) if folder is not None]
    for kind, folder in folders:
        if folder.exists() and not folder.is_dir():
            raise ParameterError(f"--{kind} is {str(folder)!r}, which is a file", fix="name a folder")
        if folder.parent.is_dir():
            folder.mkdir(exist_ok=True)
        for path in export(found, folder, kind):
            render.line(f"wrote {path}")
    if not folders:
        write_page(found, out)
        render.line(f"wrote {out}")
