"""What the commands that measure do alike: check where they may write, survive Ctrl-C, show and keep the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli import render

if TYPE_CHECKING:
    from slipstream.lab.results import Result


def writable(*paths: Path | None) -> None:
    """Raise ResultError, before anything is measured, unless every file that was named can be written."""
    from slipstream.lab.results import check_writable

    for path in paths:
        if path is not None:
            check_writable(path)


def unfinished(measure: Callable[[], Result]) -> tuple[Result, int]:
    """The result and an exit code: after Ctrl-C what there is so far, and 130. Other errors say so and go on up."""
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
    """Print what was measured and what to know about it, say where it is kept, and write its page if one was asked for.

    show  prints it for people; None: the tables and the finding that `reports.section` makes of it.
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
        render.line(f"wrote {out}; `slipstream report {out}` makes a page of it")
    if page is not None:
        from slipstream.lab.report_page import write_page

        write_page([result], page)
        render.line(f"wrote {page}")
