"""Report of a bench result."""

from itertools import pairwise
from typing import Any

from slipstream.bench import plots
from slipstream.bench.estimates import unsure
from slipstream.bench.plots import Plot
from slipstream.bench.results import Result
from slipstream.bench.tables import Alarm, Column, Section, Table, interval, percent, words

PHASES = ("draft", "target", "verify", "host", "outside")
SHOWN_POSITIONS = 8
VERDICTS = {"plain": "", "sampled": "sampled", "identical": "identical", "near-tie": "identical*", "BUG": Alarm("BUG")}
PREDICTED = (
    " predicted: by the closed forms, from acceptance by position at the longest draft and the target's cost curve."
)
WHO = (words("method"), words("setting"))
AXES = {"draft_tokens": "draft length K", "batch": "batch size"}
Series = list[tuple[str, list[dict[str, Any]]]]


def section(result: Result) -> Section:
    arms = result.data["arms"]
    report = Section("Drafters against plain decoding", lead(arms))
    if not arms:
        return report
    fast = [arm for arm in arms if not arm["plain"]]
    axis = result.settings.get("x")  # results of earlier versions have none
    conditions = list(dict.fromkeys(condition(arm) for arm in arms))
    names = list(dict.fromkeys(name(arm) for arm in fast))
    report.tables.append(speeds(arms))
    if fast:
        report.plots += axis_plots(fast, result.settings["axes"], axis) if axis else []
        report.plots.append(speedups(fast, conditions, names))
        if len(arms[0]["categories"]) > 1:
            report.tables.append(by_category(arms))
            report.plots.append(category_plot(fast, conditions, names))
        report.tables.append(by_position(fast))
    report.tables.append(times_spent(arms))
    if len(conditions) == 1:
        report.tables = [part for table in report.tables for part in table.divided("setting")]
    report.notes += [f"{name(arm)}, prompt {d['prompt']}: {parted(d)}" for arm in fast for d in arm["divergences"]]
    return report


def lead(arms: list[dict[str, Any]]) -> str:
    """The fastest arm with accepted draft tokens, whether it is shown to differ from plain decoding, and how far
    predictions are off."""
    fast = [arm for arm in arms if not arm["plain"]]
    if not fast:
        return "Nothing was measured before the run ended."
    gaining = [arm for arm in fast if arm["overall"]["stats"]["accepted"]]
    best = max(gaining or fast, key=lambda arm: arm["overall"]["speedup"]["value"])
    gain = best["overall"]["speedup"]
    who = f"{name(best)} ({condition(best)}), {interval(gain)}"
    if gain["value"] < 1 or not gaining:
        measured = "The least slow one" if gain["value"] < 1 else "Measured"
        text = f"No drafter is faster than plain decoding. {measured}: {who}.{unsure(gain)}"
    else:
        text = f"Fastest: {who} over plain decoding.{unsure(gain)}"
    known = [arm for arm in fast if arm.get("predicted")]
    if known:
        off = [abs(arm["predicted"]["speedup"] / arm["overall"]["speedup"]["value"] - 1) for arm in known]
        text += f" The predictions are off by {percent(sum(off) / len(off))} on average, {percent(max(off))} at most."
    return text


def name(arm: dict[str, Any]) -> str:
    return arm["label"] + ("" if arm["plain"] else f", K={arm['draft_tokens']}")


def condition(arm: dict[str, Any]) -> str:
    sampling = "greedy" if arm["temperature"] == 0 else f"T={arm['temperature']:g}"
    more = {"batch": arm["batch"] if arm["batch"] > 1 else None, "context": arm.get("context")}
    return ", ".join([sampling, *(f"{name} {value}" for name, value in more.items() if value)])


def setting(arm: dict[str, Any]) -> str:
    """The condition as a cell: a line for each part."""
    return condition(arm).replace(", ", "\n")


def parted(d: dict[str, Any]) -> str:
    verdict = "a near-tie, within rounding" if d["near_tie"] else "too far apart for rounding: a bug"
    return (
        f"the texts differ from token {d['position']} on, where the target's two best logits are {d['margin']:.2g} "
        f"apart and rounding moves them by {d['noise']:.2g}: {verdict}."
    )


def speeds(arms: list[dict[str, Any]]) -> Table:
    columns = [*WHO, Column("speed-up (95%)", "x"), Column("tok/s"), Column("accept", "%"), Column("tau", digits=2),
               words("text")]  # fmt: skip
    rows = []
    for arm in arms:
        f = arm["overall"]
        gain = "1" if arm["plain"] else f["speedup"]
        speed, text = f["tokens_per_second"]["value"], VERDICTS[arm["texts"]]
        rows.append([name(arm), setting(arm), gain, speed, f["acceptance_rate"], f["mean_acceptance_length"], text])
    if predicted := [arm.get("predicted") for arm in arms] if any(arm.get("predicted") for arm in arms) else []:
        columns.insert(3, Column("predicted", "x"))
        for row, expected in zip(rows, predicted, strict=True):
            row.insert(3, expected and expected["speedup"])
    return Table(
        "Speed and acceptance", columns, rows,
        f"{min(arm['rounds'] for arm in arms)} interleaved passes over the prompts. Speed-up: time per token of plain "
        "decoding over that of the method, per prompt in the same pass, prefill included. accept: accepted draft "
        "tokens over verified ones. tau: tokens per step, the bonus token included. identical*: identical except for "
        "near-ties, which rounding decides." + PREDICTED * bool(predicted),
    )  # fmt: skip


