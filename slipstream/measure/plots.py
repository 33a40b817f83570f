"""Draws plots of results as SVG, for a file, or for a page with the page's colours. One drawing serves every screen: a
plot is about as wide as a phone, and a page scales it. The colours of Okabe and Ito (2008) are distinguishable with any
colour vision; line styles and markers differ too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from io import StringIO
from typing import TYPE_CHECKING, TypeAlias

from slipstream.measure.tables import Estimate, Plot, interval
from slipstream.templates import FOLDER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, RULE, PAPER = "#1b1f24", "#57606a", "#d5d9de", "#ffffff"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
Dashes: TypeAlias = "str | tuple[int, tuple[float, ...]]"
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1)), (0, (8, 2)))
NAMES = {INK: "--ink", SOFT: "--soft", RULE: "--rule", PAPER: "--paper"}
NAMES |= {colour: f"--c{i}" for i, colour in enumerate(SERIES)}
"""Colour in a plot -> CSS variable of the page. templates/plots.mplstyle has the first four."""
LEGEND_WIDTH, LEGEND_MARK = 56, 9
"""Number of characters that fit in a row above a plot, and the width of a legend entry's mark, in characters."""


def draw_svg(plot: Plot) -> str:
    """Draw a plot as a standalone SVG document. Does not change global state of matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    out = StringIO()
    style = matplotlib.rc_params_from_file(FOLDER / "plots.mplstyle", use_default_template=False)
    with matplotlib.rc_context({**style, "svg.hashsalt": plot.name}):  # the salt makes ids deterministic
        figure = Figure(figsize=(plot.width, plot.height), layout="constrained")
        plot.draw(figure.add_subplot())
        figure.savefig(out, format="svg", transparent=False, metadata={"Date": None, "Creator": None})
    return out.getvalue()


def draw_inline(plot: Plot, key: str) -> str:
    """Draw a plot for a page: colours are CSS variables, `key` makes ids unique, the width is 100 %."""
    text = draw_svg(plot)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{key}-", text)
    for colour, name in NAMES.items():
        text = text.replace(f": {colour}", f": var({name})")
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', text, count=1)
    return text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def add_legend(axes: Axes) -> None:
    """Add a legend above the plot, if there are several series, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = max(1, LEGEND_WIDTH // (max(map(len, labels)) + LEGEND_MARK))
        axes.figure.legend(  # type: ignore[union-attr]
            handles, labels, loc="outside upper left", ncols=min(columns, len(labels)), handlelength=2.6,
            columnspacing=1.4,
        )  # fmt: skip


def style_of(series: int) -> tuple[str, str, Dashes]:
    """Return marker, colour and dashes of a series."""
    return tuple(kinds[series % len(kinds)] for kinds in (MARKERS, SERIES, DASHES))  # type: ignore[return-value]


def error_bars(estimates: Seq[Estimate]) -> list[list[float]]:
    """Return the error bars of estimates: lengths below and above the values; 0 without an interval."""
    ends = [(e.low or e.value, e.value, e.high or e.value) for e in estimates]
    return [[value - low for low, value, _ in ends], [high - value for _, value, high in ends]]


def plot_intervals(
    name: str, title: str, caption: str, rows: Seq[tuple[str, Estimate, int]], label: str = "speed-up",
    row: float = 0.48, width: float = Plot.width,
) -> Plot:  # fmt: skip
    """Plot an estimate with its interval for each row (name, estimate, series), from top to bottom; 1 is marked. row:
    height of a row in inches."""

    def draw(axes: Axes) -> None:
        for y, (_, e, series) in enumerate(rows):
            marker, colour, _ = style_of(series)
            axes.errorbar([e.value], [y], xerr=error_bars([e]), fmt=marker, color=colour, elinewidth=2.2, markersize=7)
            axes.annotate(
                f"{e.value:.2f}x", (e.value, y), xytext=(0, 7), textcoords="offset points", ha="center",
                va="bottom", color=INK, fontsize="small", bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
        axes.axvline(1, color=SOFT, linewidth=1, linestyle=(0, (3, 2)))
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], color=INK)
        axes.set_ylim(len(rows) - 0.5, -0.7)  # room for the figure above the first row
        left, right = axes.get_xlim()
        axes.set_xlim(min(0.9, left), 1.04 * max(1.1, right))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(label)

    alt = "; ".join(f"{each.replace(chr(10), ', ')}: {interval(e)}" for each, e, _ in rows)
    return Plot(name, title, caption, alt, draw, 1.0 + row * len(rows), width)


def draw_lines(
    axes: Axes, groups: Seq[tuple[str, Seq[float], Seq[float]]], x: str, y: str, percent: bool = True, few: bool = False
) -> None:
    """Draw named lines (name, xs, ys). few: True to put a tick at each value of the x axis."""
    for i, (name, xs, ys) in enumerate(groups):
        marker, colour, dashes = style_of(i)
        axes.plot(xs, ys, color=colour, marker=marker if len(xs) < 40 else None, linestyle=dashes, label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if percent:
        axes.set_ylim(0, 1.03)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    if few:
        set_ticks(axes, [value for _, xs, _ in groups for value in xs])
    add_legend(axes)


def set_ticks(axes: Axes, xs: Seq[float | str]) -> None:
    """Set a tick at each measured value, if there are at most 12."""
    values = sorted(set(xs)) if all(isinstance(x, (int, float)) for x in xs) else []
    if 1 < len(values) <= 12:
        axes.set_xticks(values, [f"{value:g}" for value in values])
