"""Plots of results, as inline SVG in the colours of a page or as exported files. A page has a wide and a narrow version
of each, for phones. Colours are those of Okabe and Ito (2008), distinguishable with any colour vision; line styles and
markers differ too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, RULE, PAPER = "#1b1f24", "#57606a", "#d5d9de", "#ffffff"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1)), (0, (8, 2)))
NAMES = {INK: "--ink", SOFT: "--soft", RULE: "--rule", PAPER: "--paper"}
NAMES |= {colour: f"--c{i}" for i, colour in enumerate(SERIES)}
"""Colour in a plot -> CSS variable of the page."""
WIDE, NARROW = 7.4, 3.6
"""Inches."""


@dataclass(frozen=True)
class Plot:
    """name: name of the exported file. title, caption: text next to the plot. alt: a text alternative with the values.
    draw: (axes, narrow) -> None, draws the plot. height: in inches."""

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[Axes, bool], None]
    height: float = 3.2


def svg(plot: Plot, narrow: bool = False) -> str:
    """A standalone SVG document. Does not change global state of matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    out = StringIO()
    with matplotlib.rc_context(_style(plot.name)):
        figure = Figure(figsize=(NARROW if narrow else WIDE, plot.height), layout="constrained")
        plot.draw(figure.add_subplot(), narrow)
        figure.savefig(out, format="svg", transparent=False, metadata={"Date": None, "Creator": None})
    return out.getvalue()


def inline(plot: Plot, key: str, narrow: bool = False) -> str:
    """The SVG for a page: colours are CSS variables, `key` makes ids unique, the width is 100 %."""
    text = svg(plot, narrow)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{key}-", text)
    for colour, name in NAMES.items():
        text = text.replace(f": {colour}", f": var({name})")
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', text)
    if size:
        text = text.replace(size.group(0), 'width="100%"', 1)
    return text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def _style(name: str) -> Any:
    return {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": name,  # deterministic ids
        "font.family": "sans-serif",
        "font.sans-serif": ["Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"],
        "font.size": 9.5,
        "axes.titlesize": 10,
        "axes.labelcolor": SOFT,
        "axes.edgecolor": RULE,
        "axes.facecolor": PAPER,
        "figure.facecolor": PAPER,
        "text.color": INK,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "grid.color": RULE,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "patch.linewidth": 0.6,
    }


def legend(axes: Axes, narrow: bool, columns: int = 3) -> None:
    """Adds a legend above the plot, if there are several series."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        fits = 3 if max(map(len, labels)) < 9 else 1
        rows = min(fits if narrow else columns, len(labels))
        axes.figure.legend(  # type: ignore[union-attr]
            handles, labels, loc="outside upper left", ncols=rows, handlelength=2.6, columnspacing=1.4
        )


def errors(estimates: Seq[dict[str, Any]]) -> list[list[float]]:
    """The error bars of estimates: lengths below and above the values; 0 without an interval."""
    ends = [(e["low"] or e["value"], e["value"], e["high"] or e["value"]) for e in estimates]
    return [[value - low for low, value, _ in ends], [high - value for _, value, high in ends]]


def intervals(axes: Axes, rows: Seq[tuple[str, dict[str, Any], int]], label: str, narrow: bool) -> None:
    """Draws an estimate with its interval for each row (name, estimate, series), from top to bottom; 1 is marked."""
    ends = [(e["low"] or e["value"], e["high"] or e["value"]) for _, e, _ in rows]
    for y, (_, e, series) in enumerate(rows):
        colour = SERIES[series % len(SERIES)]
        axes.plot(ends[y], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
        axes.plot([e["value"]], [y], MARKERS[series % len(MARKERS)], color=colour, markersize=7)
        axes.annotate(
            f"{e['value']:.2f}x", (e["value"], y), xytext=(0, 7), textcoords="offset points", ha="center", va="bottom",
            color=INK, fontsize="small", bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip
    axes.axvline(1, color=SOFT, linewidth=1, linestyle=(0, (3, 2)))
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.7)  # room for the figure above the first row
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    axes.set_xlim(min(0.9, low * 0.95), max(1.1, high) * 1.05)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)


def lines(
    axes: Axes, groups: Seq[tuple[str, Seq[float], Seq[float]]], x: str, y: str, narrow: bool, percent: bool = True
) -> None:
    """Draws named lines (name, xs, ys)."""
    for i, (name, xs, ys) in enumerate(groups):
        axes.plot(
            xs, ys, color=SERIES[i % len(SERIES)], marker=MARKERS[i % len(MARKERS)] if len(xs) < 40 else None,
            linestyle=DASHES[i % len(DASHES)], label=name,
        )  # fmt: skip
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if percent:
        axes.set_ylim(0, 1.03)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    legend(axes, narrow)


def ticks(axes: Axes, xs: Seq[Any]) -> None:
    """Sets a tick at each measured value, if there are at most 12."""
    values = sorted(set(xs)) if all(isinstance(x, (int, float)) for x in xs) else []
    if 1 < len(values) <= 12:
        axes.set_xticks(values, [f"{value:g}" for value in values])
