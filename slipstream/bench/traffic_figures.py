"""Figures of a load test, and their report: pure functions of timed requests.

    tokens/s  output tokens of requests that succeeded, over the time from the first request to the end of the last
    first     time to the first text (TTFT), from when the request was due
    next      time per output token after the first (TPOT): from the first text to the last over the tokens after the
              first, for each request
    gap       between two pieces of text that follow each other, over all requests; a piece may hold several tokens
    whole     from when the request was due to its end

Latencies are percentiles over the successful requests of all passes. Speeds have the 95 % interval over passes of
`slipstream.bench.estimates`, ratios that of pairs of passes.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slipstream.bench import estimates
from slipstream.bench.counters import Counters, total
from slipstream.bench.estimates import FEWEST_PASSES, unsure
from slipstream.bench.results import Result
from slipstream.bench.tables import Column, Section, Table, counted, ends, interval, words
from slipstream.bench.traffic_client import Answered

PERCENTILES = (50, 95, 99)
WHO = (words("server"), words("load"))
LATENCIES = {"first": "first text", "next": "next token", "gap": "gap", "whole": "whole"}
"""Key of an arm -> what the table calls it."""
SHOWN = ("p50", "p95", "p99", "max")
LATE = 0.1
"""If the client sends a request later than this share of the median time to first text, the report warns."""


@dataclass
class TrafficPass:
    """One pass over the requests of an arm.

    seconds   from the first request to the end of the last.
    counters  by how much the server's counters grew, which count all its clients; None: it reports none.
    said      the server's answer to a request that failed.
    """

    seconds: float
    answers: list[Answered]
    counters: Counters | None = None
    said: str = ""

    @property
    def good(self) -> list[Answered]:
        return [each for each in self.answers if not each.fault]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.good)


def figures(passes: Seq[TrafficPass], base: Seq[TrafficPass] | None = None) -> dict[str, Any]:
    """The figures of one arm as plain JSON values, times in seconds. base: the passes that it is compared with."""
    good = [each for one in passes for each in one.good]
    faults = Counter(each.fault for one in passes for each in one.answers if each.fault)
    summed = total(one.counters for one in passes)
    reported = summed.as_dict() if summed else {}
    return {
        "rounds": len(passes),
        "answered": len(good),
        "errors": dict(faults),
        "said": next((one.said for one in passes if one.said), ""),
        "tokens_per_second": speed(passes),
        "ratio": None if base is None else ratio(base, passes),
        "requests_per_second": len(good) / sum(one.seconds for one in passes),
        "output_tokens": sum(one.tokens for one in passes),
        "prompt_tokens": sum(each.prompt_tokens for each in good),
        "cached_tokens": sum(each.cached_tokens for each in good),
        "counted": all(each.counted for each in good),
        "first": percentiles([each.first for each in good]),
        "next": percentiles([each.per_token for each in good]),
        "gap": percentiles([gap for each in good for gap in each.gaps]),
        "whole": percentiles([each.whole for each in good]),
        "late": percentiles([each.late for each in good]),
        "counters": reported or None,
        "acceptance_rate": reported.get("acceptance_rate"),
        "mean_acceptance_length": reported.get("mean_acceptance_length"),
        "cells": {
            "seconds": [one.seconds for one in passes],
            "tokens": [one.tokens for one in passes],
            "first": [[each.first for each in one.good] for one in passes],
            "next": [[each.per_token for each in one.good] for one in passes],
            "whole": [[each.whole for each in one.good] for one in passes],
        },
    }


def speed(passes: Seq[TrafficPass]) -> dict[str, Any] | None:
    """Output tokens a second with its interval; None if a pass gave no token."""
    if not all(one.tokens for one in passes):
        return None
    return asdict(estimates.mean([one.seconds / one.tokens for one in passes]).inverse())


def ratio(base: Seq[TrafficPass], passes: Seq[TrafficPass]) -> dict[str, Any] | None:
    """Tokens a second over those of `base`, by pairs of passes."""
    pairs = list(zip(base, passes, strict=False))
    if not all(a.tokens and b.tokens for a, b in pairs):
        return None
    times = [[one.seconds / one.tokens for one in side] for side in zip(*pairs, strict=True)]
    return asdict(estimates.ratio(*times))


def percentiles(values: Seq[float | None]) -> dict[str, float] | None:
    """{"p50", "p95", "p99", "mean", "max"} of those that are there; between two values on a line."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    quantiles = np.percentile(known, PERCENTILES)
    named = {f"p{n}": float(value) for n, value in zip(PERCENTILES, quantiles, strict=True)}
    return named | {"mean": float(np.mean(known)), "max": float(max(known))}


def warnings(arms: Seq[dict[str, Any]]) -> list[str]:
    """What limits how far the figures can be trusted."""
    texts = []
    if arms and min(arm["rounds"] for arm in arms) < FEWEST_PASSES:
        texts.append(estimates.REASONS[estimates.FEW_PASSES])
    for arm in arms:
        where = f"{arm['name']} ({arm['load']})"
        if arm["errors"]:
            listed = ", ".join(f"{count} x {fault}" for fault, count in arm["errors"].items())
            said = f": {arm['said'][:200]}" if arm["said"] else ""
            texts.append(f"{where}: {counted(sum(arm['errors'].values()), 'request')} failed ({listed}){said}")
        if not arm["counted"]:
            texts.append(f"{where}: the server gives no usage, so pieces of text were counted instead of tokens")
        if arm["late"] and arm["first"] and arm["late"]["p99"] > LATE * arm["first"]["p50"]:
            texts.append(
                f"{where}: the client itself sent requests up to {1e3 * arm['late']['p99']:.0f} ms late, which counts "
                "as latency of the server: it needs more processor time"
            )
        if arm["prompt_tokens"] and arm["cached_tokens"] > 0.5 * arm["prompt_tokens"]:
            share = arm["cached_tokens"] / arm["prompt_tokens"]
            texts.append(f"{where}: {share:.0%} of the prompt tokens came from a prefix cache: first texts come sooner")
    return texts


def section(result: Result) -> Section:
    arms = result.data["arms"]
    report = Section("Servers under load" if _several(arms) else "A server under load", lead(arms))
    if arms:
        report.tables += [speeds(arms), latencies(arms)]
    return report


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
    table = Table(
        "Throughput", columns, rows,
        f"{min(arm['rounds'] for arm in arms)} interleaved passes. tok/s: output tokens of answered requests over the "
        "time from the first request to the end of the last. accept, tau: accepted draft tokens over verified ones, "
        "and tokens of a step with a draft, by the server's counters; -: not reported."
        + " ratio: tok/s over those of the first server under the same load, by pairs of passes." * _several(arms),
    )  # fmt: skip
    return table if _several(arms) else table.of([1, 2, 3, 4, 6, 7])


def latencies(arms: list[dict[str, Any]]) -> Table:
    columns = [*WHO, words("time"), *(Column(name, "ms", 1) for name in SHOWN)]
    rows = [
        [arm["name"], arm["load"], text, *((arm[key] or {}).get(name) for name in SHOWN)]
        for arm in arms
        for key, text in LATENCIES.items()
    ]
    table = Table(
        "Latency", columns, rows,
        "From when a request was due. first text: to the first text (TTFT). next token: for each token after the first "
        "(TPOT). gap: between two pieces of text, which may hold several tokens. whole: to the end.",
    )  # fmt: skip
    return table if _several(arms) else table.of(range(1, len(columns)))
