"""The first sentence of a report says what the interval says, and praises no loss."""

import pytest

from slipstream.measure.estimates import CHANCE, Estimate
from slipstream.measure.measurements import BenchArm, Figures
from slipstream.measure.report_bench import write_lead

UNSURE = "Not statistically significant: the 95% interval includes 1."


def arm(value: float, low: float | None, high: float | None, note: str = "", label: str = "x") -> BenchArm:
    stats = {"accepted": 0 if note in CHANCE else 9}
    overall = Figures(Estimate(100.0, 90.0, 110.0), Estimate(value, low, high, note), 0.1, 0.1, 0.5, 2.0, [], {}, stats)
    return BenchArm(label, False, 4, 0.0, 1, 0, 3, True, "identical", [], overall, {}, {})


REJECTED = arm(1.18, None, None, "no draft accepted", "suffix")
SILENT = arm(1.07, None, None, "no drafts", "silent")
LEADS = {
    "a loss": ([arm(0.05, 0.04, 0.06), arm(0.07, 0.06, 0.08)],
               ("No drafter is faster than plain decoding. The least slow one: ", "0.07x"), ("Fastest", UNSURE)),
    "a gain": ([arm(1.2, 1.1, 1.3)], ("Fastest: ",), (UNSURE,)),
    "an unsure gain": ([arm(1.2, 0.9, 1.6)], (UNSURE,), ()),
    "an unsure loss": ([arm(0.9, 0.8, 1.1)], (UNSURE,), ()),
    "what drafted nothing beside a gain": ([SILENT, arm(1.02, 1.01, 1.03, label="drafting")],
                                           ("Fastest: drafting",), ("silent",)),
    "what drafted nothing": ([SILENT], ("No drafter is faster", "Nothing was drafted: this is plain decoding",), ()),
    "what was never accepted": ([REJECTED, SILENT], ("No drafter is faster than plain decoding. Measured: suffix",
                                                     "No draft token was accepted"), ("Fastest",)),
    "what was never accepted beside a loss": ([REJECTED, arm(0.9, 0.8, 0.95)], ("The least slow one: x",), ("suffix",)),
    "few passes": ([arm(1.2, None, None, "few passes")],
                   ("1.20x (few passes) over plain decoding. Not enough passes",), ()),
    "few prompts": ([arm(1.2, None, None, "few prompts")], ("raise --prompts",), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", LEADS)
def test_the_lead_says_what_is_shown_and_no_more(name: str) -> None:
    arms, shown, hidden = LEADS[name]
    said = write_lead(arms)
    assert all(part in said for part in shown)
    assert not any(part in said for part in hidden)
