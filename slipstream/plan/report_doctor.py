"""Report of a doctor result."""

from __future__ import annotations

from typing import Any

from slipstream.bench import plots
from slipstream.bench.plots import Plot
from slipstream.bench.results import Result
from slipstream.bench.tables import Column, Section, Table, interval, percent, remark, times, words

MS = 1000


def section(result: Result) -> Section:
    data = result.data
    if "diagnosis" not in data:
        return Section("Why is it slow?", "Too little was measured for a diagnosis.")
    m, d = data["measured"], data["diagnosis"]
    made = Section("Why is it slow?", lead(m, d), [gone(d), numbers(m, d), costs(m["costs"])], [curve(m), positions(m)])
    made.notes += [remark(line) for line in d["evidence"]]
    return made


def lead(m: dict[str, Any], d: dict[str, Any]) -> str:
    gain = m["speedup"]  # a list in results of earlier versions
    gain = gain if isinstance(gain, dict) else dict(zip(("value", "low", "high"), gain, strict=True))
    measured = f"{interval(gain)} over plain decoding, {times(d['predicted'])} predicted from the parts"
    if d.get("reason"):  # a result of an earlier version has none
        return f"Not diagnosed: {d['reason']}. Measured: {measured}. Fix: {d['fix']}."
    if d["cause"] == "nothing is wrong":
        return f"Nothing is wrong: {measured}."
    alone = "" if d["enough"] else " No single change is enough for a speed-up; this one helps most."
    return f"Cause: {d['cause']}, at {measured}. Fix: {d['fix']}.{alone}"


def gone(d: dict[str, Any]) -> Table:
    rows = [["nothing removed", d["predicted"]], *([row["cause"], row["speedup"]] for row in d["counterfactuals"])]
    note = "Predicted from the measurements below."
    return Table("Predicted speed-up without one cause", [words("without"), Column("speed-up", "x")], rows, note)


def numbers(m: dict[str, Any], d: dict[str, Any]) -> Table:
    step = m["costs"]["seconds"][0] + m["plain_host"]
    draft = m["draft_fixed"] + m["draft_each"] * m["draft_tokens"]
    even, best = d["break_even"], d["best_length"]
    rows = [
        ("acceptance of one draft token", percent(d["acceptance"])),
        ("break-even acceptance", "none, not even 100%" if even is None else percent(even)),
        ("draft length", str(m["draft_tokens"])),
        (
            "best draft length up to that",
            f"{best} ({times(d['best_speedup'])})" if best else "none: no length saves time",
        ),
        ("target pass of one row", f"{m['costs']['seconds'][0] * MS:.2f} ms"),
        ("drafting, per step", f"{draft * MS:.2f} ms, {draft / step:.2f} plain steps"),
        ("host, per speculative step", f"{m['step_host'] * MS:.2f} ms"),
        ("host, per plain step", f"{m['plain_host'] * MS:.2f} ms"),
        ("prefill", f"{m['prefill'] * MS:.1f} ms, plus {m['draft_prefill'] * MS:.1f} ms for the drafter"),
        ("sequences at once", str(m["batch"])),
    ]
    return Table("Measured", [words(""), words("value")], rows)


def costs(curve: dict[str, Any]) -> Table:
    """A `CostCurve` of the target, {"rows", "seconds"}: powers of two only."""
    rows, seconds = curve["rows"], curve["seconds"]
    shown = [i for i, n in enumerate(rows) if n & (n - 1) == 0]
    columns = [words("rows per pass"), *(Column(str(rows[i]), digits=2) for i in shown)]
    cells = [
        ["ms", *(f"{MS * seconds[i]:.1f}" for i in shown)],
        ["relative to one row", *(seconds[i] / seconds[0] for i in shown)],
    ]
    return Table("Time of a target pass by its rows", columns, cells)


def curve(m: dict[str, Any]) -> Plot:
    rows, seconds = m["costs"]["rows"], [s * MS for s in m["costs"]["seconds"]]
    used = m["batch"] * (1 + m["width"] * m["draft_tokens"])

    def draw(axes: Any, narrow: bool) -> None:
        axes.plot(rows, seconds, color=plots.SERIES[0], marker=plots.MARKERS[0], label="target pass")
        axes.axvline(used, color=plots.SOFT, linestyle=plots.DASHES[1], linewidth=1.2, label="a full draft")
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows[:: 2 if narrow else 1], [str(n) for n in rows[:: 2 if narrow else 1]])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rows per pass")
        axes.set_ylabel("milliseconds")
        plots.legend(axes, narrow)

    return Plot(
        "doctor-costs", "Time of a target pass by its rows",
        "The curve is flat while decoding is memory-bound. Where it rises, every draft token costs time.",
        "; ".join(f"{n} rows: {s:.2f} ms" for n, s in zip(rows, seconds, strict=True)), draw,
    )  # fmt: skip


def positions(m: dict[str, Any]) -> Plot:
    rates = m["position_rates"]
    depths = list(range(1, len(rates) + 1))

    def draw(axes: Any, narrow: bool) -> None:
        axes.bar(depths, rates, 0.6, color=plots.SERIES[0], label="accepted")
        axes.plot(
            depths, m["drafted"], color=plots.SERIES[1], marker=plots.MARKERS[1], label="drafted to this position"
        )
        axes.set_ylim(0, 1.05)
        axes.set_xticks(depths)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("share of steps")
        plots.legend(axes, narrow)

    return Plot(
        "doctor-acceptance", "Acceptance by position",
        "Bars: share of the steps with a draft token at that position that accepted it. Line: share of the steps with "
        "room for that position that drafted to it.",
        "; ".join(f"position {d}: {percent(rate)}" for d, rate in zip(depths, rates, strict=True)), draw,
    )  # fmt: skip
