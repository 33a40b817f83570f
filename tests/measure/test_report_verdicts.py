"""Pages of verify and tune, also of runs that were interrupted."""

import pytest

from slipstream.cli.report import make_page, make_section
from slipstream.core.params import SamplingParams
from slipstream.llm import LLM
from slipstream.measure.benchmark import Contender
from slipstream.measure.prompts import Prompt, PromptSet
from slipstream.measure.results import Result
from slipstream.measure.tuning import TuneConfig, tune
from slipstream.verify.verification import VerifyConfig, verify
from tests.drafters.scripted_drafters import RandomDrafter
from tests.targets.toy import ToyTarget

PROMPTS = PromptSet("made up", [Prompt([1, 2], "a", "one <b>"), Prompt([3, 4, 0], "a", "$x$")], "0")


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    llm = LLM(ToyTarget(vocab=5, sharpness=1.0), RandomDrafter(5), draft_tokens=3)
    blind = Contender("blind", RandomDrafter(5, sampled=False), 3)
    config = VerifyConfig(params=SamplingParams(max_tokens=12), reach=0, texts=3)
    return {
        "verify": verify(llm, PROMPTS, config, label="random <b>"),
        "tune": tune(llm, [blind], PROMPTS, TuneConfig(tokens=8, rounds=1, confirm=1)),
    }


def test_one_page_of_both_whose_tables_say_what_was_found(results):
    report = make_page(list(results.values()))
    for part in ("No bug found in random &lt;b&gt;", "What limits the speed-up", "Which drafter and draft length?"):
        assert part in report
    assert "<b>" not in report.split("<main>")[1]
    rows = make_section(results["verify"]).tables[0].rows
    assert [row[:4] for row in rows[:3]] == [[3, 1, 2, 2], [1, 2, 2, 2], [2, 2, 2, 2]]
    assert [row[:2] for row in rows[3:]] == [["0 to 3", 2], ["0 to 3", 5], ["chosen", 5]]
    assert all(row[2] == row[3] > 10 for row in rows[3:]), "each text is identical"
    assert [row[-1] for row in rows] == ["ok"] * 6
    raced, limits = (table.rows for table in make_section(results["tune"]).tables[:2])
    assert raced[0][0] == limits[0][0]
    assert raced[0][0].startswith("blind, K=")
    assert len(limits[0]) == 2 + 4


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("tune", {"drafters": [], "raced": [], "choice": None, "configs": None}, "before any setting was confirmed"),
        ("verify", {"control": None, "greedy": [], "coupled": [], "distribution": [], "coverage": {}, "faults": [],
                    "verdict": "ok"}, "Nothing was compared"),
    ],
)  # fmt: skip
def test_interrupted_runs_have_a_page_too(kind, data, said):
    settings = {"drafter": "x", "draft_tokens": 3, "rule": "rejection", "reach": 0, "params": {"max_tokens": 8}}
    report = make_page([Result(kind, settings, {}, data)])
    assert said in report
    assert "the run was interrupted" in report.lower()
