"""The contents of a report, independent of the renderer: `report_page` renders HTML, the command line renders text.

Each kind of result has one module with `section(result) -> Section` and one line in `SECTIONS`.
"""

from __future__ import annotations

from importlib import import_module

from slipstream.errors import ResultError, did_you_mean
from slipstream.lab.results import Result
from slipstream.lab.tables import Section

SECTIONS: dict[str, str] = {
    "bench": "slipstream.lab.report_bench",
    "bench-served": "slipstream.lab.report_load",
    "sweep": "slipstream.lab.report_sweep",
    "trace": "slipstream.lab.report_trace",
    "verify": "slipstream.lab.report_verify",
    "verify-served": "slipstream.lab.report_served",
    "doctor": "slipstream.lab.report_doctor",
    "doctor-served": "slipstream.lab.report_counters",
    "tune": "slipstream.lab.report_tune",
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
