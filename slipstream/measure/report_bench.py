"""Makes the report of a bench result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from itertools import pairwise
from typing import TYPE_CHECKING

from slipstream.measure import plots
from slipstream.measure.estimates import explain_doubt
from slipstream.measure.measurements import BenchArm, BenchData, Figures
from slipstream.measure.results import Result
from slipstream.measure.tables import Alarm, CellValue, Column, Plot, Section, Table, interval, percent, tabulate, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASES = ("draft", "target", "verify", "host", "outside")
SHOWN_POSITIONS = 8
VERDICTS = {"plain": "", "sampled": "sampled", "identical": "identical", "near-tie": "identical*", "BUG": Alarm("BUG")}
PREDICTED = (
    " predicted: by the closed forms, from acceptance by position at the longest draft and the target's cost curve."
)
AXES = {"draft_tokens": "draft length K", "batch": "batch size"}
Series = list[tuple[str, list[BenchArm]]]


def make_section(result: Result) -> Section:
    arms = result.read_data(BenchData).arms
    report = Section("Drafters against plain decoding", write_lead(arms))
    if not arms:
        return report
    fast = [arm for arm in arms if not arm.plain]
    axis = result.settings.get("x")  # results of earlier versions have no "x"
    conditions = list(dict.fromkeys(map(condition, arms)))
    names = list(dict.fromkeys(map(name, fast)))
    report.tables.append(tabulate_speeds(arms))
    if fast:
        report.plots += plot_axes(fast, result.settings["axes"], axis) if axis else []
        report.plots.append(plot_speedups(fast, conditions, names))
        if len(arms[0].categories) > 1:
            report.tables.append(tabulate_categories(arms))
            report.plots.append(plot_categories(fast, conditions, names))
        report.tables.append(tabulate_positions(fast))
    report.tables.append(tabulate_times(arms))
    if len(conditions) == 1:
        report.tables = [part for table in report.tables for part in table.divide("setting")]
    report.notes += [
        f"{name(arm)}, prompt {d.prompt}: the texts differ at {d}." for arm in fast for d in arm.divergences
    ]
    return report


def write_lead(arms: list[BenchArm]) -> str:
    """Name the fastest arm with accepted draft tokens; say if its gain is significant, and how well predictions fit."""
    fast = [arm for arm in arms if not arm.plain]
    if not fast:
        return "Nothing was measured before the run ended."
    gaining = [arm for arm in fast if arm.overall.stats["accepted"]]
    best = max(gaining or fast, key=lambda arm: arm.overall.speedup.value)
    gain = best.overall.speedup
    who = f"{name(best)} ({condition(best)}), {interval(gain)}"
    if gain.value < 1 or not gaining:
        measured = "The least slow one" if gain.value < 1 else "Measured"
        text = f"No drafter is faster than plain decoding. {measured}: {who}.{explain_doubt(gain)}"
    else:
        text = f"Fastest: {who} over plain decoding.{explain_doubt(gain)}"
    off = [abs(arm.predicted.speedup / arm.overall.speedup.value - 1) for arm in fast if arm.predicted]
    if off:
        text += f" The predictions are off by {percent(sum(off) / len(off))} on average, {percent(max(off))} at most."
    return text


def name(arm: BenchArm) -> str:
    return arm.label + ("" if arm.plain else f", K={arm.draft_tokens}")


def condition(arm: BenchArm) -> str:
    sampling = "greedy" if arm.temperature == 0 else f"T={arm.temperature:g}"
    more = {"batch": arm.batch if arm.batch > 1 else None, "context": arm.context}
    return ", ".join([sampling, *(f"{name} {value}" for name, value in more.items() if value)])


def columns(*more: Column) -> list[Column]:
    """Return the columns "method" and "setting", then `more`. Each part of a setting is on its own line."""
    return [words("method", name), words("setting", lambda arm: condition(arm).replace(", ", "\n")), *more]


def gain(figures_of: Callable[[BenchArm], Figures]) -> Column:
    return Column("speed-up (95%)", "x", cell=lambda arm: "1" if arm.plain else figures_of(arm).speedup)


def tabulate_speeds(arms: list[BenchArm]) -> Table:
    shown = columns(
        gain(lambda arm: arm.overall),
        Column("predicted", "x", cell=lambda arm: arm.predicted and arm.predicted.speedup),
        Column("tok/s", cell=lambda arm: arm.overall.tokens_per_second.value),
        Column("accept", "%", cell=lambda arm: arm.overall.acceptance_rate),
        Column("tau", digits=2, cell=lambda arm: arm.overall.mean_acceptance_length),
        words("text", lambda arm: VERDICTS[arm.texts]),
    )
    predicted = any(arm.predicted for arm in arms)
    return tabulate(
        "Speed and acceptance", arms, [column for column in shown if predicted or column.name != "predicted"],
        f"{min(arm.rounds for arm in arms)} interleaved passes over the prompts. Speed-up: time per token of plain "
        "decoding over that of the method, per prompt in the same pass, prefill included. accept: accepted draft "
        "tokens over verified ones. tau: tokens per step, the bonus token included. identical*: identical except for "
        "near-ties, which rounding decides." + PREDICTED * predicted,
    )  # fmt: skip


def tabulate_categories(arms: list[BenchArm]) -> Table:
    title, rows = "Speed-up by category", list[list[CellValue]]()
    for kind in arms[0].categories:
        figures = columns(
            gain(lambda arm, kind=kind: arm.categories[kind]),  # type: ignore[misc]
            Column("tok/s", cell=lambda arm, kind=kind: arm.categories[kind].tokens_per_second.value),  # type: ignore[misc]
        )
        rows += [[kind, *row] for row in tabulate(title, arms, figures).rows]
    return Table(title, [words("category"), *figures], rows)


def tabulate_positions(fast: list[BenchArm]) -> Table:
    deepest = min(SHOWN_POSITIONS, max(len(arm.overall.position_rates) for arm in fast))

    def rate(depth: int) -> Column:
        return Column(str(depth + 1), "%", cell=lambda arm: next(iter(arm.overall.position_rates[depth:]), None))

    return tabulate(
        "Acceptance by position", fast, columns(*map(rate, range(deepest))),
        "Share of the steps with a draft token at position 1, 2, ... that accepted it.",
    )  # fmt: skip


def tabulate_times(arms: list[BenchArm]) -> Table:
    def share(*phases: str) -> Column:
        return Column(phases[0], "%", cell=lambda arm: sum(arm.overall.shares[phase] for phase in phases))

    shown = columns(
        Column("first", "ms", cell=lambda arm: arm.overall.first_token_seconds),
        Column("next", "ms", 1, cell=lambda arm: arm.overall.seconds_per_later_token),
        share("draft"), share("target"), share("verify"), share("host", "outside"),
    )  # fmt: skip
    return tabulate(
        "Latency, and where the time goes", arms, shown,
        "first, next: time to the first token and per later token. draft: proposing and observing; target: forward and "
        "commit; verify: probabilities, rule, stop conditions; host: the rest of a step, and the time between steps.",
    )  # fmt: skip


def plot_speedups(fast: list[BenchArm], conditions: list[str], names: list[str]) -> Plot:
    several = len(conditions) > 1
    rows = [(name(arm) + f"\n{condition(arm)}" * several, arm.overall.speedup, names.index(name(arm))) for arm in fast]
    return plots.plot_intervals(
        "speedup", "Speed-up over plain decoding",
        "Points: speed-up over plain decoding in the same passes; bars: 95% intervals; dashed: plain decoding.", rows,
    )  # fmt: skip


def plot_categories(fast: list[BenchArm], conditions: list[str], names: list[str]) -> Plot:
    first = [arm for arm in fast if condition(arm) == conditions[0]]
    rows = [
        (f"{kind}\n{name(arm)}", arm.categories[kind].speedup, names.index(name(arm)))
        for kind in first[0].categories
        for arm in first
    ]
    return plots.plot_intervals(
        "speedup-by-category", f"Speed-up by category, {conditions[0]}",
        "As above, for each category of prompts. The speed-up of a drafter depends mostly on the text.", rows,
    )  # fmt: skip


def plot_axes(fast: list[BenchArm], axes: Mapping[str, Seq[object]], axis: str) -> list[Plot]:
    """Plot speed-up and acceptance rate over `axis`, a line for each combination of the other axes."""
    lines: dict[str, list[BenchArm]] = {}
    for arm in fast:
        rest = {name: value(arm, name) for name in axes if name != axis}
        label = ", ".join(str(v) if name == "drafter" else f"{AXES.get(name, name)} {v}" for name, v in rest.items())
        lines.setdefault(label or arm.label, []).append(arm)
    series = list(lines.items())
    return [plot_speed(series, axis), plot_acceptance(series, axis)]


def value(arm: BenchArm, axis: str) -> float | str:
    """Return the value of an arm on an axis."""
    at: float | str = vars(arm)["label" if axis == "drafter" else axis]
    return at


def dodge(xs: list[float], i: int, count: int) -> list[float]:
    """Return the values of series i, shifted slightly. Each of the `count` series is shifted by another amount, so that
    their intervals do not hide each other."""
    values = sorted(set(xs))
    if len(values) < 2:
        return xs
    step = min(b - a for a, b in pairwise(values))
    return [x + 0.06 * step * (i - (count - 1) / 2) for x in xs]


def plot_speed(series: Series, axis: str) -> Plot:
    def draw(axes: Axes) -> None:
        for i, (label, points) in enumerate(series):
            marker, colour, _ = plots.style_of(i)
            xs = dodge([float(value(point, axis)) for point in points], i, len(series))
            gains = [point.overall.speedup for point in points]
            who = f"{label}, " if len(series) > 1 else ""
            axes.errorbar(
                xs, [gain.value for gain in gains], yerr=plots.error_bars(gains), color=colour, capsize=3, fmt=marker,
                label=f"{who}measured",
            )  # fmt: skip
            expected = [(x, p.predicted.speedup) for x, p in zip(xs, points, strict=True) if p.predicted]
            if expected:
                axes.plot(
                    *zip(*expected, strict=True), color=colour, linestyle=plots.DASHES[1], linewidth=1.4,
                    label=f"{who}predicted",
                )  # fmt: skip
        axes.axhline(1, color=plots.SOFT, linewidth=1, linestyle=(0, (3, 2)))
        axes.set_ylim(bottom=min(0.8, axes.get_ylim()[0]))
        axes.set_xlabel(AXES.get(axis, axis))
        axes.set_ylabel("speed-up over plain decoding")
        plots.set_ticks(axes, [value(point, axis) for _, points in series for point in points])
        plots.add_legend(axes)

    return Plot(
        "speedup-by-axis", f"Speed-up by {AXES.get(axis, axis)}",
        "Points: measured, with 95% intervals. Dashed: predicted by the closed forms from acceptance by position at "
        "the longest draft and from the cost curve of the target. Plain decoding is 1.",
        "; ".join(f"{name}, {value(p, axis)}: {interval(p.overall.speedup)}" for name, each in series for p in each),
        draw, height=3.2,
    )  # fmt: skip


def plot_acceptance(series: Series, axis: str) -> Plot:
    groups = [
        (each, [float(value(p, axis)) for p in points], [p.overall.acceptance_rate or 0.0 for p in points])
        for each, points in series
    ]
    return Plot(
        "acceptance-by-axis", f"Acceptance rate by {AXES.get(axis, axis)}", "Accepted draft tokens over verified ones.",
        "; ".join(
            f"{each} at {', '.join(f'{x:g}' for x in xs)}: {', '.join(map(percent, ys))}" for each, xs, ys in groups
        ),
        lambda axes: plots.draw_lines(axes, groups, AXES.get(axis, axis), "acceptance rate", few=True),
    )  # fmt: skip
