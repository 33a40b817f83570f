"""The first sentence of a report says what the interval says, and praises no loss."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.bench import report_bench, report_sweep
from slipstream.plan import report_doctor


def arm(value: float, low: float | None, high: float | None, note: str = "", label: str = "x") -> dict[str, Any]:
    gain = {"value": value, "low": low, "high": high, "note": note}
    return {
        "label": label, "plain": False, "draft_tokens": 4, "temperature": 0.0, "batch": 1, "values": {"label": label},
        "overall": {"speedup": gain, "stats": {"proposed": 0 if note == "no drafts" else 9}},
    }  # fmt: skip


@pytest.mark.parametrize("lead", [report_sweep.lead, report_bench.lead])
def test_a_loss_is_not_praised(lead):
    said = lead([arm(0.05, 0.04, 0.06), arm(0.07, 0.06, 0.08)])
    assert said.startswith("No ")
    assert "is faster than plain decoding. The least slow one: " in said
    assert "0.07x" in said
    assert "Fastest" not in said


@pytest.mark.parametrize("lead", [report_sweep.lead, report_bench.lead])
def test_what_is_not_significant_is_said_to_be(lead):
    for doubtful in (arm(1.2, 0.9, 1.6), arm(0.9, 0.8, 1.1)):
        assert "Not statistically significant: the 95% interval includes 1." in lead([doubtful])
    assert "Not statistically" not in lead([arm(1.2, 1.1, 1.3)])
    assert lead([arm(1.2, 1.1, 1.3)]).startswith("Fastest: ")


@pytest.mark.parametrize("lead", [report_sweep.lead, report_bench.lead])
def test_what_drafted_nothing_is_not_the_fastest(lead):
    silent = arm(1.07, None, None, "no drafts", "silent")
    said = lead([silent, arm(1.02, 1.01, 1.03, label="drafting")])
    assert said.startswith("Fastest: ")
    assert "drafting" in said
    assert "silent" not in said
    assert "Nothing was drafted: this is plain decoding" in lead([silent])


@pytest.mark.parametrize("lead", [report_sweep.lead, report_bench.lead])
def test_what_to_raise_is_said_where_there_is_no_interval(lead):
    assert "1.20x (few passes) over plain decoding. Not enough passes" in lead([arm(1.2, None, None, "few passes")])
    assert "raise --prompts" in lead([arm(1.2, None, None, "few prompts")])


def test_a_diagnosis_of_an_earlier_version_is_shown() -> None:
    found = {"reason": "", "cause": "nothing is wrong", "predicted": 1.2}
    assert "1.30x (1.20-1.40) over plain" in report_doctor.lead({"speedup": [1.3, 1.2, 1.4]}, found)
    assert "1.30x (few passes)" in report_doctor.lead(
        {"speedup": {"value": 1.3, "low": None, "high": None, "note": "few passes"}}, found
    )
