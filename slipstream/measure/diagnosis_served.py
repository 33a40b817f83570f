"""`slipstream tune --base-url URL`: whether speculation pays on a running server, and which setting would help.

Only the server's counters are known, under its present load. They give up to three speed-ups:

    at most   tokens of a decode step: the speed-up if drafts and their verification cost nothing
    measured  the speed-up over the server's own steps without drafts, if the times of steps show it
    assumed   the speed-up if a draft token costs `c` decode steps and verification nothing; only compares lengths

No counter shows the time of a step without speculation. If "at most" and "measured" decide nothing, the verdict is
`UNKNOWN`.
"""

import asyncio
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import ServedError
from slipstream.measure.configs import STARTED_WITH
from slipstream.measure.counters import NAMES, NOT_REPORTED, SERVERS, Counters, add_counters, name_of
from slipstream.measure.diagnosis import ACCEPTANCE, FINE, FIXES, LENGTH, NOTHING, UNKNOWN
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.estimates import Estimate, t_quantile
from slipstream.measure.provenance import note_conditions
from slipstream.measure.results import Result, record
from slipstream.measure.tables import Section, Table, interval, percent, remark, spell, times, words
from slipstream.measure.traffic_client import TrafficClient

KIND = "tune-served"
OFF, SELDOM, COSTLY = "nothing is drafted", "too few steps draft", "drafts cost more than they gain"
HARDLY = 0.1
"""The report names positions at which less than this share of the draft tokens is accepted."""
FULL = 0.9
"""If the mean draft is shorter than this share of the longest, rates by position tell little about other lengths."""
ENOUGH, MANY = 100, 8
"""Fewest drafts for recommending another length; assumed tokens per draft if the server does not count draft tokens."""
PARTS, FEWEST_PARTS, FEWEST_STEPS = 20, 12, 20
"""Number of parts of the watched time; fewest parts for `estimate_own_steps`, and fewest steps in each part."""
SURE = 1.3
"""Smallest speed-up over the server's own steps without drafts that counts as a gain. Speculation may slow down these
steps, too: vLLM with our drafters reached 0.77x of plain decoding when it hardly drafted anything (docs/vllm.md)."""
BLIND_TO = (
    "What counters cannot show: the time of a step on a server that does not speculate (vLLM, for example, turns "
    "asynchronous scheduling off for lookups); other loads and other texts; whether the text is the same, which "
    "slipstream verify compares. The counters include all clients."
)
BEHIND = "if this URL is a router, give the URL of a server behind it"


@dataclass(frozen=True)
class ServedForecast:
    """The longest draft; the speed-ups "at most", "measured" and "assumed" (see the module) at the present length; and
    the best draft length up to the longest, with its assumed speed-up."""

    longest: int
    now: float | None
    best_length: int
    best: float
    most: float
    measured: Estimate | None


@dataclass
class ServedDiagnosis:
    """A diagnosis of a server. cause, fix, reason, evidence: as in `Diagnosis`, but `reason` is never empty: it also
    explains a cause. forecast: None if unknown."""

    cause: str = UNKNOWN
    fix: str = ""
    reason: str = ""
    evidence: list[str] = field(default_factory=list)
    forecast: ServedForecast | None = None


@dataclass(frozen=True)
class WatchedServer:
    """A server and its diagnosis. counters: from `Counters.as_dict`; None if the server reports no counters."""

    counters: JsonObject | None = None
    diagnosis: ServedDiagnosis | None = None


