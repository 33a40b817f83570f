"""`slipstream report`: one self-contained HTML page from any result files of the laboratory.

Nothing is fetched: style, script and plots are in the page. A kind of result is one module with
`section(result) -> Section` and one line in `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.errors import ResultError, did_you_mean
from slipstream.lab import plots
from slipstream.lab.plots import Plot
from slipstream.lab.results import Result, check_writable, write_text

SECTIONS: dict[str, str] = {
    "bench": "slipstream.lab.report_bench",
    "sweep": "slipstream.lab.report_sweep",
    "trace": "slipstream.lab.report_trace",
    "verify": "slipstream.lab.report_verify",
    "doctor": "slipstream.lab.report_doctor",
    "tune": "slipstream.lab.report_tune",
}
"""Kind of result -> module with `section(result) -> Section`."""

TEMPLATES = Path(__file__).parent / "templates"


@dataclass
class Table:
    """caption, heads, rows of text; left: columns set flush left (words), the others are numbers. note: below it."""

    caption: str
    heads: Seq[str]
    rows: Seq[Seq[str]]
    left: Seq[int] = (0,)
    note: str = ""


@dataclass
class Section:
    """What is said of one result. lead: the finding in a sentence or two, text; notes: remarks, text. html: a part that
    is neither table nor plot, shown first; script: what it needs, shown once a page."""

    title: str
    lead: str
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    html: str = ""
    script: str = ""


def section(result: Result) -> Section:
    """Raises ResultError for a kind of which no page is known."""
    if result.kind not in SECTIONS:
        raise ResultError(
            f"no page can be made of a result of {result.kind!r}", fix=did_you_mean(result.kind, SECTIONS)
        )
    render: Callable[[Result], Section] = import_module(SECTIONS[result.kind]).section
    try:
        return render(result)
    except (KeyError, TypeError, IndexError) as fault:
        raise ResultError(
            f"the result of {result.kind!r} lacks what a page of it shows: {fault!r}",
            why="the file is damaged, or was edited",
            fix="measure again",
        ) from fault


def write_page(results: Seq[Result], path: str | Path) -> None:
    """Raises ResultError."""
    check_writable(path)
    write_text(Path(path), page(results))


def export(results: Seq[Result], folder: str | Path, kind: str) -> list[Path]:
    """Every plot as a file of its own, for papers. kind: "png" (300 dots to the inch) or "svg". Returns the files."""
    folder, written = Path(folder), list[Path]()
    for i, result in enumerate(results):
        for plot in section(result).plots:
            prefix = f"{i + 1}-" if len(results) > 1 else ""
            path = folder / f"{prefix}{plot.name}.{kind}"
            if not written:
                check_writable(path)
            write_text(path, plots.png(plot) if kind == "png" else plots.svg(plot))
            written.append(path)
    return written


def page(results: Seq[Result]) -> str:
    """The page as text."""
    sections = [section(result) for result in results]
    title = sections[0].title if len(sections) == 1 else "Slipstream: laboratory report"
    contents = ""
    if len(sections) > 1:
        links = (f'<li><a href="#s{i}">{escape(s.title)}</a></li>' for i, s in enumerate(sections))
        contents = f'<nav aria-label="Contents"><ol>{"".join(links)}</ol></nav>'
    body = "\n".join(block(i, s, r) for i, (s, r) in enumerate(zip(sections, results, strict=True)))
    scripts = "\n".join(
        f"<script>\n{script}\n</script>" for script in dict.fromkeys(s.script for s in sections) if script
    )
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
{scripts}
</body>
</html>
"""


def block(number: int, made: Section, result: Result) -> str:
    """One section."""
    level = f'<h1 id="h{number}">{escape(made.title)}</h1>'
    warned = list(result.warnings)
    if not result.complete:
        warned.insert(0, "the run was interrupted: this is what was measured until then")
    warnings = "".join(f"<li>{escape(sentence(w))}</li>" for w in warned)
    parts = [
        f'<section id="s{number}" aria-labelledby="h{number}">',
        level,
        f'<p class="lead">{escape(made.lead)}</p>',
        f'<p class="origin">{origin(result)}</p>',
        f'<aside class="warnings" aria-label="Warnings"><ul>{warnings}</ul></aside>' if warnings else "",
        made.html,
    ]
    tables = [table(each) for each in made.tables]
    figures = [figure(plot, f"s{number}p{i}", result) for i, plot in enumerate(made.plots)]
    # The first table answers the question; the others are details and follow the plots.
    parts += [*tables[:1], *figures, *tables[1:]]
    if made.notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in made.notes)}</ul>')
    parts += [details(result), "</section>"]
    return "\n".join(part for part in parts if part)


def figure(plot: Plot, key: str, result: Result) -> str:
    source = result.provenance
    made_by = f"{source.get('command') or 'slipstream'}; {str(source.get('date', ''))[:10]}; {cpu(source)}"
    return (
        f'<figure><h2>{escape(plot.title)}</h2><div class="wide">{plots.inline(plot, key)}</div>'
        f'<div class="narrow">{plots.inline(plot, key + "n", narrow=True)}</div>'
        f'<figcaption>{escape(plot.caption)} <span class="origin">{escape(made_by)}.</span>'
        f'<span class="unseen">{escape(plot.alt)}</span></figcaption></figure>'
    )


def table(made: Table) -> str:
    css = ["words" if i in made.left else "number" for i in range(len(made.heads))]
    heads = "".join(f'<th scope="col" class="{c}">{escape(h)}</th>' for h, c in zip(made.heads, css, strict=True))
    rows = []
    for row in made.rows:
        first, *rest = (escape(cell) for cell in row)
        cells = "".join(f'<td class="{c}">{cell}</td>' for cell, c in zip(rest, css[1:], strict=True))
        rows.append(f'<tr><th scope="row" class="{css[0]}">{first}</th>{cells}</tr>')
    note = f'<p class="note">{escape(made.note)}</p>' if made.note else ""
    return (
        f'<h2>{escape(made.caption)}</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(made.caption)}"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
        f"</table></div>{note}"
    )


def origin(result: Result) -> str:
    """Where the numbers come from, in one line of HTML."""
    p = result.provenance
    versions, date = p.get("versions") or {}, str(p.get("date", ""))
    parts = [
        f"<code>{escape(str(p.get('command') or ''))}</code>",
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
    """Everything else about the conditions, folded away."""
    rows = [*flat(result.provenance), *flat(result.settings, "settings")]
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f"<details><summary>All settings and conditions</summary><dl>{cells}</dl></details>"


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as lines of name and value."""
    out: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, dict):
            out += flat(value, name)
        elif value is not None and value != [] and value != "":
            out.append((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return out


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def times(factor: float) -> str:
    return f"{factor:.2f}×"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
