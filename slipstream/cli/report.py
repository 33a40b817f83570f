"""`slipstream report`: turns result files into one page, or into plots for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import render
from slipstream.errors import ParameterError


def report(
    results: Annotated[list[str], typer.Argument(help="Result files of bench, sweep, trace, ...")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(help="Write the plots as PNG files to this folder instead.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the plots as SVG files to this folder instead.")] = None,
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
