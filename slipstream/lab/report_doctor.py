"""What a page says of a doctor result."""

from __future__ import annotations

from typing import Any

from slipstream.lab import plots
from slipstream.lab.plots import Plot
from slipstream.lab.report_page import Section, Table, percent, times
from slipstream.lab.results import Result

MS = 1000


def section(result: Result) -> Section:
    data = result.data
    if "diagnosis" not in data:
        return Section("Why is it slow?", "Too little was measured for a diagnosis.")
    m, d = data["measured"], data["diagnosis"]
    made = Section("Why is it slow?", lead(m, d))
    made.tables.append(gone(d))
    made.tables.append(numbers(m, d))
    made.plots += [curve(m), positions(m)]
    made.notes += [f"{line[:1].upper()}{line[1:]}." for line in d["evidence"]]
    return made


def lead(m: dict[str, Any], d: dict[str, Any]) -> str:
    value, low, high = m["speedup"]
    gain = f"{times(value)} the speed of plain decoding (95 % interval {times(low)} to {times(high)})"
    if d["cause"] == "nothing is wrong":
        return f"Nothing is wrong: {gain}."
    alone = "" if d["enough"] else " No single change makes it pay; this one helps most."
    return f"Cause: {d['cause']}, at {gain}. Fix: {d['fix']}.{alone}"


def gone(d: dict[str, Any]) -> Table:
    rows = [[row["cause"], times(row["speedup"])] for row in d["counterfactuals"]]
    return Table(
        "Speed-up if one cause were gone", ("cause", "predicted"), [["as it is", times(d["predicted"])], *rows],
        note="Predicted by the closed forms from the numbers below.",
    )  # fmt: skip


def numbers(m: dict[str, Any], d: dict[str, Any]) -> Table:
    step = m["costs"]["seconds"][0] + m["plain_host"]
    draft = m["draft_fixed"] + m["draft_each"] * m["draft_tokens"]
    even = "none" if d["break_even"] is None else percent(d["break_even"])
    rows = [
        ("acceptance of one guess", percent(d["acceptance"])),
        ("break-even acceptance", even),
        ("draft length", str(m["draft_tokens"])),
        ("best draft length up to that", f"{d['best_length']} ({times(d['best_speedup'])})"),
        ("one row of the target", f"{m['costs']['seconds'][0] * MS:.2f} ms"),
        ("drafting a round", f"{draft * MS:.2f} ms, {draft / step:.2f} plain steps"),
        ("host, a round", f"{m['round_host'] * MS:.2f} ms"),
        ("host, a plain step", f"{m['plain_host'] * MS:.2f} ms"),
        ("reading the prompt", f"{m['prefill'] * MS:.1f} ms, and {m['draft_prefill'] * MS:.1f} ms by the drafter"),
        ("sequences at once", str(m["batch"])),
    ]
    return Table("Measured", ("", "value"), rows)


def curve(m: dict[str, Any]) -> Plot:
    rows, seconds = m["costs"]["rows"], [s * MS for s in m["costs"]["seconds"]]
    used = m["batch"] * (1 + m["width"] * m["draft_tokens"])

    def draw(axes: Any, narrow: bool) -> None:
        axes.plot(rows, seconds, color=plots.SERIES[0], marker=plots.MARKERS[0], label="a pass of the target")
        axes.axvline(used, color=plots.SOFT, linestyle=plots.DASHES[1], linewidth=1.2, label="a full draft")
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows[:: 2 if narrow else 1], [str(n) for n in rows[:: 2 if narrow else 1]])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rows a pass")
        axes.set_ylabel("milliseconds")
        plots.legend(axes, narrow)

    return Plot(
        "doctor-costs", "What a pass of the target costs by its rows",
        "Flat as long as the rows share one reading of the weights; where it rises, every guess is paid for.",
        "; ".join(f"{n} rows: {s:.2f} ms" for n, s in zip(rows, seconds, strict=True)), draw,
    )  # fmt: skip


def positions(m: dict[str, Any]) -> Plot:
    rates = m["position_rates"]
    depths = list(range(1, len(rates) + 1))

    def draw(axes: Any, narrow: bool) -> None:
        axes.bar(depths, rates, 0.6, color=plots.SERIES[0], label="stood")
        axes.plot(depths, m["drafted"], color=plots.SERIES[1], marker=plots.MARKERS[1], label="drafted so deep")
        axes.set_ylim(0, 1.05)
        axes.set_xticks(depths)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("share of rounds")
        plots.legend(axes, narrow)

    return Plot(
        "doctor-acceptance", "Acceptance by position",
        "Bars: of the rounds that drafted so deep, how many kept that guess. Line: of the rounds with room for it, how "
        "many drafted so deep.",
        "; ".join(f"position {d}: {percent(rate)}" for d, rate in zip(depths, rates, strict=True)), draw,
    )  # fmt: skip
