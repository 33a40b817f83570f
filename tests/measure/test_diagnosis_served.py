"""Made-up counters: what they say, the predicted speed-up and the cause."""

from typing import Any

import pytest

from slipstream.cli.report import make_section
from slipstream.measure.counters import Counters
from slipstream.measure.diagnosis_served import KIND, WatchedServer, diagnose_served
from slipstream.measure.results import Result
from slipstream.measure.tables import Estimate
from slipstream.theory.closed_forms import expect_length, geometric_rates

C = 0.1


def counters(rates: list[float], drafts: int = 1000, server: str = "vllm", **more: float) -> dict[str, Any]:
    """Of a server whose every step drafts; rates by position."""
    at = {f"accepted_at {i}": rate * drafts for i, rate in enumerate(rates, start=1)}
    accepted = sum(at.values())
    values = {"drafts": drafts, "draft_tokens": len(rates) * drafts, "accepted_tokens": accepted,
              "output_tokens": drafts + accepted, "first_tokens": 0, "running": 0}  # fmt: skip
    return Counters(server, values | at | more).as_dict()


def said(counted: dict[str, Any] | None) -> str:
    data = WatchedServer(counted, diagnose_served(counted, C))
    return make_section(Result(KIND, {"watch": 5.0}, {}, data)).lead


GOOD = geometric_rates(0.8, 4)
MOST = expect_length(GOOD)


def test_the_speed_up_is_at_most_the_tokens_of_a_step_and_not_predicted_without_the_time_of_a_plain_one() -> None:
    diagnosis = diagnose_served(counters(GOOD, running=6.0), C)
    assert (diagnosis.cause, diagnosis.forecast.most) == ("not diagnosed", pytest.approx(MOST))
    assert diagnosis.forecast.now == pytest.approx(MOST / 1.4)
    assert f"assumed: verification is free, and a draft token costs 0.1 steps: {MOST / 1.4:.2f}x" in diagnosis.evidence
    lead = said(counters(GOOD, running=128.0))
    assert lead.startswith(
        f"Not diagnosed: at most {MOST:.2f}x (1,000 decode steps) under this load, about 128 requests"
    )
    assert "what a step takes without it is not known" in lead
    assert lead.endswith("slipstream bench --serve A --serve B --concurrency 128.")


def test_steps_without_a_draft_and_first_tokens_count() -> None:
    """Of 2,000 further decode steps none drafts; each of 500 requests has a first token, which no step gives."""
    more = {"output_tokens": 1000 + sum(GOOD) * 1000 + 2000 + 500, "requests": 8, "first_tokens": 500}
    diagnosis = diagnose_served(counters(GOOD, **more), C)
    assert diagnosis.forecast.most == pytest.approx(1 + sum(GOOD) / 3)


MEASURED, GAIN = Estimate(0.8, 0.7, 0.9), Estimate(2.0, 1.8, 2.2)


def test_what_the_times_of_steps_tell_decides_if_it_is_clear() -> None:
    """A gain has to be larger than what speculation may cost steps without drafts, which these times do not show."""
    known = counters(GOOD, running=8.0)
    costly, fine = (diagnose_served(known, 0.0, each) for each in (MEASURED, GAIN))
    assert (costly.cause, fine.cause) == ("drafts cost more than they gain", "nothing is wrong")
    assert "0.80x (0.70-0.90) against this server's own steps without drafts" in costly.reason
    assert "switch speculation off" in costly.fix
    for unclear in (Estimate(0.8, 0.7, 1.1), Estimate(1.1, 1.05, 1.15)):
        diagnosis = diagnose_served(known, 0.0, unclear)
        assert (diagnosis.cause, "against this server's own steps" in diagnosis.reason) == ("not diagnosed", True)


def test_positions_that_are_hardly_ever_accepted_are_named_and_a_shorter_draft_is_recommended_by_its_setting() -> None:
    rates = [0.8, 0.6, 0.05, 0.01, 0.0]
    diagnosis = diagnose_served(counters(rates), C)
    assert diagnosis.cause == "drafts too long"
    assert "a draft token costs 0.1 decode steps (--c; not measured), 2 tokens give 2.00x" in diagnosis.reason
    assert diagnosis.fix == 'draft 2 tokens: "num_speculative_tokens": 2 in --speculative-config'
    assert "from position 3 on, fewer than 10% of the drafts are accepted" in diagnosis.evidence
    assert "draft 2 tokens: see its options" in said(counters(rates) | {"server": "sglang"})


