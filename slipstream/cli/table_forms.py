"""Render tables for a terminal; print results."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from slipstream.cli.render import BAD, err, out
from slipstream.measure.tables import Alarm, Column, Section, Table, words

if TYPE_CHECKING:
    from slipstream.llm import Completion
    from slipstream.tokens.tokenizer import Tokenizer

LABEL, NARROWEST = 12, 7
"""Minimum widths in characters: labels are folded at `LABEL` or more, headings at `NARROWEST` or more."""


def render_terminal(table: Table) -> RichTable:
    """Render a table for a terminal: headings are wrapped to the width of their cells, and wide text is folded. A table
    without a title stands between blank lines."""
    texts = table.texts()
    widths = [NARROWEST if i else LABEL for i in range(len(table.columns))]
    heads = [fit_heading(c.heading, [row[i] for row in texts], widths[i]) for i, c in enumerate(table.columns)]
    out = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    out.show_edge = not table.title
    for i, (head, column) in enumerate(zip(heads, table.columns, strict=True)):
        if column.words:
            widest = max((len(line) for row in texts for line in row[i].splitlines()), default=0)
            out.add_column(head, overflow="fold", min_width=None if i else min(LABEL, widest))
        else:
            out.add_column(head, justify="right", no_wrap=True)
    for row, cells in zip(texts, table.rows, strict=True):
        out.add_row(*(Text(t, BAD if isinstance(c, Alarm) else "") for t, c in zip(row, cells, strict=True)))
    return out


def fit_heading(heading: str, cells: Seq[str], narrowest: int) -> str:
    """Wrap a heading to the width of the widest cell or word."""
    widths = [len(line) for text in (*heading.split(), *cells) for line in text.splitlines()]
    return "\n".join(textwrap.wrap(heading, max([narrowest, *widths]), break_on_hyphens=False))


def print_table(table: Table) -> None:
    """Print a table with title and note. If it is wider than the terminal, print a table for each setting, and columns
    that do not fit in a further table below."""
    console = out()
    for part in [table] if fits(table, console) else table.divide("setting"):
        console.print(f"\n{part.title}\n", style="bold")
        for i, rows in enumerate(stack(part, console)):
            if i:
                console.print()
            console.print(render_terminal(rows))
        if part.note:
            console.print(f"\n{part.note}", style="dim")


def fits(table: Table, console: Console) -> bool:
    return console.measure(render_terminal(table), options=console.options.update(width=1000)).maximum <= console.width


def stack(table: Table, console: Console) -> list[Table]:
    """Split a table by columns into parts that fit the terminal. Each part repeats the leading columns of text, or the
    first column, and has at least one further column."""
    first = max(1, next((i for i, column in enumerate(table.columns) if not column.words), len(table.columns)))
    parts: list[list[int]] = [[]]
    for i in range(first, len(table.columns)):
        if parts[-1] and not fits(table.of([*range(first), *parts[-1], i]), console):
            parts.append([])
        parts[-1].append(i)
    return [table.of([*range(first), *part]) for part in parts]


def print_section(part: Section) -> None:
    """Print a result: its tables, then its main finding, notes, and configurations."""
    console = out()
    for each in part.tables:
        print_table(each)
    console.print(Text(f"\n{part.lead}", BAD if isinstance(part.lead, Alarm) else "bold"))
    for note in part.notes:
        console.print(f"- {note}")
    for i, (name, text, note) in enumerate(part.configs):
        console.print("\n" * (not i) + f"{name}: {text or note}", soft_wrap=True)
        if text and note:
            console.print(f"  ({note})", style="dim")


def print_logprobs(completion: Completion, tokenizer: Tokenizer | None) -> None:
    """Print each output token with its log-probability in the target's distribution."""
    from slipstream.tokens.text import token_text_of

    assert tokenizer is not None
    show = token_text_of(tokenizer)
    rows = [
        [repr(show(token.id)), "draft" if drafted else "target", token.logprob,
         ", ".join(f"{show(i)!r} {value:.2f}" for i, value in token.top if i != token.id)]
        for token, drafted in zip(completion.logprobs or (), completion.drafted, strict=False)
    ]  # fmt: skip
    columns = [words("token"), words("from"), Column("logprob", digits=3), words("alternatives")]
    err().print(render_terminal(Table("", columns, rows)))