def diagnose_served(counters: JsonMapping | None, c: float, measured: Estimate | None = None) -> ServedDiagnosis:
    """Diagnose a server; a pure function. counters: from `Counters.as_dict`, None if the server reports none; c: cost
    of a draft token, in decode steps; measured: result of `estimate_own_steps`."""
    diagnosis = ServedDiagnosis()

    def found(reason: str, fix: str, cause: str = UNKNOWN) -> ServedDiagnosis:
        return replace(diagnosis, cause=cause, reason=reason, fix=fix)

    if counters is None:
        fix = "start llama-server with --metrics, SGLang with --enable-metrics, vLLM without --disable-log-stats"
        return found("/metrics has no counters of vLLM, SGLang, llama-server or Slipstream", f"{fix}; {BEHIND}")
    server, running, output = SERVERS[counters["server"]], counters["running"] or 0, counters["output_tokens"]
    n, drafts = max(1, round(running)), counters["drafts"]
    load = f"about {spell(n, 'request')} at once"
    compare = f"compare it with one that does not speculate: slipstream bench --serve A --serve B --concurrency {n}"
    for refused, reason, fix in (
        (output is None, f"/metrics of {server} does not count output tokens, as on a router", BEHIND),
        (len(counters["models"]) > 1, f"/metrics adds up several models: {', '.join(counters['models'])}", BEHIND),
        (not output and running, "no token was counted yet; most servers count when a request ends", "watch longer"),
        (not output, "no request ran", "watch while requests run; slipstream bench --serve sends some"),
        (drafts is None and server == "llama-server", "this llama-server does not report drafts", "use a newer one"),
        (not drafts and counters["accept_length"], "this SGLang counts no verification", f"use a newer one; {compare}"),
    ):  # fmt: skip
        if refused:
            return found(reason, fix)
    diagnosis.evidence = collect_evidence(counters)
    if not drafts:
        why = f"counters cannot show whether speculation would pay at {load}; it gains most with few"
        return found(why, f"start a second server that speculates, then {compare}", OFF)
    rates, draft_tokens = counters["accepted_at"] or [], counters["draft_tokens"]
    decoded, accepted = output - (counters["first_tokens"] or counters["requests"] or 0), counters["accepted_tokens"]
    if accepted is None or (steps := decoded - accepted) <= 0:
        return found(f"{server} counts {accepted} accepted of {decoded:.0f} decoded tokens", compare)
    most, share = decoded / steps, min(1.0, drafts / steps)
    gains = [(1 + share * sum(rates[:k])) / (1 + share * c * k) for k in range(len(rates) + 1)]
    now = None if draft_tokens is None else most / (1 + c * draft_tokens / steps)
    longest = k = len(rates)
    if draft_tokens is None or not rates:
        diagnosis.evidence.append(f"{server} does not report acceptance by position, so no other length is judged")
    elif (drafted := draft_tokens / drafts) > FULL * longest:
        k = max(range(longest + 1), key=gains.__getitem__)
    else:
        diagnosis.evidence.append(f"drafts have {drafted:.1f} tokens on average, so no other length is judged")
    if now is not None:
        diagnosis.evidence.append(f"assumed: verification is free, and a draft token costs {c:g} steps: {times(now)}")
    diagnosis.forecast = ServedForecast(longest, now, k, gains[k], most, measured)
    at_most = (
        f"at most {times(most)} ({steps:,.0f} decode steps) under this load, {load}, if drafting and verification cost "
        "nothing"
    )
    against = f"{interval(measured)} against this server's own steps without drafts" if measured else ""
    low, high = (measured.low or 0.0, measured.high or math.inf) if measured else (0.0, math.inf)
    if high < 1 / FINE:
        return found(f"{against}, with {load}", f"{FIXES[LENGTH]}, or switch speculation off under such a load", COSTLY)
    spread = 2 * ((accepted + 1) * (draft_tokens or MANY * drafts) / drafts) ** 0.5  # accepted tokens come in runs
    if most + spread / steps < FINE:
        few = "use a drafter that drafts more often, or switch speculation off for such texts"
        return found(at_most, few, SELDOM) if share < 0.5 else found(at_most, FIXES[ACCEPTANCE], ACCEPTANCE)
    if 0 < k < longest and drafts >= ENOUGH and gains[k] >= FINE * gains[longest]:
        why = f"if verification is free and a draft token costs {c:g} decode steps (--c; not measured), "
        why += f"{spell(k, 'token')} give {times(gains[k])}, {longest} give {times(gains[longest])}"
        setting = STARTED_WITH.get(counters["server"], "see its options").format(k=k)
        return found(why, f"draft {spell(k, 'token')}: {setting}", LENGTH)
    if SURE <= low <= most:
        return found(f"{against}; {at_most}", "", NOTHING)
    return found(f"{at_most}{f', and {against}' * bool(against)}; what a step takes without it is not known", compare)


def estimate_own_steps(parts: Seq[Counters]) -> Estimate | None:
    """Estimate the speed-up over the same server's steps without drafts; None if the step times do not show it.

    parts: growth of the counters in each part of the watched time. The time of a step is fitted by least squares,
    weighted by steps: quadratic in its draft tokens (the quadratic term widens the interval if rows differ in cost),
    linear in requests and prompt tokens per step and in time, because texts grow. The fit at 0 draft tokens is the time
    of a step without drafts. There is no estimate if all parts draft many tokens: that would be an extrapolation.
    """
    rows, gained = [], 0.0
    for i, part in enumerate(each.as_dict() for each in parts):
        tokens = (part["output_tokens"] or 0) - (part["first_tokens"] or 0)
        steps = tokens - (part["accepted_tokens"] or 0)
        if steps >= FEWEST_STEPS and part["decode_seconds"] and part["draft_tokens"] is not None:
            passes, prompt = part["engine_steps"] or steps, (part["prefix_queries"] or 0) - (part["prefix_hits"] or 0)
            drafted = part["draft_tokens"] / passes
            rows.append([steps, part["decode_seconds"], 1, drafted, drafted**2, steps / passes, prompt / passes, i])
            gained += tokens
    if len(rows) < FEWEST_PARTS:
        return None
    weights, seconds, *columns = np.array(rows).T
    if columns[1].min() > columns[1].mean() / 2 or not columns[1].any():
        return None
    columns[3:] = [column - np.average(column, weights=weights) for column in columns[3:]]
    design = np.array(columns).T * np.sqrt(weights)[:, None]
    design /= (scale := np.maximum(np.linalg.norm(design, axis=0), 1e-12))
    times_seen = seconds / np.sqrt(weights)
    fit, _, rank, _ = np.linalg.lstsq(design, times_seen, rcond=1e-9)
    freedom = len(rows) - int(rank)
    variance = ((times_seen - design @ fit) ** 2).sum() / freedom * np.linalg.pinv(design.T @ design)[0, 0]
    unit = gained / seconds.sum() / scale[0]  # converts seconds of a step without drafts to the speed-up
    gain, error = float(fit[0] * unit), t_quantile(0.975, freedom) * float(np.sqrt(variance) * unit)
    return Estimate(gain, gain - error, gain + error)


