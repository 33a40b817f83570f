"""`slipstream report`: renders result files as one self-contained HTML page.

The page loads nothing and runs nothing: style and plots are inline. `section` decides the contents, also of the text
that commands print.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.bench import plots
from slipstream.bench.plots import Plot
from slipstream.bench.provenance import public
from slipstream.bench.results import INTERRUPTED, Result, check_writable, read_all, write_text
from slipstream.bench.tables import Alarm, Column, Section, Table, remark
from slipstream.cli import render
from slipstream.cli.option_groups import argument, grouped, option
from slipstream.errors import ResultError, did_you_mean


@grouped
def report(
    results: list[str] = argument("Result files of bench, tune, trace, verify."),
    out: Path = option(Path("report.html"), "HTML file to write.", "--out", "-o"),
) -> None:
    """Turn result files into one self-contained HTML page (offline, light and dark, printable)."""
    all_results = [result for path in results for result in read_all(path)]
    write_page(all_results, out)
    render.line(f"wrote {out}")


SECTIONS: dict[str, str] = {
    "bench": "slipstream.bench.report_bench",
    "bench-served": "slipstream.bench.load_figures",
    "trace": "slipstream.bench.report_trace",
    "verify": "slipstream.verify.report_verify",
    "verify-served": "slipstream.verify.served",
    "tune": "slipstream.plan.report_tune",
}
"""Kind of result -> module with `section(result) -> Section`."""


def section(result: Result) -> Section:
    """Raises ResultError for a kind without a report, and for a result that lacks data that its report needs."""
    if result.kind not in SECTIONS:
        raise ResultError(
            f"there is no report for a result of kind {result.kind!r}", fix=did_you_mean(result.kind, SECTIONS)
        )
    try:
        shown: Section = import_module(SECTIONS[result.kind]).section(result)
    except (KeyError, TypeError, IndexError) as fault:
        raise ResultError(
            f"the result of kind {result.kind!r} lacks data that its report needs: {fault!r}",
            why="the file is damaged, or was edited",
            fix="measure again",
        ) from fault
    return shown


TEMPLATES = Path(__file__).parent / "templates"


def write_page(results: Seq[Result], path: str | Path) -> None:
    """Raises ResultError."""
    check_writable(path, "--out")
    write_text(Path(path), page(results), "--out")


def page(results: Seq[Result]) -> str:
    sections = [section(result) for result in results]
    title = sections[0].title if len(sections) == 1 else "Slipstream: laboratory report"
    contents = ""
    if len(sections) > 1:
        links = (f'<li><a href="#s{i}">{escape(s.title)}</a></li>' for i, s in enumerate(sections))
        contents = f'<nav aria-label="Contents"><ol>{"".join(links)}</ol></nav>'
    body = "\n".join(block(i, s, r) for i, (s, r) in enumerate(zip(sections, results, strict=True)))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{(TEMPLATES / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header><p class="brand">Slipstream laboratory</p>{contents}</header>
<main>
{body}
</main>
</body>
</html>
"""


def block(number: int, section: Section, result: Result) -> str:
    level = f'<h1 id="h{number}">{escape(section.title)}</h1>'
    warned = list(result.warnings)
    if not result.complete:
        warned.insert(0, INTERRUPTED)
    warnings = "".join(f"<li>{escape(remark(w))}</li>" for w in warned)
    parts = [
        f'<section id="s{number}" aria-labelledby="h{number}">',
        level,
        f'<p class="lead{bad(section.lead)}">{escape(section.lead)}</p>',
        f'<p class="origin">{origin(result)}</p>',
        f'<aside class="warnings" aria-label="Warnings"><ul>{warnings}</ul></aside>' if warnings else "",
        section.html,
    ]
    tables = [table(each) for each in section.tables]
    figures = [figure(plot, f"s{number}p{i}", result) for i, plot in enumerate(section.plots)]
    # The first table answers the question; the others are details and follow the plots.
    parts += [*tables[:1], *figures, *tables[1:]]
    if section.notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in section.notes)}</ul>')
    parts += [details(result), "</section>"]
    return "\n".join(part for part in parts if part)


def figure(plot: Plot, key: str, result: Result) -> str:
    measured = f"{str(result.provenance.get('date', ''))[:10]}; {cpu(result.provenance)}"  # the command is at the top
    return (
        f'<figure><h2>{escape(plot.title)}</h2><div class="wide">{plots.inline(plot, key)}</div>'
        f'<div class="narrow">{plots.inline(plot, key + "n", narrow=True)}</div>'
        f'<figcaption>{escape(plot.caption)} <span class="origin">{escape(measured)}.</span>'
        f'<span class="unseen">{escape(plot.alt)}</span></figcaption></figure>'
    )


def table(shown: Table) -> str:
    heads = "".join(f'<th scope="col" class="{css(c)}">{escape(c.heading)}</th>' for c in shown.columns)
    rows = "".join(f"<tr>{row(shown.columns, cells)}</tr>" for cells in shown.rows)
    note = f'<p class="note">{escape(shown.note)}</p>' if shown.note else ""
    return (
        f'<h2>{escape(shown.title)}</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(shown.title)}"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>'
        f"</table></div>{note}"
    )


def row(columns: Seq[Column], cells: Seq[Any]) -> str:
    """The cells of a row; the first one is the row heading."""
    out = []
    for i, (column, cell) in enumerate(zip(columns, cells, strict=True)):
        tag, scope = ("td", "") if i else ("th", ' scope="row"')
        out.append(f'<{tag}{scope} class="{css(column)}{bad(cell)}">{escape(column.text(cell))}</{tag}>')
    return "".join(out)


def bad(text: Any) -> str:
    return " bad" if isinstance(text, Alarm) else ""


def css(column: Column) -> str:
    return "words" if column.words else "number"


def origin(result: Result) -> str:
    """Where the numbers come from, in one line of HTML."""
    p = result.provenance
    versions, date = p.get("versions") or {}, str(p.get("date", ""))
    parts = [
        f"<code>{escape(public(str(p.get('command') or '')))}</code>",
        f'<time datetime="{escape(date)}">{escape(date[:16].replace("T", " "))} UTC</time>',
        escape(cpu(p)),
        escape(", ".join(str(p[k]) for k in ("executor", "dtype", "quantize") if p.get(k))),
        escape(f"Slipstream {versions.get('slipstream', '')}"),
    ]
    return " · ".join(part for part in parts if part)


def cpu(provenance: dict[str, Any]) -> str:
    machine, device = provenance.get("machine") or {}, str(provenance.get("device", ""))
    if device.startswith("cuda"):
        return device
    return f"{machine.get('cpu') or 'unknown processor'}, {machine.get('cores')} cores"


def details(result: Result) -> str:
    """All settings and conditions, collapsed."""
    rows = [*flat(result.provenance), *flat(result.settings, "settings")]
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(public(value))}</dd>" for name, value in rows)
    return f"<details><summary>All settings and conditions</summary><dl>{cells}</dl></details>"


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, dict):
            out += flat(value, name)
        elif value is not None and value != [] and value != "":
            out.append((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return out
