"""The first sentence of a report says what the interval says, and praises no loss."""

from __future__ import annotations

from typing import Any

from slipstream.bench.report_bench import lead


def arm(value: float, low: float | None, high: float | None, note: str = "", label: str = "x") -> dict[str, Any]:
    gain = {"value": value, "low": low, "high": high, "note": note}
    return {
        "label": label, "plain": False, "draft_tokens": 4, "temperature": 0.0, "batch": 1,
        "overall": {"speedup": gain, "stats": {"proposed": 0 if note == "no drafts" else 9}},
    }  # fmt: skip


def test_a_loss_is_not_praised():
    said = lead([arm(0.05, 0.04, 0.06), arm(0.07, 0.06, 0.08)])
    assert said.startswith("No ")
    assert "is faster than plain decoding. The least slow one: " in said
    assert "0.07x" in said
    assert "Fastest" not in said


def test_what_is_not_significant_is_said_to_be():
    for doubtful in (arm(1.2, 0.9, 1.6), arm(0.9, 0.8, 1.1)):
        assert "Not statistically significant: the 95% interval includes 1." in lead([doubtful])
    assert "Not statistically" not in lead([arm(1.2, 1.1, 1.3)])
    assert lead([arm(1.2, 1.1, 1.3)]).startswith("Fastest: ")


def test_what_drafted_nothing_is_not_the_fastest():
    silent = arm(1.07, None, None, "no drafts", "silent")
    said = lead([silent, arm(1.02, 1.01, 1.03, label="drafting")])
    assert said.startswith("Fastest: ")
    assert "drafting" in said
    assert "silent" not in said
    assert "Nothing was drafted: this is plain decoding" in lead([silent])


def test_what_to_raise_is_said_where_there_is_no_interval():
    assert "1.20x (few passes) over plain decoding. Not enough passes" in lead([arm(1.2, None, None, "few passes")])
    assert "raise --prompts" in lead([arm(1.2, None, None, "few prompts")])
