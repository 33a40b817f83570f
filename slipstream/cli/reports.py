"""The contents of a report, independent of the renderer: `report_page` renders HTML, the command line renders text.

Each kind of result has one module with `section(result) -> Section` and one line in `SECTIONS`.
"""

from __future__ import annotations

from importlib import import_module

from slipstream.bench.results import Result
from slipstream.bench.tables import Section
from slipstream.errors import ResultError, did_you_mean

SECTIONS: dict[str, str] = {
    "bench": "slipstream.bench.report_bench",
    "bench-served": "slipstream.bench.report_load",
    "trace": "slipstream.bench.report_trace",
    "verify": "slipstream.verify.report_verify",
    "verify-served": "slipstream.verify.served",
    "tune": "slipstream.plan.report_tune",
    "tune-served": "slipstream.plan.report_counters",
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
