"""Report of a bench result."""

from __future__ import annotations

from typing import Any

from slipstream.bench import plots
from slipstream.bench.estimates import unsure
from slipstream.bench.plots import Plot
from slipstream.bench.report_axes import axis_plots
from slipstream.bench.results import Result
from slipstream.bench.tables import Alarm, Column, Section, Table, interval, percent, words

PHASES = ("draft", "target", "verify", "host", "outside")
SHOWN_POSITIONS = 8
VERDICTS = {"plain": "", "sampled": "sampled", "identical": "identical", "near-tie": "identical*", "BUG": Alarm("BUG")}
PREDICTED = (
    " predicted: by the closed forms, from acceptance by position at the longest draft and the target's cost curve."
)
WHO = (words("method"), words("setting"))


def section(result: Result) -> Section:
    arms = result.data["arms"]
    made = Section("Drafters against plain decoding", lead(arms))
    if not arms:
        return made
    fast = [arm for arm in arms if not arm["plain"]]
    axis = result.settings.get("x")  # results of earlier versions have none
    conditions = list(dict.fromkeys(condition(arm) for arm in arms))
    names = list(dict.fromkeys(name(arm) for arm in fast))
    made.tables.append(speeds(arms))
    if fast:
        made.plots += axis_plots(fast, result.settings["axes"], axis) if axis else []
        made.plots.append(speedups(fast, conditions, names))
        if len(arms[0]["categories"]) > 1:
            made.tables.append(by_category(arms))
            made.plots.append(category_plot(fast, conditions, names))
        made.tables.append(by_position(fast))
    made.plots.append(split(arms, conditions))
    made.tables.append(memory_and_time(arms))
    if len(conditions) == 1:
        made.tables = [part for table in made.tables for part in table.divided("setting")]
    made.notes += [f"{name(arm)}, prompt {d['prompt']}: {parted(d)}" for arm in fast for d in arm["divergences"]]
    return made


def lead(arms: list[dict[str, Any]]) -> str:
    """The fastest arm that drafted, whether it is shown to differ from plain decoding, and how far predictions are
    off."""
    fast = [arm for arm in arms if not arm["plain"]]
    if not fast:
        return "Nothing was measured before the run ended."
    drafting = [arm for arm in fast if arm["overall"]["stats"]["proposed"]]
    best = max(drafting or fast, key=lambda arm: arm["overall"]["speedup"]["value"])
    gain = best["overall"]["speedup"]
    who = f"{name(best)} ({condition(best)}), {interval(gain)}"
    if gain["value"] < 1:
        text = f"No drafter is faster than plain decoding. The least slow one: {who}.{unsure(gain)}"
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


def memory_and_time(arms: list[dict[str, Any]]) -> Table:
    columns = [*WHO, Column("first", "ms"), Column("next", "ms", 1), Column("memory", "B"),
               *(Column(phase, "%") for phase in PHASES[:-1])]  # fmt: skip
    rows = []
    for arm in arms:
        f = arm["overall"]
        seconds = f["first_token_seconds"], f["seconds_per_later_token"]
        draft, target, verify, host, outside = (f["shares"][phase] for phase in PHASES)
        shares = draft, target, verify, host + outside
        rows.append([name(arm), setting(arm), *seconds, arm["peak_memory"], *shares])
    return Table(
        "Latency, memory, and where the time goes", columns, rows,
        "first, next: time to the first token and per later token. Memory: peak of the whole process on a CPU, of "
        "tensors on CUDA. draft: proposing and observing; target: forward and commit; verify: probabilities, rule, "
        "stop conditions; host: the rest of a step, and the time between steps.",
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
        lambda axes, narrow: plots.intervals(axes, rows, "speed-up", narrow),
        height=1.0 + 0.48 * len(rows),
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


def split(arms: list[dict[str, Any]], conditions: list[str]) -> Plot:
    rows = [
        (
            name(arm) + (f"\n{condition(arm)}" if len(conditions) > 1 else ""),
            {phase: arm["overall"]["shares"][phase] for phase in PHASES},
        )
        for arm in arms
    ]
    return Plot(
        "time-split", "Where the time goes",
        "Shares of wall time: drafting, the target's forward, verification, the rest of a step, and between steps.",
        "; ".join(f"{label}: " + ", ".join(f"{p} {percent(v)}" for p, v in parts.items()) for label, parts in rows),
        lambda axes, narrow: plots.shares(axes, rows, narrow),
        height=1.3 + 0.42 * len(rows),
    )  # fmt: skip
