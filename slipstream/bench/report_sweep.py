"""Report of a sweep result."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from slipstream.bench import plots
from slipstream.bench.plots import Plot
from slipstream.bench.report_bench import fastest
from slipstream.bench.results import Result
from slipstream.bench.tables import Column, Section, Table, interval, percent, words

AXES = {"draft_tokens": "draft length K", "batch": "batch size", "tree_nodes": "tree nodes"}
Series = list[tuple[str, list[dict[str, Any]]]]


def section(result: Result) -> Section:
    arms = result.data["arms"]
    fast = [arm for arm in arms if not arm["plain"]]
    axis = result.settings["x"]
    made = Section(f"Sweep over {title(axis)}", lead(fast))
    if not fast:
        return made
    series = grouped(fast, axis)
    made.plots += [speed(series, axis), acceptance(series, axis), length(series, axis)]
    made.tables.append(table(arms, result.settings["axes"]))
    return made


def lead(fast: list[dict[str, Any]]) -> str:
    text = fastest(fast, where, "setting")
    known = [arm for arm in fast if arm.get("predicted")]
    if known:
        off = [abs(arm["predicted"]["speedup"] / arm["overall"]["speedup"]["value"] - 1) for arm in known]
        text += f" The predictions are off by {percent(sum(off) / len(off))} on average, {percent(max(off))} at most."
    return text


def title(axis: str) -> str:
    return AXES.get(axis, axis.replace("_", " "))


def where(arm: dict[str, Any]) -> str:
    return ", ".join(f"K={v}" if name == "draft_tokens" else f"{title(name)} {v}" for name, v in arm["values"].items())


def grouped(fast: list[dict[str, Any]], axis: str) -> Series:
    """The points grouped by every value except that of the horizontal axis."""
    out: dict[str, list[dict[str, Any]]] = {}
    for arm in fast:
        rest = ", ".join(
            str(value) if name == "drafter" else f"{title(name)} {value}"
            for name, value in arm["values"].items()
            if name != axis
        )
        out.setdefault(rest or arm["label"], []).append(arm)
    return list(out.items())


def _xs(points: list[dict[str, Any]], axis: str) -> list[Any]:
    values = [point["values"][axis] for point in points]
    return (
        values
        if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
        else list(map(str, values))
    )


def dodged(xs: list[Any], i: int, count: int) -> list[Any]:
    """The values shifted slightly, by a different amount for each of `count` series; text is not shifted."""
    values = sorted(set(xs))
    if len(values) < 2 or isinstance(values[0], str):
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
        "sweep-speedup", f"Speed-up by {title(axis)}",
        "Points: measured, with 95% intervals. Dashed: predicted by the closed forms from acceptance by position at "
        "the longest draft and from the cost curve of the target. Plain decoding is 1.",
        "; ".join(f"{where(p)}: {interval(p['overall']['speedup'])}" for _, ps in series for p in ps), draw, height=3.6,
    )  # fmt: skip


def acceptance(series: Series, axis: str) -> Plot:
    groups = [(label, _xs(ps, axis), [p["overall"]["acceptance_rate"] or 0.0 for p in ps]) for label, ps in series]

    def draw(axes: Any, narrow: bool) -> None:
        plots.lines(axes, groups, title(axis), "acceptance rate", narrow)
        plots.ticks(axes, [x for _, xs, _ in groups for x in xs])

    return Plot(
        "sweep-acceptance", f"Acceptance rate by {title(axis)}", "Accepted draft tokens over verified ones.",
        "; ".join(f"{label}: {', '.join(percent(y) for y in ys)}" for label, _, ys in groups),
        draw,
    )  # fmt: skip


def length(series: Series, axis: str) -> Plot:
    groups = [(label, _xs(ps, axis), [p["overall"]["mean_acceptance_length"] for p in ps]) for label, ps in series]

    def draw(axes: Any, narrow: bool) -> None:
        plots.lines(axes, groups, title(axis), "tokens per step (tau)", narrow, percent=False)
        plots.ticks(axes, [x for _, xs, _ in groups for x in xs])
        axes.set_ylim(bottom=min(1.0, axes.get_ylim()[0]))

    return Plot(
        "sweep-length", f"Tokens per step by {title(axis)}",
        "Output tokens over steps, the bonus token included.",
        "; ".join(f"{label}: {', '.join(f'{y:.2f}' for y in ys)}" for label, _, ys in groups), draw,
    )  # fmt: skip


def table(arms: list[dict[str, Any]], axes: dict[str, list[Any]]) -> Table:
    varied = [name for name, values in axes.items() if len(values) > 1]
    columns = [*(words("K" if name == "draft_tokens" else name.replace("_", " ")) for name in varied),
               Column("accept", "%"), Column("tau", digits=2), Column("tok/s"), Column("speed-up (95%)", "x"),
               Column("predicted", "x")]  # fmt: skip
    rows = []
    for arm in arms:
        f, expected = arm["overall"], arm.get("predicted")
        own = [str(arm["values"].get(name, "")) for name in varied]
        if arm["plain"]:
            own = ["plain", *(str(arm[n]) if n in ("temperature", "batch") else "" for n in varied[1:])]
        speed, gain = f["tokens_per_second"]["value"], "1" if arm["plain"] else f["speedup"]
        rows.append(
            [*own, f["acceptance_rate"], f["mean_acceptance_length"], speed, gain, expected and expected["speedup"]]
        )
    return Table("All settings", columns, rows)
