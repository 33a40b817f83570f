"""Reports as data: tables, plots, remarks. `slipstream.cli.table_forms` renders them as text for a terminal,
`slipstream.cli.report` as HTML.

Cells hold values in basic units (shares, seconds, bytes). The unit of the column decides how they are formatted, so all
renderers write the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.core.strict import JsonObject
from slipstream.errors import sentence
from slipstream.templates.sizes import size as size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CellValue: TypeAlias = "str | float | Estimate | None"
MakeCell: TypeAlias = Callable[[Any], CellValue]
"""Function that makes a cell from the object of its row."""
NOTHING = "-"
"""The text of a cell that is None."""


class Alarm(str):
    """Text that reports a fault; renderers highlight it."""


@dataclass(frozen=True)
class Column:
    """name     heading.
    unit     "%" (cells are shares), "x" (factors), "ms" (cells are seconds), "B" (bytes), "g" (significant
             digits), or "" for plain numbers.
    digits   digits after the point for "ms" and plain numbers; significant digits for "g".
    words    cells are text and aligned left; numbers are aligned right.
    cell     makes the cell for the object of a row (see `tabulate`).
    """

    name: str
    unit: str = ""
    digits: int = 0
    words: bool = False
    cell: MakeCell = field(default=lambda row: row, repr=False)

    @property
    def heading(self) -> str:
        return f"{self.name}, ms" if self.unit == "ms" else self.name

    def text(self, cell: CellValue) -> str:
        """Write a cell as text. An `Estimate` is followed by its interval; text stays as it is."""
        if cell is None:
            return NOTHING
        if isinstance(cell, str):
            return cell
        if isinstance(cell, Estimate):
            return interval(cell) if self.unit == "x" else f"{self.text(cell.value)} ({ends(cell, self.text)})"
        return FORMATS[self.unit](cell, self.digits)


def words(name: str, cell: MakeCell = lambda row: row) -> Column:
    """Make a column of text."""
    return Column(name, words=True, cell=cell)


@dataclass(frozen=True)
class Table:
    """A table of a report. rows: one cell per column. note: explains the columns."""

    title: str
    columns: Seq[Column]
    rows: Seq[Seq[CellValue]]
    note: str = ""

    def texts(self) -> list[list[str]]:
        return [[column.text(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]

    def of(self, columns: Seq[int]) -> Table:
        """Return the table with only these columns, given by index."""
        return replace(
            self, columns=[self.columns[i] for i in columns], rows=[[row[i] for i in columns] for row in self.rows]
        )

    def divide(self, heading: str) -> list[Table]:
        """Return a table for each value of the column `heading`: the value moves from the rows to the title, and the
        last table has the note. Returns [this table] if there is no such column."""
        headings = [column.heading for column in self.columns]
        if heading not in headings or not self.rows:
            return [self]
        at = headings.index(heading)
        texts = [text[at] for text in self.texts()]
        rest, parts = [i for i in range(len(headings)) if i != at], []
        for value in dict.fromkeys(texts):
            rows = [row for row, text in zip(self.rows, texts, strict=True) if text == value]
            title = f"{self.title}, {', '.join(value.splitlines())}"
            parts.append(replace(self, title=title, rows=rows, note="").of(rest))
        parts[-1] = replace(parts[-1], note=self.note)
        return parts


@dataclass(frozen=True)
class Plot:
    """name: name of the exported file. title, caption: text next to the plot. alt: a text alternative with the values.
    draw: draws the plot. height, width: in inches; at the default width, text is readable on a phone and on paper."""

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[Axes], None]
    height: float = 2.7
    width: float = 3.9


@dataclass
class Section:
    """The report of one result.

    lead     the finding in a sentence or two.
    tables   the first table answers the question, further tables have details.
    notes    remarks, a sentence each.
    configs  (program, configuration, note) for each program that can use the finding; configuration or note may be "".
    trace    a generated text with facts about each token; only pages show it, before everything else.
    """

    title: str
    lead: str
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    configs: list[tuple[str, str, str]] = field(default_factory=list)
    trace: JsonObject | None = None


def tabulate(title: str, things: Iterable[object], columns: Seq[Column], note: str = "") -> Table:
    """Make a table with a row for each thing; `Column.cell` makes the cells."""
    return Table(title, columns, [[column.cell(thing) for column in columns] for thing in things], note)


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval. Without an interval, low and high are None and `note` says why."""

    value: float
    low: float | None
    high: float | None
    note: str = ""

    def inverse(self) -> Estimate:
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        return replace(self, value=1 / self.value, low=low, high=high)


def percent(share: float | None) -> str:
    """Write a share: 0.734 -> "73%"."""
    return NOTHING if share is None else f"{100 * share:.0f}%"


def times(factor: float) -> str:
    """Write a factor: 1.613 -> "1.61x", 11.58 -> "11.6x"."""
    return f"{_factor(factor)}x"


def interval(e: Estimate) -> str:
    """Write a factor with its 95 % interval, "1.61x (1.42-1.80)", or why it has none, "1.61x (few passes)"."""
    return f"{times(e.value)} ({ends(e, _factor)})"


def ends(e: Estimate, written: Callable[[float], str], between: str = "-") -> str:
    """Write the ends of a 95 % interval, or the reason why there is none. written: writes one end."""
    return e.note if e.low is None or e.high is None else f"{written(e.low)}{between}{written(e.high)}"


def _factor(factor: float) -> str:
    return f"{factor:.2f}" if factor < 10 else f"{factor:.1f}"


def count(n: float) -> str:
    """Write a large number: 14162304 -> "14.2M"."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= limit:
            return f"{n / limit:.1f}{unit}" if n < 100 * limit else f"{n / limit:.0f}{unit}"
    return f"{n:.0f}"


def spell(n: int, noun: str) -> str:
    """Write a number of things: (1, "prompt") -> "1 prompt"; (1200, "prompt") -> "1,200 prompts"."""
    return f"{n:,} {noun}" + "s" * (n != 1)


def span(values: Seq[float], unit: str) -> str:
    """Write a range: (.75, .8), "%" -> "75-80%"; two equal ends are written once."""
    shown = [f"{100 * v:.0f}" if unit == "%" else f"{v:g}" for v in values]
    return (shown[0] if values[0] == values[1] else "-".join(shown)) + unit


def small(value: float | None) -> str:
    """Write a number with three significant digits. None stands for infinity, which JSON does not have."""
    return "inf" if value is None else f"{value:.3g}"


def remark(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    return sentence(text[:1].upper() + text[1:])


FORMATS: Mapping[str, Callable[[float, int], str]] = {
    "%": lambda value, digits: percent(value),
    "x": lambda value, digits: times(value),
    "ms": lambda value, digits: f"{1e3 * value:.{digits}f}",
    "B": lambda value, digits: size(value),
    "g": lambda value, digits: f"{value:.{digits}g}",
    "": lambda value, digits: f"{value:.{digits}f}",
}
