"""`slipstream tune --base-url URL`: whether speculation pays on a running server, and which setting would help.

The server's counters give the acceptance by position. Loads of one and of several requests at once give the time of a
step at two numbers of rows, and so what a row costs; what a draft token costs cannot be seen from outside and is
assumed. From these `forecast` predicts the speed-up, also of shorter drafts. Nothing is known of longer ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from slipstream.bench.configs import STARTED_WITH
from slipstream.bench.counters import SERVERS
from slipstream.bench.endpoint import Endpoint
from slipstream.bench.load_client import LoadClient
from slipstream.bench.load_figures import Pass, arm_data
from slipstream.bench.provenance import conditions
from slipstream.bench.results import Result, recording
from slipstream.bench.tables import counted, percent
from slipstream.errors import ServedError
from slipstream.plan.diagnosis import ACCEPTANCE, BATCH, FINE, FIXES, LENGTH, NOTHING, UNKNOWN
from slipstream.theory.cost_curve import CostCurve
from slipstream.theory.forecast import Rates, StepCosts, forecast

KIND = "tune-served"
OFF = "nothing is drafted"
HARDLY = 0.1
"""Positions that a smaller share of the drafts accepts are named."""
FULL = 0.9
"""If drafts are shorter than this share of the longest on average, rates by position say little of other lengths."""


def diagnose_served(arms: Seq[Mapping[str, Any]], c: float) -> dict[str, Any]:
    """The diagnosis from the arms of a load test; a pure function. c: cost of a draft token, in decode steps.

    cause, fix, reason, evidence  as in `Diagnosis`.
    forecasts   for each arm: the "longest" draft, the predicted speed-up "now", and the "best_length" up to the longest
                with its speed-up "best"; None without acceptance by position.
    """
    made: dict[str, Any] = {"cause": UNKNOWN, "fix": "", "reason": "", "evidence": [], "forecasts": [None] * len(arms)}
    told = [arm["counters"] for arm in arms if arm["counters"]]
    if not told:
        fix = "start llama-server with --metrics, SGLang with --enable-metrics, vLLM without --disable-log-stats"
        return made | {"reason": "the server reports no counters at /metrics", "fix": fix}
    last = ([each for each in told if each["drafts"]] or told)[-1]
    made["evidence"] = evidence(last)
    if not any(each["output_tokens"] for each in told):
        return made | {"reason": "no request ran", "fix": "leave --watch out, then requests are sent"}
    if last["drafts"] is None and last["server"] == "llamacpp":
        return made | {"reason": "this llama-server does not report drafts", "fix": "use a newer one"}
    if not last["drafts"]:
        fix = "switch speculation on; slipstream tune without --base-url writes the settings of each server"
        return made | {"cause": OFF, "fix": fix}
    if not last["accepted_at"]:
        why = f"{SERVERS[last['server']]} does not report acceptance by position"
        return made | {"reason": why, "fix": "slipstream bench --serve A --serve B, B without speculation"}
    found: list[dict[str, Any] | None] = []
    for arm, costs in zip(arms, step_costs(arms, c), strict=True):
        known = arm["counters"]
        if not known or not known["accepted_at"]:
            found.append(None)
            continue
        longest, drafted = len(known["accepted_at"]), known["draft_tokens"] / known["drafts"]
        usual = max(1, round(drafted))
        k, now = longest, known["mean_acceptance_length"] / costs.step(usual)
        gain = now
        if drafted > FULL * longest:
            best = forecast(Rates(known["accepted_at"]), costs)
            k, gain = best.draft_tokens, best.speedup
        else:
            made["evidence"].append(f"drafts have {drafted:.1f} tokens on average, so no other length is judged")
        found.append({"batch": costs.batch, "longest": longest, "now": now, "best_length": k, "best": gain})
        made["evidence"].append(f"costs, {arm['load']}: {costs.assumptions(usual)}")
    return made | verdict(last["server"], [each for each in found if each]) | {"forecasts": found}


def verdict(server: str, found: Seq[Mapping[str, Any]]) -> dict[str, str]:
    """Cause and fix. found: the forecasts, the smallest batch first."""
    paying = [f for f in found if max(f["now"], f["best"]) >= FINE]
    if not paying:
        return {"cause": ACCEPTANCE, "fix": FIXES[ACCEPTANCE]}
    if found[-1] is not paying[-1]:
        b, k = paying[-1]["batch"], paying[-1]["best_length"] or paying[-1]["longest"]
        return {
            "cause": BATCH,
            "fix": f"{FIXES[BATCH]}, here {b}: {STARTED_WITH[server][1].format(b=b, b1=b + 1, k=k)}",
        }
    gain, k, longest = max((f["best"] / f["now"], f["best_length"], f["longest"]) for f in found)
    if gain >= FINE and 0 < k < longest:
        return {"cause": LENGTH, "fix": f"draft {counted(k, 'token')}: {STARTED_WITH[server][0].format(k=k, k1=k + 1)}"}
    return {"cause": NOTHING, "fix": ""}


def step_costs(arms: Seq[Mapping[str, Any]], c: float) -> list[StepCosts]:
    """For each arm. A step of a batch b with k draft tokens each takes a + r b (1 + k) for the target's rows, and c k
    plain steps, each a + r b, for drafting. The first and the last arm give a and r; of one arm, rows cost nothing."""
    batches, timed = [], []  # u, v and the seconds of a step: u a + v r
    for arm in arms:
        known = arm["counters"] or {}
        b = arm["concurrency"] or max(1, round(known.get("running") or 0))
        batches.append(b)
        if arm["next"] and known.get("tokens_per_step"):
            k = (known["draft_tokens"] or 0.0) / known["output_tokens"] * known["tokens_per_step"]  # in all steps
            timed.append((1 + c * k, b * (1 + k + c * k), arm["next"]["mean"] * known["tokens_per_step"]))
    curve, basis = None, "rows taken to cost nothing"
    if len(timed) > 1:
        (u1, v1, t1), (u2, v2, t2) = timed[0], timed[-1]
        if u1 * v2 > u2 * v1:
            r = max(0.0, (u1 * t2 - u2 * t1) / (u1 * v2 - u2 * v1))
            a = (t1 - r * v1) / u1
            a, r = (a, r) if a > 0 else (0.0, t2 / v2)  # below 0 only by noise: then each row costs the same
            curve, basis = CostCurve((1, 2), (a + r, a + 2 * r)), "rows as measured under these loads"
    return [StepCosts(c, curve, batch, basis=basis) for batch in batches]


def evidence(counters: Mapping[str, Any]) -> list[str]:
    """What the counters say, in sentences."""
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

    async def gained() -> Pass:
        async with LoadClient(place, place.timeout) as client:
            before = await client.counters()
            await asyncio.sleep(seconds if before else 0)
            after = await client.counters()
        if before and not after:
            raise ServedError(f"{place.base_url} reports no counters any more", fix="look into the server's log")
        return Pass(seconds or 1.0, [], after.since(before) if before and after else None)

    arms: list[dict[str, Any]] = []
    with recording(result, out, lambda: {"arms": arms, "diagnosis": diagnose_served(arms, c)}):
        arms.append({"load": f"{seconds:g} s watched", "concurrency": None, **arm_data([asyncio.run(gained())])})
    return result
