"""Computes the figures of a load test, and their report, by pure functions of timed requests.

    tokens/s  output tokens of requests that succeeded, over the time from the first request to the end of the last
    first     time to the first text (TTFT), from when the request was due
    next      time per output token after the first (TPOT) of each request: time from the first text to the last, over
              the number of tokens after the first
    gap       time between two neighbouring pieces of text, over all requests; a piece may hold several tokens
    whole     time from when the request was due to its end

Latencies are percentiles over the successful requests of all passes. Speeds have a 95 % interval over passes, ratios
have a 95 % interval over pairs of passes (`slipstream.measure.estimates`).
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from slipstream.core.strict import JsonObject
from slipstream.measure import estimates
from slipstream.measure.counters import Counters, add_counters
from slipstream.measure.estimates import FEWEST_PASSES, explain_doubt
from slipstream.measure.measurements import ServedArm, TrafficData
from slipstream.measure.results import Result
from slipstream.measure.tables import Column, Estimate, Section, Table, ends, interval, spell, tabulate, words
from slipstream.measure.traffic_client import Answered

PERCENTILES = (50, 95, 99)
LATENCIES = {"first": "first text", "next": "next token", "gap": "gap", "whole": "whole"}
"""Field of a `ServedArm` -> name in the table."""
SHOWN = ("p50", "p95", "p99", "max")
LATE = 0.1
"""The report warns if the client's delay in sending exceeds this share of the median time to the first text."""


@dataclass
class TrafficPass:
    """One pass over the requests of an arm.

    seconds   time from the first request to the end of the last request.
    counters  growth of the server's counters, which count all clients; None if the server reports no counters.
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


def compute_passes(passes: Seq[TrafficPass], base: Seq[TrafficPass] | None = None) -> JsonObject:
    """Compute the fields of a `ServedArm` that come from its passes. base: passes of the arm to compare with."""
    good = [each for one in passes for each in one.good]
    summed = add_counters(one.counters for one in passes)
    reported = summed.as_dict() if summed else {}
    return {
        "rounds": len(passes),
        "answered": len(good),
        "errors": dict(Counter(each.fault for one in passes for each in one.answers if each.fault)),
        "said": next((one.said for one in passes if one.said), ""),
        "tokens_per_second": estimate_speed(passes),
        "ratio": None if base is None else compare_speeds(base, passes),
        "requests_per_second": len(good) / sum(one.seconds for one in passes),
        "output_tokens": sum(one.tokens for one in passes),
        "prompt_tokens": sum(each.prompt_tokens for each in good),
        "cached_tokens": sum(each.cached_tokens for each in good),
        "counted": all(each.counted for each in good),
        "first": compute_percentiles([each.first for each in good]),
        "next": compute_percentiles([each.per_token for each in good]),
        "gap": compute_percentiles([gap for each in good for gap in each.gaps]),
        "whole": compute_percentiles([each.whole for each in good]),
        "late": compute_percentiles([each.late for each in good]),
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


def estimate_speed(passes: Seq[TrafficPass]) -> Estimate | None:
    """Estimate the output tokens per second, with an interval; None if a pass gave no token."""
    if not all(one.tokens for one in passes):
        return None
    return estimates.estimate_mean([one.seconds / one.tokens for one in passes]).inverse()


def compare_speeds(base: Seq[TrafficPass], passes: Seq[TrafficPass]) -> Estimate | None:
    """Estimate the ratio of tokens per second to those of `base`, by pairs of passes."""
    pairs = list(zip(base, passes, strict=False))
    if not all(a.tokens and b.tokens for a, b in pairs):
        return None
    times = [[one.seconds / one.tokens for one in side] for side in zip(*pairs, strict=True)]
    return estimates.estimate_ratio(*times)


def compute_percentiles(values: Seq[float | None]) -> dict[str, float] | None:
    """Compute {"p50", "p95", "p99", "mean", "max"} of the values that are not None, interpolated linearly."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    quantiles = np.percentile(known, PERCENTILES)
    named = {f"p{n}": float(value) for n, value in zip(PERCENTILES, quantiles, strict=True)}
    return named | {"mean": float(np.mean(known)), "max": float(max(known))}


