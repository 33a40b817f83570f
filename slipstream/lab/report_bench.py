"""What a page says of a bench result."""

from __future__ import annotations

from typing import Any

from slipstream.lab import plots
from slipstream.lab.plots import Plot
from slipstream.lab.report_page import Section, Table, percent, times
from slipstream.lab.results import Result

PHASES = ("draft", "target", "verify", "host", "outside")
VERDICTS = {
    "plain": "",
    "sampled": "sampled, not comparable",
    "identical": "token-identical",
    "near-tie": "identical but for near-ties",
    "BUG": "DIFFERENT: a bug",
}


def section(result: Result) -> Section:
    arms = result.data["arms"]
    made = Section("Drafters against plain decoding", lead(arms))
    if not arms:
        return made
    made.tables.append(speeds(arms))
    fast = [arm for arm in arms if not arm["plain"]]
    conditions = list(dict.fromkeys(condition(arm) for arm in arms))
    names = list(dict.fromkeys(name(arm) for arm in fast))
    if fast:
        made.plots.append(speedups(fast, conditions, names))
        if len(arms[0]["categories"]) > 1:
            made.tables.append(by_category(arms))
            made.plots.append(category_plot(fast, conditions, names))
        made.plots.append(positions(fast, conditions))
    made.plots.append(split(arms, conditions))
    made.tables.append(memory_and_time(arms))
    made.notes += [f"{name(arm)}, prompt {d['prompt']}: {parted(d)}" for arm in fast for d in arm["divergences"]]
    return made


def lead(arms: list[dict[str, Any]]) -> str:
    fast = [arm for arm in arms if not arm["plain"]]
    if not fast:
        return "Nothing was measured before the run ended."
    best = max(fast, key=lambda arm: arm["overall"]["speedup"]["value"])
    gain = best["overall"]["speedup"]
    sure = " The interval includes 1: this is not told from noise." if gain["low"] <= 1 <= gain["high"] else ""
    return (
        f"The fastest, {name(best)} ({condition(best)}), decodes at {times(gain['value'])} the speed of plain decoding "
        f"(95 % interval {times(gain['low'])} to {times(gain['high'])}).{sure}"
    )


def name(arm: dict[str, Any]) -> str:
    return arm["label"] + ("" if arm["plain"] else f", K={arm['draft_tokens']}")


def condition(arm: dict[str, Any]) -> str:
    heat = "greedy" if arm["temperature"] == 0 else f"temperature {arm['temperature']:g}"
    return heat + (f", batch {arm['batch']}" if arm["batch"] > 1 else "")


def parted(d: dict[str, Any]) -> str:
    verdict = "a near-tie that rounding decides" if d["near_tie"] else "too far apart for rounding: a bug"
    return (
        f"the text parts at token {d['position']}, where the target's two best logits are {d['margin']:.2g} apart and "
        f"rounding moves them by {d['noise']:.2g}: {verdict}."
    )


def interval(e: dict[str, float]) -> str:
    return f"{times(e['value'])} ({e['low']:.2f} to {e['high']:.2f})"


def speeds(arms: list[dict[str, Any]]) -> Table:
    heads = [
        "Method",
        "Condition",
        "Tokens/s",
        "Speed-up (95 % interval)",
        "Acceptance",
        "tau",
        "Text",
    ]
    rows = []
    for arm in arms:
        f = arm["overall"]
        rows.append(
            [
                name(arm),
                condition(arm),
                f"{f['tokens_per_second']['value']:.0f}",
                "1" if arm["plain"] else interval(f["speedup"]),
                percent(f["acceptance_rate"]),
                f"{f['mean_acceptance_length']:.2f}",
                VERDICTS[arm["texts"]],
            ]
        )
    return Table(
        "Speed and acceptance", heads, rows, left=(0, 1, 6),
        note="Speeds include the processing of prompts. Speed-up: plain decoding's time for a token over the method's, "
        "prompt by prompt in the same rounds. Acceptance: guesses that stood over guesses verified. tau: tokens a "
        "round, the target's own included.",
    )  # fmt: skip


def memory_and_time(arms: list[dict[str, Any]]) -> Table:
    heads = ["Method", "Condition", "First token, ms", "Each later token, ms", "Peak memory, MB", *PHASES]
    rows = []
    for arm in arms:
        f = arm["overall"]
        later, peak = f["seconds_per_later_token"], arm["peak_memory"]
        rows.append(
            [
                name(arm),
                condition(arm),
                f"{1000 * f['first_token_seconds']:.1f}",
                "" if later is None else f"{1000 * later:.2f}",
                "" if peak is None else f"{peak / 1e6:.0f}",
                *(percent(f["shares"][phase]) for phase in PHASES),
            ]
        )
    return Table(
        "Latency, memory, and where the time goes", heads, rows, left=(0, 1),
        note="Peak memory is of the whole process on a CPU, of tensors on CUDA. Draft: proposing and learning; target: "
        "forward and commit; verify: laws, rule, stops; host: the rest of a step; outside: between steps.",
    )  # fmt: skip


def by_category(arms: list[dict[str, Any]]) -> Table:
    kinds = list(arms[0]["categories"])
    rows = []
    for arm in arms:
        cells = [arm["categories"][kind] for kind in kinds]
        rows.append(
            [
                name(arm),
                condition(arm),
                *(
                    f"{c['tokens_per_second']['value']:.0f} tokens/s" if arm["plain"] else interval(c["speedup"])
                    for c in cells
                ),
            ]
        )
    return Table("Speed-up by category", ["Method", "Condition", *kinds], rows, left=(0, 1))


def speedups(fast: list[dict[str, Any]], conditions: list[str], names: list[str]) -> Plot:
    rows = [
        (name(arm) + (f"\n{condition(arm)}" if len(conditions) > 1 else ""), arm["overall"]["speedup"],
         names.index(name(arm)))
        for arm in fast
    ]  # fmt: skip
    return Plot(
        "speedup", "Speed-up over plain decoding",
        "Points: speed-up over plain decoding in the same rounds; bars: 95 % bootstrap intervals over prompts and "
        "rounds; dashed: plain decoding.",
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
        "As above, for each category of prompts alone. What a drafter is worth depends on the text first of all.",
        "; ".join(f"{label.replace(chr(10), ', ')}: {interval(e)}" for label, e, _ in rows),
        lambda axes, narrow: plots.intervals(axes, rows, "speed-up", narrow),
        height=1.0 + 0.48 * len(rows),
    )  # fmt: skip


def positions(fast: list[dict[str, Any]], conditions: list[str]) -> Plot:
    groups = []
    for arm in fast:
        rates = arm["overall"]["position_rates"]
        label = name(arm) + (f", {condition(arm)}" if len(conditions) > 1 else "")
        groups.append((label, list(range(1, len(rates) + 1)), rates))
    return Plot(
        "acceptance-by-position", "Acceptance by position",
        "Of the rounds that drafted at least so deep, the share whose guess at that position stood.",
        "; ".join(f"{label}: {', '.join(percent(y) for y in ys)}" for label, _, ys in groups),
        lambda axes, narrow: _whole(axes, groups, narrow),
    )  # fmt: skip


def _whole(axes: Any, groups: Any, narrow: bool) -> None:
    plots.lines(axes, groups, "position in the draft", "stood", narrow)
    longest = max((len(xs) for _, xs, _ in groups), default=1)
    axes.set_xticks(range(1, longest + 1, max(1, longest // 10)))


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
