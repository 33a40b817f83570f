"""Report of a load test."""

from __future__ import annotations

from typing import Any

from slipstream.bench.estimates import unsure
from slipstream.bench.results import Result
from slipstream.bench.tables import Column, Section, Table, ends, interval, words

WHO = (words("server"), words("load"))
LATENCIES = {"first": "first text", "next": "next token", "gap": "gap", "whole": "whole"}
"""Key of an arm -> what the table calls it."""
SHOWN = ("p50", "p95", "p99", "max")


def section(result: Result) -> Section:
    arms = result.data["arms"]
    made = Section("Servers under load" if _several(arms) else "A server under load", lead(arms))
    if arms:
        made.tables += [speeds(arms), latencies(arms)]
    return made


def _several(arms: list[dict[str, Any]]) -> bool:
    return len({arm["name"] for arm in arms}) > 1


def who(arm: dict[str, Any]) -> str:
    return f"{arm['name']}, {arm['load']}"


def lead(arms: list[dict[str, Any]]) -> str:
    if not arms:
        return "Nothing was measured before the run ended."
    compared = [arm for arm in arms if arm["ratio"]]
    if compared:
        best = max(compared, key=lambda arm: arm["ratio"]["value"])
        gain, base = best["ratio"], arms[best["against"]]["name"]
        return f"Against {base}, {who(best)}: {interval(gain)} its tokens a second.{unsure(gain)}"
    quick = [arm for arm in arms if arm["tokens_per_second"] and arm["first"]]
    if not quick:
        return "No server gave text."
    fast = max(quick, key=lambda arm: arm["tokens_per_second"]["value"])
    value, first = fast["tokens_per_second"], fast["first"]
    return (
        f"{who(fast)}: {value['value']:.0f} output tokens a second (95%: {ends(value, '{:.0f}'.format, ' to ')}), "
        f"first text after {1e3 * first['p50']:.0f} ms in the median and {1e3 * first['p99']:.0f} ms at p99."
    )


def speeds(arms: list[dict[str, Any]]) -> Table:
    columns = [*WHO, Column("requests"), Column("errors"), Column("tok/s (95%)"), Column("ratio (95%)", "x"),
               Column("accept", "%"), Column("tau", digits=2)]  # fmt: skip
    rows = [
        [arm["name"], arm["load"], arm["answered"], sum(arm["errors"].values()), arm["tokens_per_second"],
         arm["ratio"] or "1", arm["acceptance_rate"], arm["mean_acceptance_length"]]
        for arm in arms
    ]  # fmt: skip
    made = Table(
        "Throughput", columns, rows,
        f"{min(arm['rounds'] for arm in arms)} interleaved passes. tok/s: output tokens of answered requests over the "
        "time from the first request to the end of the last. accept, tau: accepted draft tokens over verified ones, "
        "and tokens of a step with a draft, by the server's counters; -: not reported."
        + " ratio: tok/s over those of the first server under the same load, by pairs of passes." * _several(arms),
    )  # fmt: skip
    return made if _several(arms) else made.of([1, 2, 3, 4, 6, 7])


def latencies(arms: list[dict[str, Any]]) -> Table:
    columns = [*WHO, words("time"), *(Column(name, "ms", 1) for name in SHOWN)]
    rows = [
        [arm["name"], arm["load"], text, *((arm[key] or {}).get(name) for name in SHOWN)]
        for arm in arms
        for key, text in LATENCIES.items()
    ]
    made = Table(
        "Latency", columns, rows,
        "From when a request was due. first text: to the first text (TTFT). next token: for each token after the first "
        "(TPOT). gap: between two pieces of text, which may hold several tokens. whole: to the end.",
    )  # fmt: skip
    return made if _several(arms) else made.of(range(1, len(columns)))
