"""Made-up counters: what they say, the predicted speed-up and the cause."""

from typing import Any

import pytest

from slipstream.bench.counters import Counters
from slipstream.bench.results import Result
from slipstream.cli.report import section
from slipstream.plan.diagnosis_served import KIND, diagnose_served
from slipstream.theory.closed_forms import expected_length, geometric_rates

C = 0.1


def counters(rates: list[float], drafts: int = 1000, server: str = "vllm", **more: float) -> dict[str, Any]:
    """Of a server whose every step drafts; rates by position."""
    at = {f"accepted_at {i}": rate * drafts for i, rate in enumerate(rates, start=1)}
    accepted = sum(at.values())
    values = {"drafts": drafts, "draft_tokens": len(rates) * drafts, "accepted_tokens": accepted,
              "output_tokens": drafts + accepted, "requests": 8, "running": 0}  # fmt: skip
    return Counters(server, values | at | more).as_dict()


def said(counted: dict[str, Any] | None) -> str:
    data = {"counters": counted, "diagnosis": diagnose_served(counted, C)}
    return section(Result(KIND, {"watch": 5.0}, {}, data)).lead


GOOD = geometric_rates(0.8, 4)


def test_the_speed_up_is_that_of_rows_that_cost_nothing() -> None:
    diagnosis = diagnose_served(counters(GOOD, running=6.0), C)
    assert diagnosis["forecast"]["now"] == pytest.approx(expected_length(GOOD) / 1.4)
    assert (diagnosis["cause"], diagnosis["fix"]) == ("nothing is wrong", "")
    assert "batch 6; rows taken to cost nothing" in diagnosis["evidence"][-1]
    assert said(counters(GOOD)) == f"Nothing is wrong: predicted {expected_length(GOOD) / 1.4:.2f}x."


def test_positions_that_are_hardly_ever_accepted_are_named_and_a_shorter_draft_is_recommended_by_its_setting() -> None:
    rates = [0.8, 0.6, 0.05, 0.01, 0.0]
    diagnosis = diagnose_served(counters(rates), C)
    assert diagnosis["cause"] == "drafts too long"
    assert diagnosis["fix"] == 'draft 2 tokens: "num_speculative_tokens": 2 in --speculative-config'
    assert "from position 3 on, fewer than 10% of the drafts are accepted" in diagnosis["evidence"]
    sglang = counters(rates) | {"server": "sglang"}
    assert "--speculative-num-steps 2 --speculative-num-draft-tokens 3" in said(sglang)


def test_no_other_length_is_recommended_where_drafts_differ_in_length() -> None:
    """Deep positions then look worse than they are, as few drafts reach them."""
    diagnosis = diagnose_served(counters([0.8, 0.6, 0.05, 0.01, 0.0]) | {"draft_tokens": 2500.0}, C)
    assert (diagnosis["cause"], diagnosis["forecast"]["best_length"]) == ("nothing is wrong", 5)
    assert "drafts have 2.5 tokens on average, so no other length is judged" in diagnosis["evidence"]


def test_low_acceptance_is_the_cause_if_no_length_pays() -> None:
    diagnosis = diagnose_served(counters(geometric_rates(0.1, 4)), C)
    assert diagnosis["cause"] == "acceptance too low"
    assert "change the drafter" in diagnosis["fix"]
    assert diagnosis["forecast"]["best_length"] == 0


REFUSED = {
    "no page": (None, "the server reports no counters at /metrics. Fix: start llama-server with --metrics"),
    "old": ({"server": "llamacpp", "drafts": None}, "this llama-server does not report drafts. Fix: use a newer one"),
    "no positions": ({"server": "sglang", "draft_tokens": None}, "SGLang does not report acceptance by position"),
    "idle": ({"output_tokens": 0.0, "drafts": 0.0}, "no request ran"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_server_does_not_report_is_not_judged(name: str) -> None:
    """An old server that counts no drafts is not taken for one that drafts nothing."""
    more, reason = REFUSED[name]
    counted = None if more is None else counters(GOOD) | {"accepted_at": None} | more
    assert said(counted).startswith(f"Not diagnosed: {reason}")
    diagnosis = diagnose_served(counted, C)
    assert (diagnosis["cause"], diagnosis["forecast"]) == ("not diagnosed", None)
    if name == "no positions":
        assert diagnosis["evidence"][0] == f"a step with a draft gives {expected_length(GOOD):.2f} tokens"


def test_a_server_that_drafts_nothing_is_told_how_to_draft() -> None:
    off = counters([]) | {"drafts": None, "accepted_at": None}
    assert said(off).startswith("Cause: nothing is drafted. Fix: switch speculation on")


def test_every_counter_is_shown_with_its_name_or_as_not_reported() -> None:
    counted = counters(GOOD) | {"preemptions": None}
    data = {"counters": counted, "diagnosis": diagnose_served(counted, C)}
    page_section = section(Result(KIND, {"watch": 5.0}, {}, data))
    assert page_section.tables[0].title == "What vLLM reports, 5 s watched"
    rows = {row[0]: list(row[1:]) for row in page_section.tables[0].texts()}
    assert rows["accepted at"] == ["80%, 64%, 51%, 41%", "spec_decode_num_accepted_tokens_per_pos_total"]
    assert rows["preemptions"][0] == "not reported"
    assert rows["acceptance rate"] == ["59%", "computed"]


def test_an_interrupted_run_has_a_report() -> None:
    assert section(Result(KIND, {}, {}, {})).lead == "Nothing was seen before the run ended."
