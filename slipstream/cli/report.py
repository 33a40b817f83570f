"""`slipstream report`: renders result files as one self-contained HTML page.

The page loads nothing and runs nothing: style and plots are inline. `make_section` decides the contents of the page
and of the text that commands print; `slipstream/templates/page.html` is the template.
"""

from collections.abc import Sequence as Seq
from importlib import import_module
from pathlib import Path

from slipstream.cli import render
from slipstream.cli.option_groups import argument, expand_groups, option
from slipstream.core.strict import JsonObject
from slipstream.errors import ResultError, did_you_mean, reading
from slipstream.measure import plots
from slipstream.measure.provenance import public
from slipstream.measure.results import INTERRUPTED, Result, check_writable, read_all, write_text
from slipstream.measure.tables import Alarm, Section, remark
from slipstream.templates import fill


@expand_groups
def report(
    results: list[str] = argument("Result files that bench, tune, trace or verify wrote with --out."),
    out: Path = option(Path("report.html"), "HTML file to write.", "--out"),
) -> None:
    """Turn result files into one self-contained HTML page."""
    write_page([result for path in results for result in read_all(path)], out)
    render.line(f"wrote {out}")


SECTIONS: dict[str, str] = {
    "bench": "slipstream.measure.report_bench",
    "bench-served": "slipstream.measure.traffic_figures",
    "trace": "slipstream.measure.report_trace",
    "verify": "slipstream.verify.report_verify",
    "verify-served": "slipstream.verify.served",
    "tune": "slipstream.measure.report_tune",
    "tune-served": "slipstream.measure.diagnosis_served",
}
"""Kind of result -> module with `make_section(result) -> Section`."""


def make_section(result: Result) -> Section:
    """Make the report of a result. Raises ResultError for a kind without a report, and if data for it is missing."""
    if result.kind not in SECTIONS:
        raise ResultError(
            f"there is no report for results of the kind {result.kind!r}",
            fix=did_you_mean(result.kind, SECTIONS),
        )
    with reading(f"the result of kind {result.kind!r} lacks data that its report needs", "measure again", ResultError):
        shown: Section = import_module(SECTIONS[result.kind]).make_section(result)
    return shown


def write_page(results: Seq[Result], path: str | Path) -> None:
    """Write the page of these results. Raises ResultError."""
    check_writable(path, "--out")
    with reading("no report can be made of these results", "measure again", ResultError):
        text = make_page(results)
    write_text(Path(path), text, "--out")


def make_page(results: Seq[Result]) -> str:
    return fill(
        "page.html", parts=list(map(make_part, results)), draw=plots.draw_inline, Alarm=Alarm, isinstance=isinstance,
    )  # fmt: skip


def make_part(result: Result) -> JsonObject:
    """Prepare one result for the template: its section, and where the numbers come from."""
    provenance = result.provenance
    device, machine = str(provenance.get("device", "")), provenance.get("machine") or {}
    processor = f"{machine.get('cpu') or 'unknown processor'}, {machine.get('cores')} cores"
    processor = device if device.startswith("cuda") else processor
    settings = ", ".join(str(provenance[name]) for name in ("executor", "dtype", "quantize") if provenance.get(name))
    version = f"Slipstream {(provenance.get('versions') or {}).get('slipstream', '')}"
    return {
        "section": make_section(result),
        "command": public(str(provenance.get("command") or "")),
        "date": str(provenance.get("date", "")),
        "processor": processor,
        "origin": [text for text in (processor, settings, version) if text],
        "warnings": list(map(remark, [*([] if result.complete else [INTERRUPTED]), *result.warnings])),
        "conditions": [*flatten(provenance), *flatten(result.settings, "settings")],
    }


def flatten(values: JsonObject, prefix: str = "") -> list[tuple[str, str]]:
    """Return (path, text) of all values in nested mappings."""
    out: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, dict):
            out += flatten(value, name)
        elif value is not None and value != [] and value != "":
            out.append((name, public(", ".join(map(str, value)) if isinstance(value, list) else str(value))))
    return out