def by_category(arms: list[dict[str, Any]]) -> Table:
    columns = [words("category"), *WHO, Column("speed-up (95%)", "x"), Column("tok/s")]
    rows = []
    for kind in arms[0]["categories"]:
        for arm in arms:
            f = arm["categories"][kind]
            gain = "1" if arm["plain"] else f["speedup"]
            rows.append([kind, name(arm), setting(arm), gain, f["tokens_per_second"]["value"]])
    return Table("Speed-up by category", columns, rows)


def by_position(fast: list[dict[str, Any]]) -> Table:
    deepest = min(SHOWN_POSITIONS, max(len(arm["overall"]["position_rates"]) for arm in fast))
    columns = [*WHO, *(Column(str(depth + 1), "%") for depth in range(deepest))]
    rows = []
    for arm in fast:
        rates = arm["overall"]["position_rates"][:deepest]
        rows.append([name(arm), setting(arm), *rates, *[None] * (deepest - len(rates))])
    return Table(
        "Acceptance by position", columns, rows,
        "Share of the steps with a draft token at position 1, 2, ... that accepted it.",
    )  # fmt: skip


def times_spent(arms: list[dict[str, Any]]) -> Table:
    columns = [*WHO, Column("first", "ms"), Column("next", "ms", 1),
               *(Column(phase, "%") for phase in PHASES[:-1])]  # fmt: skip
    rows = []
    for arm in arms:
        f = arm["overall"]
        seconds = f["first_token_seconds"], f["seconds_per_later_token"]
        draft, target, verify, host, outside = (f["shares"][phase] for phase in PHASES)
        rows.append([name(arm), setting(arm), *seconds, draft, target, verify, host + outside])
    return Table(
        "Latency, and where the time goes", columns, rows,
        "first, next: time to the first token and per later token. draft: proposing and observing; target: forward and "
        "commit; verify: probabilities, rule, stop conditions; host: the rest of a step, and the time between steps.",
    )  # fmt: skip


def speedups(fast: list[dict[str, Any]], conditions: list[str], names: list[str]) -> Plot:
    rows = [
        (name(arm) + (f"\n{condition(arm)}" if len(conditions) > 1 else ""), arm["overall"]["speedup"],
         names.index(name(arm)))
        for arm in fast
    ]  # fmt: skip
    return Plot(
        "speedup", "Speed-up over plain decoding",
        "Points: speed-up over plain decoding in the same passes; bars: 95% intervals; dashed: plain decoding.",
        "; ".join(f"{name(a)}, {condition(a)}: {interval(a['overall']['speedup'])}" for a in fast),
        lambda axes, narrow: plots.intervals(axes, rows, "speed-up", narrow), height=1.0 + 0.48 * len(rows),
    )  # fmt: skip


def category_plot(fast: list[dict[str, Any]], conditions: list[str], names: list[str]) -> Plot:
    first = [arm for arm in fast if condition(arm) == conditions[0]]
    rows = [
        (f"{kind}\n{name(arm)}", arm["categories"][kind]["speedup"], names.index(name(arm)))
        for kind in first[0]["categories"]
        for arm in first
    ]
    return Plot(
        "speedup-by-category", f"Speed-up by category, {conditions[0]}",
        "As above, for each category of prompts. The speed-up of a drafter depends mostly on the text.",
        "; ".join(f"{label.replace(chr(10), ', ')}: {interval(e)}" for label, e, _ in rows),
        lambda axes, narrow: plots.intervals(axes, rows, "speed-up", narrow),
        height=1.0 + 0.48 * len(rows),
    )  # fmt: skip


def axis_plots(fast: list[dict[str, Any]], axes: dict[str, list[Any]], axis: str) -> list[Plot]:
    """Speed-up and acceptance rate over `axis`, a line for each combination of the other axes."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for arm in fast:
        rest = {name: value(arm, name) for name in axes if name != axis}
        label = ", ".join(str(v) if name == "drafter" else f"{AXES.get(name, name)} {v}" for name, v in rest.items())
        lines.setdefault(label or arm["label"], []).append(arm)
    series = list(lines.items())
    return [speed(series, axis), acceptance(series, axis)]


def value(arm: dict[str, Any], axis: str) -> Any:
    """Where an arm is on an axis."""
    return arm["label"] if axis == "drafter" else arm.get(axis)


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
        axes.set_xlabel(AXES.get(axis, axis))
        axes.set_ylabel("speed-up over plain decoding")
        plots.ticks(axes, [x for _, points in series for x in _xs(points, axis)])
        plots.legend(axes, narrow, columns=2 if len(series) > 1 else 3)

    return Plot(
        "speedup-by-axis", f"Speed-up by {AXES.get(axis, axis)}",
        "Points: measured, with 95% intervals. Dashed: predicted by the closed forms from acceptance by position at "
        "the longest draft and from the cost curve of the target. Plain decoding is 1.",
        "; ".join(f"{name}, {value(p, axis)}: {interval(p['overall']['speedup'])}" for name, ps in series for p in ps),
        draw, height=3.6,
    )  # fmt: skip


def acceptance(series: Series, axis: str) -> Plot:
    groups = [(each, _xs(points, axis), [p["overall"]["acceptance_rate"] or 0.0 for p in points])
              for each, points in series]  # fmt: skip

    def draw(axes: Any, narrow: bool) -> None:
        plots.lines(axes, groups, AXES.get(axis, axis), "acceptance rate", narrow)
        plots.ticks(axes, [x for _, xs, _ in groups for x in xs])

    return Plot(
        "acceptance-by-axis", f"Acceptance rate by {AXES.get(axis, axis)}", "Accepted draft tokens over verified ones.",
        "; ".join(f"{each}: {', '.join(map(percent, ys))}" for each, _, ys in groups), draw,
    )  # fmt: skip
