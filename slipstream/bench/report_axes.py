"""Plots over an axis of a bench result: draft lengths, temperatures, batch sizes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from slipstream.bench import plots
from slipstream.bench.plots import Plot
from slipstream.bench.tables import interval, percent

AXES = {"draft_tokens": "draft length K", "batch": "batch size"}
Series = list[tuple[str, list[dict[str, Any]]]]


def axis_plots(fast: list[dict[str, Any]], axes: dict[str, list[Any]], axis: str) -> list[Plot]:
    """Speed-up and acceptance rate over `axis`, a line for each combination of the other axes."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for arm in fast:
        others = {name: value(arm, name) for name in axes if name != axis}
        label = ", ".join(str(v) if name == "drafter" else f"{title(name)} {v}" for name, v in others.items())
        lines.setdefault(label or arm["label"], []).append(arm)
    series = list(lines.items())
    return [speed(series, axis), acceptance(series, axis)]


def value(arm: dict[str, Any], axis: str) -> Any:
    """Where an arm is on an axis."""
    return arm["label"] if axis == "drafter" else arm.get(axis)


def title(axis: str) -> str:
    return AXES.get(axis, axis)


def _xs(points: list[dict[str, Any]], axis: str) -> list[Any]:
    return [value(point, axis) for point in points]


def dodged(xs: list[Any], i: int, count: int) -> list[Any]:
    """The values shifted slightly, by a different amount for each of `count` series."""
    values = sorted(set(xs))
    if len(values) < 2:
        return xs
    step = min(b - a for a, b in pairwise(values))
    return [x + 0.06 * step * (i - (count - 1) / 2) for x in xs]


def speed(series: Series, axis: str) -> Plot:
    def draw(axes: Any, narrow: bool) -> None:
        for i, (label, points) in enumerate(series):
            xs, colour = _xs(points, axis), plots.SERIES[i % len(plots.SERIES)]
            gains = [p["overall"]["speedup"] for p in points]
            y = [g["value"] for g in gains]
            if len(series) > 1:
                xs = dodged(xs, i, len(series))  # so that intervals do not hide each other
            spread = plots.errors(gains)
            many = len(series) > 1
            axes.errorbar(
                xs, y, yerr=spread, fmt=plots.MARKERS[i % len(plots.MARKERS)], color=colour, capsize=3,
                label=f"{label}, measured" if many else "measured",
            )  # fmt: skip
            expected = [(x, p["predicted"]["speedup"]) for x, p in zip(xs, points, strict=True) if p.get("predicted")]
            if expected:
                axes.plot(
                    *zip(*expected, strict=True), color=colour, linestyle=plots.DASHES[1], linewidth=1.4,
                    label=f"{label}, predicted" if many else "predicted",
                )  # fmt: skip
        axes.axhline(1, color=plots.SOFT, linewidth=1, linestyle=(0, (3, 2)))
        axes.set_ylim(bottom=min(0.8, axes.get_ylim()[0]))
        axes.set_xlabel(title(axis))
        axes.set_ylabel("speed-up over plain decoding")
        plots.ticks(axes, [x for _, points in series for x in _xs(points, axis)])
        plots.legend(axes, narrow, columns=2 if len(series) > 1 else 3)

    return Plot(
        "speedup-by-axis", f"Speed-up by {title(axis)}",
        "Points: measured, with 95% intervals. Dashed: predicted by the closed forms from acceptance by position at "
        "the longest draft and from the cost curve of the target. Plain decoding is 1.",
        "; ".join(f"{name}, {value(p, axis)}: {interval(p['overall']['speedup'])}" for name, ps in series for p in ps),
        draw, height=3.6,
    )  # fmt: skip


def acceptance(series: Series, axis: str) -> Plot:
    groups = [(each, _xs(points, axis), [p["overall"]["acceptance_rate"] or 0.0 for p in points])
              for each, points in series]  # fmt: skip

    def draw(axes: Any, narrow: bool) -> None:
        plots.lines(axes, groups, title(axis), "acceptance rate", narrow)
        plots.ticks(axes, [x for _, xs, _ in groups for x in xs])

    return Plot(
        "acceptance-by-axis", f"Acceptance rate by {title(axis)}", "Accepted draft tokens over verified ones.",
        "; ".join(f"{each}: {', '.join(map(percent, ys))}" for each, _, ys in groups), draw,
    )  # fmt: skip