def collect_evidence(counters: JsonMapping) -> list[str]:
    said, rates = [], counters["accepted_at"] or []
    if counters["mean_acceptance_length"]:
        said.append(f"a step with a draft gives {counters['mean_acceptance_length']:.2f} tokens")
    if counters["drafts"] and counters["tokens_per_step"]:
        share = counters["drafts"] * counters["tokens_per_step"] / counters["output_tokens"]
        said.append(f"tokens were drafted in {percent(min(1.0, share))} of the steps")
    if counters["engines"] and counters["engines"] > 1:
        said.append(f"{counters['engines']:.0f} engines report together")
    seldom = [i for i, rate in enumerate(rates, start=1) if rate < HARDLY]
    if seldom:
        said.append(f"from position {seldom[0]} on, fewer than {percent(HARDLY)} of the drafts are accepted")
    return said


def judge(samples: Seq[Counters], c: float) -> WatchedServer:
    """Diagnose a server from several readings of its counters; no samples mean that the server reports none."""
    parts = [after.since(before) for before, after in pairwise(samples)]
    whole = add_counters(parts)
    if whole is None:
        return WatchedServer(None, diagnose_served(None, c))
    now = {name: float(np.mean([each.values.get(name, 0.0) for each in samples])) for name in ("running", "waiting")}
    now = {name: mean for name, mean in now.items() if name in whole.values}
    reported = replace(whole, values={**whole.values, **now}).as_dict()
    diagnosis = diagnose_served(reported, c, estimate_own_steps(parts))
    if any(after.has_restarted(before) for before, after in pairwise(samples)):
        diagnosis.evidence.append("the server was restarted while it was watched")
    return WatchedServer(reported, diagnosis)


def watch(place: Endpoint, seconds: float, c: float, out: str | Path | None = None) -> Result:
    """Diagnose a server by watching its counters for some seconds. Sends no completion request. Raises ServedError."""
    result = Result(KIND, {"watch": seconds, "c": c}, note_conditions(None, servers=[place.describe()["id"]]))

    async def read() -> list[Counters]:
        seen: list[Counters | None] = []
        async with TrafficClient(place, place.timeout) as client:
            for i in range((PARTS if seconds else 1) + 1):
                await asyncio.sleep(seconds / PARTS if i and seen[0] else 0)
                seen.append(await client.counters())
        if seen[0] and not seen[-1]:
            raise ServedError(f"{place.base_url} no longer reports metrics", fix="read the server's log")
        return [each for each in seen if each] if seen[0] else []

    seen = [WatchedServer()]
    with record(result, out, lambda: seen[-1]):
        seen.append(judge(asyncio.run(read()), c))
    return result


def make_section(result: Result) -> Section:
    report = Section("Does speculation pay on this server?", "Nothing was seen before the run ended.")
    seen = result.read_data(WatchedServer)
    if seen.diagnosis:
        report.lead = write_lead(seen.diagnosis)
        report.tables += [tabulate_counters(seen.counters, result.settings["watch"])] if seen.counters else []
        report.notes += [*map(remark, seen.diagnosis.evidence), BLIND_TO]
    return report


def write_lead(diagnosis: ServedDiagnosis) -> str:
    heads = {UNKNOWN: "Not diagnosed", NOTHING: "Nothing is wrong"}
    said = f"{heads.get(diagnosis.cause, 'Cause: ' + diagnosis.cause)}: {diagnosis.reason}."
    return f"{said} Fix: {diagnosis.fix}." if diagnosis.fix else said


def tabulate_counters(counters: JsonObject, seconds: float) -> Table:
    rows = []
    for quantity in (*NAMES, "acceptance_rate"):
        value, share = counters.get(quantity), quantity in ("accepted_at", "kv_usage", "acceptance_rate")
        several = value if isinstance(value, list) else [value]
        text = ", ".join(percent(each) if share else f"{each:.0f}" for each in several if each is not None)
        name = name_of(quantity, counters["server"]) if quantity in NAMES else "computed"
        rows.append([quantity.replace("_", " "), text or NOT_REPORTED, name])
    title = f"What {SERVERS[counters['server']]} reports, {seconds:g} s watched"
    return Table(title, [words(""), words("value"), words("its name")], rows)
