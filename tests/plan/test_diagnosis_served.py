"""Made-up servers whose steps take known times: what a row costs, the speed-up and the cause are found again."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.bench.counters import NOT_REPORTED, Counters
from slipstream.bench.results import Result
from slipstream.cli.reports import section
from slipstream.plan.diagnosis_served import KIND, diagnose_served, step_costs
from slipstream.theory.closed_forms import expected_length, geometric_rates

C = 0.1
FIXED = 0.010
"""Seconds of a target pass without its rows."""


def counters(rates: list[float], drafts: int = 1000, server: str = "vllm", **more: float) -> dict[str, Any]:
    """Of a server whose every step drafts; rates by position."""
    at = {f"accepted_at {i}": rate * drafts for i, rate in enumerate(rates, start=1)}
    accepted = sum(at.values())
    values = {"drafts": drafts, "draft_tokens": len(rates) * drafts, "accepted_tokens": accepted,
              "output_tokens": drafts + accepted, "requests": 8, "running": 0}  # fmt: skip
    return Counters(server, values | at | more).as_dict()


def arm(batch: int, rates: list[float], row: float, **more: Any) -> dict[str, Any]:
    """A load of so many requests at once; row: seconds that a row costs."""
    plain, tau = FIXED + row * batch, expected_length(rates)
    step = FIXED + row * batch * (1 + len(rates)) + C * len(rates) * plain
    found = counters(rates) | more
    return {
        "load": f"{batch} at once", "concurrency": batch, "counters": found,
        "next": {"mean": step / tau, "p50": step / tau},
        "tokens_per_second": {"value": batch * tau / step}, "acceptance_rate": found["acceptance_rate"],
        "mean_acceptance_length": found["mean_acceptance_length"],
    }  # fmt: skip


def arms(rates: list[float], row: float) -> list[dict[str, Any]]:
    return [arm(batch, rates, row) for batch in (1, 8)]


def said(made: list[dict[str, Any]]) -> str:
    shown = section(Result(KIND, {}, {}, {"arms": made, "diagnosis": diagnose_served(made, C)}))
    return shown.lead


GOOD = geometric_rates(0.8, 4)


def test_the_cost_of_rows_and_the_speed_up_are_those_of_the_server() -> None:
    found = diagnose_served(arms(GOOD, row=0.0002), C)
    for (one, eight), batch in (((s.target, s.target), s.batch) for s in step_costs(arms(GOOD, row=0.0002), C)):
        assert one(8 * 5) - eight(8) == pytest.approx(32 * 0.0002)
        assert one(batch) == pytest.approx(FIXED + batch * 0.0002)
    for batch, f in zip((1, 8), found["forecasts"], strict=True):
        plain = FIXED + batch * 0.0002
        step = FIXED + 5 * batch * 0.0002 + 0.4 * plain
        assert f["now"] == pytest.approx(expected_length(GOOD) * plain / step)
    assert (found["cause"], found["fix"]) == ("nothing is wrong", "")
    assert "rows as measured under these loads" in found["evidence"][-1]


def test_positions_that_are_hardly_ever_accepted_are_named_and_a_shorter_draft_is_recommended_by_its_setting() -> None:
    rates = [0.8, 0.6, 0.05, 0.01, 0.0]
    found = diagnose_served(arms(rates, row=0.0), C)
    assert found["cause"] == "drafts too long"
    assert found["fix"] == 'draft 2 tokens: "num_speculative_tokens": 2 in --speculative-config'
    assert "from position 3 on, fewer than 10% of the drafts are accepted" in found["evidence"]
    sglang = [each | {"counters": each["counters"] | {"server": "sglang"}} for each in arms(rates, row=0.0)]
    assert "--speculative-num-steps 2 --speculative-num-draft-tokens 3" in said(sglang)


def test_no_other_length_is_recommended_where_drafts_differ_in_length() -> None:
    """Deep positions then look worse than they are, as few drafts reach them."""
    short = [arm(1, [0.8, 0.6, 0.05, 0.01, 0.0], 0.0, draft_tokens=2500.0)]
    found = diagnose_served(short, C)
    assert (found["cause"], found["forecasts"][0]["best_length"]) == ("nothing is wrong", 5)
    assert "drafts have 2.5 tokens on average, so no other length is judged" in found["evidence"]


def test_a_batch_whose_rows_are_not_free_is_found_by_the_times_of_two_loads() -> None:
    made = arms(geometric_rates(0.6, 4), row=0.004)
    found = diagnose_served(made, C)
    assert found["cause"] == "batch too large"
    best = found["forecasts"][0]["best_length"]
    assert f'"num_speculative_tokens_per_batch_size": [[1, 1, {best}], [2, 2, 0]]' in found["fix"]
    assert found["forecasts"][0]["best"] > 1.05 > found["forecasts"][1]["best"]


def test_low_acceptance_is_the_cause_if_no_length_pays_anywhere() -> None:
    found = diagnose_served(arms(geometric_rates(0.1, 4), row=0.0001), C)
    assert found["cause"] == "acceptance too low"
    assert "change the drafter" in found["fix"]
    assert [f["best_length"] for f in found["forecasts"]] == [0, 0]


def test_a_server_that_drafts_nothing_is_told_from_one_that_reports_nothing() -> None:
    off = counters([]) | {"drafts": None, "accepted_at": None}
    assert said([arm(1, GOOD, 0.0, **off)]).startswith("Cause: nothing is drafted. Fix: switch speculation on")
    silent = arm(1, GOOD, 0.0) | {"counters": None, "acceptance_rate": None, "mean_acceptance_length": None}
    assert "Not diagnosed: the server reports no counters at /metrics. Fix: start llama-server with --metrics" in said(
        [silent]
    )
    (loads,) = section(Result(KIND, {}, {}, {"arms": [silent], "diagnosis": diagnose_served([silent], C)})).tables
    assert loads.rows[0][1] > 0
    assert loads.rows[0][3:5] == [NOT_REPORTED, NOT_REPORTED]


def test_an_old_llama_server_that_counts_no_drafts_is_not_taken_for_one_that_drafts_nothing() -> None:
    old = [arm(1, GOOD, 0.0, server="llamacpp", drafts=None, accepted_at=None)]
    assert "Not diagnosed: this llama-server does not report drafts. Fix: use a newer one" in said(old)


def test_acceptance_that_is_not_reported_by_position_allows_no_forecast() -> None:
    made = [arm(1, GOOD, 0.0, server="sglang", draft_tokens=None, accepted_at=None)]
    assert "Not diagnosed: SGLang does not report acceptance by position" in said(made)
    assert diagnose_served(made, C)["evidence"][0] == f"a step with a draft gives {expected_length(GOOD):.2f} tokens"


def test_a_server_that_stops_drafting_in_large_batches_is_judged_by_the_small_ones() -> None:
    quiet = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0, "accepted_at": None,
             "mean_acceptance_length": None, "acceptance_rate": None, "tokens_per_step": 1.0}  # fmt: skip
    found = diagnose_served([arm(1, GOOD, 0.0001), arm(8, GOOD, 0.0001, **quiet)], C)
    assert found["cause"] == "nothing is wrong"
    assert found["forecasts"][1] is None


def test_counters_that_were_only_watched_have_no_times_so_rows_are_taken_to_cost_nothing() -> None:
    watched = arm(1, GOOD, 0.0, running=6.0) | {"concurrency": None, "next": None, "tokens_per_second": None}
    found = diagnose_served([watched], C)
    assert found["forecasts"][0]["batch"] == 6
    assert found["forecasts"][0]["now"] == pytest.approx(expected_length(GOOD) / 1.4)
    assert "rows taken to cost nothing" in found["evidence"][-1]
    idle = diagnose_served([watched | {"counters": counters([]) | {"output_tokens": 0.0, "drafts": 0.0}}], C)
    assert (idle["cause"], idle["reason"]) == ("not diagnosed", "no request ran")


def test_times_that_contradict_each_other_give_rows_that_cost_nothing_or_all_the_same() -> None:
    faster = [arm(1, GOOD, 0.0), arm(8, GOOD, 0.0) | {"next": {"mean": 1e-6, "p50": 1e-6}}]
    slower = [arm(1, GOOD, 0.0), arm(8, GOOD, 0.0) | {"next": {"mean": 9.0, "p50": 9.0}}]
    for made, growth in ((faster, 1.0), (slower, 4.0)):
        target = step_costs(made, C)[1].target
        assert target is not None
        assert target(4) / target(1) == pytest.approx(growth)


def test_an_interrupted_run_has_a_report() -> None:
    found = section(Result(KIND, {}, {}, {"arms": [], "diagnosis": diagnose_served([], C)}))
    assert found.lead == "Nothing was measured before the run ended."
