"""`slipstream tune --base-url URL`: whether speculation pays on a running server, and which setting would help.

The server's counters give the acceptance by position, under the load that it has. What rows and draft tokens cost there
cannot be seen from outside: rows are taken to cost nothing, the cost of a draft token is given. From these `forecast`
predicts the speed-up, also of shorter drafts. Nothing is known of longer ones.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.bench.configs import STARTED_WITH
from slipstream.bench.counters import NAMES, NOT_REPORTED, SERVERS, Counters, name_of
from slipstream.bench.endpoint import Endpoint
from slipstream.bench.load_client import LoadClient
from slipstream.bench.provenance import conditions
from slipstream.bench.results import Result, recording
from slipstream.bench.tables import Section, Table, counted, percent, remark, times, words
from slipstream.errors import ServedError
from slipstream.plan.diagnosis import ACCEPTANCE, FINE, FIXES, LENGTH, NOTHING, UNKNOWN
from slipstream.theory.forecast import Rates, StepCosts, forecast

KIND = "tune-served"
OFF = "nothing is drafted"
HARDLY = 0.1
"""Positions that a smaller share of the drafts accepts are named."""
FULL = 0.9
"""If drafts are shorter than this share of the longest on average, rates by position say little of other lengths."""


def diagnose_served(counters: Mapping[str, Any] | None, c: float) -> dict[str, Any]:
    """The diagnosis from `Counters.as_dict`, None for a server that reports none; a pure function. c: cost of a draft
    token, in decode steps.

    cause, fix, reason, evidence  as in `diagnose`.
    forecast    the "longest" draft, the predicted speed-up "now", and the "best_length" up to the longest with its
                speed-up "best"; None without acceptance by position.
    """
    diagnosis: dict[str, Any] = {"cause": UNKNOWN, "fix": "", "reason": "", "evidence": [], "forecast": None}
    if counters is None:
        fix = "start llama-server with --metrics, SGLang with --enable-metrics, vLLM without --disable-log-stats"
        return diagnosis | {"reason": "the server reports no counters at /metrics", "fix": fix}
    diagnosis["evidence"] = evidence(counters)
    if not counters["output_tokens"]:
        return diagnosis | {
            "reason": "no request ran",
            "fix": "watch while requests run; slipstream bench --serve sends some",
        }
    if counters["drafts"] is None and counters["server"] == "llamacpp":
        return diagnosis | {"reason": "this llama-server does not report drafts", "fix": "use a newer one"}
    if not counters["drafts"]:
        fix = "switch speculation on; slipstream tune without --base-url writes the settings of each server"
        return diagnosis | {"cause": OFF, "fix": fix}
    if not counters["accepted_at"]:
        why = f"{SERVERS[counters['server']]} does not report acceptance by position"
        return diagnosis | {"reason": why, "fix": "slipstream bench --serve A --serve B, B without speculation"}
    longest, drafted = len(counters["accepted_at"]), counters["draft_tokens"] / counters["drafts"]
    usual = max(1, round(drafted))
    costs = StepCosts(c, batch=max(1, round(counters["running"] or 0)), basis="rows taken to cost nothing")
    k, now = longest, counters["mean_acceptance_length"] / costs.step(usual)
    gain = now
    if drafted > FULL * longest:
        best = forecast(Rates(counters["accepted_at"]), costs)
        k, gain = best.draft_tokens, best.speedup
    else:
        diagnosis["evidence"].append(f"drafts have {drafted:.1f} tokens on average, so no other length is judged")
    diagnosis["evidence"].append(f"costs: {costs.assumptions(usual)}")
    diagnosis["forecast"] = {"longest": longest, "now": now, "best_length": k, "best": gain}
    if max(now, gain) < FINE:
        return diagnosis | {"cause": ACCEPTANCE, "fix": FIXES[ACCEPTANCE]}
    if gain / now >= FINE and 0 < k < longest:
        setting = STARTED_WITH[counters["server"]].format(k=k, k1=k + 1)
        return diagnosis | {"cause": LENGTH, "fix": f"draft {counted(k, 'token')}: {setting}"}
    return diagnosis | {"cause": NOTHING}


def evidence(counters: Mapping[str, Any]) -> list[str]:
    said, rates = [], counters["accepted_at"] or []
    if counters["mean_acceptance_length"]:
        said.append(f"a step with a draft gives {counters['mean_acceptance_length']:.2f} tokens")
    if counters["drafts"] and counters["tokens_per_step"]:
        share = counters["drafts"] * counters["tokens_per_step"] / counters["output_tokens"]
        said.append(f"tokens were drafted in {percent(min(1.0, share))} of the steps")
    seldom = [i for i, rate in enumerate(rates, start=1) if rate < HARDLY]
    if seldom:
        said.append(f"from position {seldom[0]} on, fewer than {percent(HARDLY)} of the drafts are accepted")
    return said


def watch(place: Endpoint, seconds: float, c: float, out: str | Path | None = None) -> Result:
    """The diagnosis from what the counters of a server gain in so many seconds; nothing is sent. Raises ServedError."""
    result = Result(KIND, {"watch": seconds, "c": c}, conditions(None, servers=[place.described()["id"]]))

    async def gained() -> Counters | None:
        async with LoadClient(place, place.timeout) as client:
            before = await client.counters()
            await asyncio.sleep(seconds if before else 0)
            after = await client.counters()
        if before and not after:
            raise ServedError(f"{place.base_url} reports no counters any more", fix="look into the server's log")
        return after.since(before) if before and after else None

    fields: dict[str, Any] = {}
    with recording(result, out, lambda: fields):
        counters = asyncio.run(gained())
        reported = None if counters is None else counters.as_dict()
        fields |= {"counters": reported, "diagnosis": diagnose_served(reported, c)}
    return result


def section(result: Result) -> Section:
    report = Section("Does speculation pay on this server?", "Nothing was seen before the run ended.")
    if result.data:
        counters, diagnosis = result.data["counters"], result.data["diagnosis"]
        report.lead = lead(diagnosis)
        report.tables += [reported(counters, result.settings["watch"])] if counters else []
        report.notes += [remark(line) for line in diagnosis["evidence"]]
    return report


def lead(diagnosis: dict[str, Any]) -> str:
    if diagnosis["cause"] == UNKNOWN:
        return f"Not diagnosed: {diagnosis['reason']}. Fix: {diagnosis['fix']}."
    f = diagnosis["forecast"]
    gain = f and f"predicted {times(f['now'])}"
    if diagnosis["cause"] == NOTHING:
        return f"Nothing is wrong: {gain}."
    return f"Cause: {diagnosis['cause']}{f', {gain}' if gain else ''}. Fix: {diagnosis['fix']}."


def reported(counters: dict[str, Any], seconds: float) -> Table:
    rows = []
    for quantity in (*NAMES, "acceptance_rate"):
        value, share = counters[quantity], quantity in ("accepted_at", "kv_usage", "acceptance_rate")
        several = value if isinstance(value, list) else [value]
        text = ", ".join(percent(each) if share else f"{each:.0f}" for each in several if each is not None)
        name = name_of(quantity, counters["server"]) if quantity in NAMES else "computed"
        rows.append([quantity.replace("_", " "), text or NOT_REPORTED, name])
    title = f"What {SERVERS[counters['server']]} reports, {seconds:g} s watched"
    return Table(title, [words(""), words("value"), words("its name")], rows)