def test_no_other_length_is_recommended_where_drafts_differ_in_length() -> None:
    """Deep positions then look worse than they are, as few drafts reach them."""
    diagnosis = diagnose_served(counters([0.8, 0.6, 0.05, 0.01, 0.0]) | {"draft_tokens": 2500.0}, C)
    assert (diagnosis.cause, diagnosis.forecast.best_length) == ("not diagnosed", 5)
    assert "drafts have 2.5 tokens on average, so no other length is judged" in diagnosis.evidence


def test_what_cannot_gain_even_for_free_has_low_acceptance_or_too_few_drafts() -> None:
    diagnosis = diagnose_served(counters(geometric_rates(0.03, 4), drafts=5000), C)
    assert (diagnosis.cause, "change the drafter" in diagnosis.fix) == ("acceptance too low", True)
    rare = diagnose_served(counters(GOOD, drafts=50, output_tokens=5000.0), C)
    assert (rare.cause, "at most 1.02x" in rare.reason) == ("too few steps draft", True)
    seen = diagnose_served(counters(geometric_rates(0.03, 4), drafts=20), C)
    assert (seen.cause, "20 decode steps" in seen.reason) == ("not diagnosed", True), "too few to say so"


def test_a_server_without_acceptance_by_position_is_diagnosed_without_other_lengths() -> None:
    sglang = counters(GOOD, running=3.0) | {"server": "sglang", "draft_tokens": None, "accepted_at": None}
    assert said(sglang).startswith(
        f"Not diagnosed: at most {MOST:.2f}x (1,000 decode steps) under this load, about 3 requests at once"
    )
    assert "SGLang does not report acceptance by position" in diagnose_served(sglang, C).evidence[-1]


REFUSED: dict[str, tuple[dict[str, Any] | None, str]] = {
    "no page": (None, "/metrics has no counters of vLLM, SGLang, llama-server or Slipstream. Fix: start llama-server"),
    "router": ({"output_tokens": None}, "/metrics of vLLM does not count output tokens, as on a router"),
    "two models": ({"models": ["a", "b"]}, "/metrics adds up several models: a, b"),
    "old": ({"server": "llamacpp", "drafts": None}, "this llama-server does not report drafts. Fix: use a newer one"),
    "old SGLang": ({"server": "sglang", "drafts": None, "accept_length": 2.5}, "this SGLang counts no verification"),
    "idle": ({"output_tokens": 0.0, "drafts": 0.0}, "no request ran"),
    "none ended": ({"output_tokens": 0.0, "running": 2.0}, "no token was counted yet; most servers count when"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_server_does_not_report_is_not_judged(name: str) -> None:
    """An old server that counts no drafts is not taken for one that drafts nothing, a router not for an idle server."""
    more, reason = REFUSED[name]
    counted = None if more is None else counters(GOOD) | more
    assert said(counted).startswith(f"Not diagnosed: {reason}")
    diagnosis = diagnose_served(counted, C)
    assert (diagnosis.cause, diagnosis.forecast) == ("not diagnosed", None)


@pytest.mark.parametrize("running", [1.0, 128.0])
def test_a_server_that_drafts_nothing_is_told_how_to_find_out_whether_it_should_under_its_load(running: float) -> None:
    off = counters([], running=running) | {"drafts": None, "accepted_at": None}
    assert said(off).startswith(
        "Cause: nothing is drafted: counters cannot show whether speculation would pay at about"
    )
    assert f"--concurrency {running:.0f}" in said(off)
    assert "switch speculation on" not in said(off)


def test_every_counter_is_shown_with_its_name_or_as_not_reported() -> None:
    counted = counters(GOOD) | {"preemptions": None}
    data = WatchedServer(counted, diagnose_served(counted, C))
    page_section = make_section(Result(KIND, {"watch": 5.0}, {}, data))
    assert page_section.tables[0].title == "What vLLM reports, 5 s watched"
    rows = {row[0]: list(row[1:]) for row in page_section.tables[0].texts()}
    assert rows["accepted at"] == ["80%, 64%, 51%, 41%", "spec_decode_num_accepted_tokens_per_pos_total"]
    assert rows["preemptions"][0] == "not reported"
    assert rows["acceptance rate"] == ["59%", "computed"]
    assert "the time of a step on a server that does not speculate" in page_section.notes[-1]


def test_an_interrupted_run_has_a_report() -> None:
    assert make_section(Result(KIND, {}, {}, {})).lead == "Nothing was seen before the run ended."