def collect_warnings(arms: Seq[ServedArm]) -> list[str]:
    """Return warnings about the figures, for the report."""
    texts = []
    if arms and min(arm.rounds for arm in arms) < FEWEST_PASSES:
        texts.append(estimates.REASONS[estimates.FEW_PASSES])
    for arm in arms:
        where = f"{arm.name} ({arm.load})"
        if arm.errors:
            listed = ", ".join(f"{count} x {fault}" for fault, count in arm.errors.items())
            said = f": {arm.said[:200]}" if arm.said else ""
            texts.append(f"{where}: {spell(sum(arm.errors.values()), 'request')} failed ({listed}){said}")
        if not arm.counted:
            texts.append(f"{where}: the server gives no usage, so chunks of the stream were counted, not tokens")
        if arm.late and arm.first and arm.late["p99"] > LATE * arm.first["p50"]:
            texts.append(
                f"{where}: the client itself sent requests up to {1e3 * arm.late['p99']:.0f} ms late, which counts "
                "as latency of the server: give the client more processor time"
            )
        if arm.prompt_tokens and arm.cached_tokens > 0.5 * arm.prompt_tokens:
            share = arm.cached_tokens / arm.prompt_tokens
            texts.append(
                f"{where}: {share:.0%} of the prompt tokens came from a prefix cache, so first texts come sooner"
            )
    return texts


def make_section(result: Result) -> Section:
    arms = result.read_data(TrafficData).arms
    report = Section("Servers under load" if _several(arms) else "A server under load", write_lead(arms))
    if arms:
        report.tables += [tabulate_throughput(arms), tabulate_latencies(arms)]
    return report


def _several(arms: Seq[ServedArm]) -> bool:
    return len({arm.name for arm in arms}) > 1


def write_lead(arms: Seq[ServedArm]) -> str:
    if not arms:
        return "Nothing was measured before the run ended."
    compared = [(arm.ratio, arm) for arm in arms if arm.ratio]
    if compared:
        gain, best = max(compared, key=lambda each: each[0].value)
        said = f"{best.who}: {interval(gain)} its tokens a second.{explain_doubt(gain)}"
        return f"Against {arms[best.against or 0].name}, {said}"
    quick = [(arm.tokens_per_second, arm.first, arm) for arm in arms if arm.tokens_per_second and arm.first]
    if not quick:
        return "No server gave text."
    value, first, fast = max(quick, key=lambda each: each[0].value)
    return (
        f"{fast.who}: {value.value:.0f} output tokens a second (95%: {ends(value, '{:.0f}'.format, ' to ')}), "
        f"first text after {1e3 * first['p50']:.0f} ms in the median and {1e3 * first['p99']:.0f} ms at p99."
    )


def tabulate_throughput(arms: Seq[ServedArm]) -> Table:
    several = _several(arms)
    columns = [
        *[words("server", lambda arm: arm.name)] * several,
        words("load", lambda arm: arm.load),
        Column("requests", cell=lambda arm: arm.answered),
        Column("errors", cell=lambda arm: sum(arm.errors.values())),
        Column("tok/s (95%)", cell=lambda arm: arm.tokens_per_second),
        *[Column("ratio (95%)", "x", cell=lambda arm: arm.ratio or "1")] * several,
        Column("accept", "%", cell=lambda arm: arm.acceptance_rate),
        Column("tau", digits=2, cell=lambda arm: arm.mean_acceptance_length),
    ]
    return tabulate(
        "Throughput", arms, columns,
        f"{min(arm.rounds for arm in arms)} interleaved passes. tok/s: output tokens of answered requests over the "
        "time from the first request to the end of the last. accept, tau: accepted draft tokens over verified ones, "
        "and tokens of a step with a draft, by the server's counters; -: not reported."
        + " ratio: tok/s over those of the first server under the same load, by pairs of passes." * several,
    )  # fmt: skip


def tabulate_latencies(arms: Seq[ServedArm]) -> Table:
    rows = [
        [*[arm.name] * _several(arms), arm.load, text, *((getattr(arm, key) or {}).get(name) for name in SHOWN)]
        for arm in arms
        for key, text in LATENCIES.items()
    ]
    who = [*[words("server")] * _several(arms), words("load"), words("time")]
    return Table(
        "Latency", [*who, *(Column(name, "ms", 1) for name in SHOWN)], rows,
        "From when a request was due. first text: to the first text (TTFT). next token: for each token after the first "
        "(TPOT). gap: between two pieces of text, which may hold several tokens. whole: to the end.",
    )  # fmt: skip
