"""The results document and the table, from a made-up session."""

import json
from typing import Any

import pytest

from benchmarks.contenders import CONTENDERS
from benchmarks.figures import FIGURES, agreement, judge, spread
from benchmarks.markdown import beside
from benchmarks.prompts import Prompt
from benchmarks.report import assemble, markdown
from benchmarks.session import Session

SECONDS = {"plain": 0.6, "draft": 0.3, "int8": 0.5, "plain_edit": 0.6, "ngram_edit": 0.2, "transformers": 1.8}
STATS = {
    "tokens": 128, "steps": 64, "proposed": 256, "accepted": 64,
    "seconds": {"draft": 0.1, "target": 0.4, "verify": 0.02, "host": 0.01},
}  # fmt: skip
PROMPTS = {"code": [Prompt([1]), Prompt([2])], "edit": [Prompt([3]), Prompt([4], 90)]}
PROVENANCE = {
    "date": "2026-01-01T00:00:00+00:00", "commit": "abc", "command": "python -m benchmarks", "threads": 2,
    "dtype": "float32",
    "machine": {"cpu": "X", "cores": 2}, "versions": {"slipstream": {"torch": "2"}},
    "neighbours": 0.01,
}  # fmt: skip


def session() -> Session:
    session = Session("t", "d")
    for key, seconds in SECONDS.items():
        session.cells[key] = [[seconds] * 3, [seconds] * 3]
        session.chosen[key] = 4 if CONTENDERS[key].lengths else 0
        session.outputs[key] = [[5, 6], [7, 8]]
    session.outputs["transformers"] = [[5, 6], [7, 9]]
    session.counts["draft"] = [STATS]
    session.skipped |= dict.fromkeys(("genai", "genai_draft"), "genai is not installed: run `make peers`")
    session.skip(["transformers_draft"], "it died:\nRuntimeError: no memory")
    return session


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads(json.dumps(assemble(session(), list(FIGURES), PROMPTS, PROVENANCE)))


def test_every_figure_has_a_row_with_a_verdict_in_document_and_table(results):
    rows = {row["key"]: row for row in results["figures"]}
    assert rows.keys() == FIGURES.keys()
    assert rows["plain_vs_transformers"]["verdict"] == "reached"
    assert rows["plain_vs_transformers"]["value"] == pytest.approx(3.0)
    table = {line.split("|")[1].strip(): line for line in markdown(results).splitlines() if line.startswith("|")}
    for key, verdict, shown in (
        ("int8_vs_float32", "missed", "**missed**"),
        ("int8_vs_float32", "missed", "1.20x"),
        ("plain_vs_genai", "skipped", "skipped: genai is not installed: run `make peers`"),
        ("draft_vs_transformers", "skipped", "skipped: RuntimeError: no memory"),
    ):
        assert rows[key]["verdict"] == verdict
        assert shown in table[FIGURES[key].text]


def test_contenders_have_their_acceptance_and_where_their_texts_differ(results):
    row = next(row for row in results["contenders"] if row["key"] == "draft")
    assert (row["acceptance_rate"], row["mean_acceptance_length"], row["draft_tokens"]) == (0.25, 2.0, 4)
    note = "transformers, generate (code): 50 % of the prompts identical, first difference at token 1"
    assert note in markdown(results)


def test_agreement_names_the_first_difference_a_spread_its_quartiles_and_bounds_their_side():
    assert agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 8]]) == {
        "identical": 0.5,
        "divergences": [{"prompt": 1, "token": 1}],
    }
    assert agreement([[1, 2]], [[1]])["divergences"] == [{"prompt": 0, "token": 1}]
    assert spread([1, 2, 3, 4, 5]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}
    series = {"outside_draft": [[0.05]], "step_draft": [[1.0]], "rows8_int8": [[1.5]], "rows1_int8": [[1.0]]}
    assert judge("outside_draft", series, {})["verdict"] == "reached"
    assert judge("rows_int8", series, {})["verdict"] == "missed"


def test_a_busy_machine_is_reported_first(results):
    assert "Not a quiet machine" not in markdown(results)
    results["provenance"]["neighbours"] = 0.4
    assert markdown(results).startswith("**Not a quiet machine:** 40 %")


@pytest.mark.parametrize(
    ("value", "bar", "shown"),
    [
        (1.0958, 1.10, "1.096"), (1.1042, 1.10, "1.104"), (1.1, 1.10, "1.10"), (1.09999999, 1.10, "below 1.1"),
        (0.998, 1, "0.998"), (1.00001, 1, "above 1"), (1.352, 1.35, "1.352"), (2.345, 1.1, "2.35"),
    ],
)  # fmt: skip
def test_a_value_is_never_rounded_to_or_across_its_bar(value, bar, shown):
    assert beside(value, bar) == shown


def test_a_figure_just_below_its_bar_does_not_look_reached(results):
    row = next(row for row in results["figures"] if row["key"] == "draft_vs_plain")
    row |= {"value": 1.4958, "low": 1.4, "high": 1.503, "verdict": "missed"}
    line = next(line for line in markdown(results).splitlines() if FIGURES["draft_vs_plain"].text in line)
    assert "at least 1.50x | 1.496x | 1.40x to 1.503x | **missed**" in line
    share = FIGURES["outside_plain"]
    assert (share.show(0.10004), share.bound) == ("10.004 %", "at most 10.0 %")
