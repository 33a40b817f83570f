"""Shared by the commands that measure: check output files, handle Ctrl-C, print and store the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli import render

if TYPE_CHECKING:
    from slipstream.lab.results import Result


def writable(*paths: Path | None) -> None:
    """Raise ResultError unless all output files can be written. Called before the measurement."""
    from slipstream.lab.results import check_writable

    for path in paths:
        if path is not None:
            check_writable(path)


def unfinished(measure: Callable[[], Result]) -> tuple[Result, int]:
    """The result and exit code 0; after Ctrl-C the partial result and 130. Other errors are passed on."""
    try:
        return measure(), 0
    except KeyboardInterrupt as stop:
        result = getattr(stop, "result", None)
        if result is None:
            raise
        return result, 130


def finish(
    result: Result,
    out: Path | None,
    as_json: bool,
    page: Path | None = None,
    show: Callable[[Result], None] | None = None,
) -> None:
    """Print the result and its warnings, name the file it was written to, and write a page if `page` is given.

    show  prints the result for people; None: print the tables and the finding of `reports.section`.
    """
    from slipstream.lab.reports import section
    from slipstream.lab.results import INTERRUPTED

    if as_json:
        print(json.dumps(result.as_dict(), ensure_ascii=False))
    elif show is not None:
        show(result)
    else:
        render.section(section(result))
    for warning in result.warnings:
        render.message("warning", warning)
    if not result.complete:
        render.message("warning", INTERRUPTED)
    if out is not None:
        render.line(f"wrote {out}; `slipstream report {out}` turns it into a page")
    if page is not None:
        from slipstream.lab.report_page import write_page

        write_page([result], page)
        render.line(f"wrote {page}")
