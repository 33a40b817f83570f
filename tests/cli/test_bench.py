"""`slipstream bench`, and the options that name drafters."""

import json

import pytest

from slipstream.cli.measuring import LabModels, parse_values
from slipstream.errors import ParameterError
from slipstream.measure import arms as measured_arms
from slipstream.measure.results import FORMAT_VERSION

QUICK = ["-n", "6", "--rounds", "2"]


def test_tables_for_people(cli, pair, texts, tmp_path):
    drafters = ["--drafter", "none", "--drafter", "ngram", "--drafter", "model"]
    result = cli("bench", texts, *pair, *QUICK, *drafters, "--out", tmp_path / "r.json", code=0)
    for part in ("Speed and acceptance, greedy", "method speed-up (95%) tok/s accept tau text", "ngram, K=auto",
                 "model, K=auto", "identical", "Speed-up by category", "Acceptance by position",
                 "2 interleaved passes", "where the time goes"):  # fmt: skip
        assert part in result.shown
    assert any(lead in result.shown for lead in ("Fastest: ", "The least slow one: ", "Measured: "))  # by the clock
    assert result.width <= 80
    assert "not enough passes for an interval: raise --rounds to 3 or more" in result.said
    assert f"slipstream report {tmp_path / 'r.json'}" in result.said
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["format_version"], report["kind"], report["complete"]) == (FORMAT_VERSION, "bench", True)
    assert report["data"]["prompts"]["categories"] == {"a": 1, "b": 1}
    assert report["provenance"]["command"]


def test_draft_lengths_with_predictions_and_a_page(cli, report, pair, texts, tmp_path):
    out = tmp_path / "s.json"
    result = cli("bench", texts, *pair, *QUICK, "--drafter", "model", "-k", "2:4", "--out", out, code=0)
    for part in ("method speed-up (95%) predicted tok/s accept tau text", "model, K=2", "The predictions are off by"):
        assert part in result.shown
    assert result.width <= 80
    assert "Speed-up by draft length K" in report(out)


def test_every_other_axis(cli, pair, texts):
    drafters = ["--drafter", "ngram:max_ngram=2", "--drafter", "ngram:max_ngram=3"]
    axes = [*drafters, "--temperature", "0,1", "--batch", "1:2", "--json"]
    arms = json.loads(cli("bench", texts, *pair, *QUICK, *axes, code=0).out)["data"]["arms"]
    assert sum(arm["plain"] for arm in arms) == 4
    assert {(arm["temperature"], arm["batch"], arm["label"]) for arm in arms if not arm["plain"]} == {
        (t, b, f"ngram max_ngram={n}") for t in (0.0, 1.0) for b in (1, 2) for n in (2, 3)
    }


def test_a_bug_ends_with_code_1(cli, pair, texts, wrong_token):
    wrong_token("ngram", 3)
    result = cli("bench", texts, *pair, *QUICK, "--drafter", "ngram", code=1)
    assert "BUG" in result.out
    assert "differs from that of plain decoding at token 3" in result.said
    assert "this is a bug" in result.said


def test_ctrl_c_keeps_what_was_measured(cli, pair, texts, tmp_path, monkeypatch):
    timed, calls = measured_arms._time, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) > 6:  # a pass of two arms over two prompts, and half of another
            raise KeyboardInterrupt
        timed(*given)

    monkeypatch.setattr(measured_arms, "_time", interrupted)
    result = cli("bench", texts, *pair, "-n", "4", "--drafter", "ngram", "--out", tmp_path / "r.json", code=130)
    assert "the run was interrupted" in result.said
    assert "ngram" in result.out
    kept = json.loads((tmp_path / "r.json").read_text())
    assert (kept["complete"], kept["data"]["arms"][0]["rounds"]) == (False, 1)


def test_ranges_and_lists():
    assert parse_values("x", "2:5") == (2, 3, 4, 5)
    assert parse_values("x", "2:8:3,20") == (2, 5, 8, 20)
    assert parse_values("x", "1,1,2") == (1, 2)
    assert parse_values("x", "0,0.5", float) == (0.0, 0.5)
    assert parse_values("x", "float32,bfloat16", str) == ("float32", "bfloat16")
    for wrong in ("5:2", "1:2:0", "a:b", "1:2:3:4", "", "1,,2"):
        with pytest.raises(ParameterError):
            parse_values("x", wrong)


def test_what_a_drafter_is_called_and_given():
    contenders = LabModels(drafter=["ngram:max_ngram=3,draft_tokens=5", "suffix+model"], draft_tokens="7").contenders()
    assert [(c.label, c.draft_tokens) for c in contenders] == [("ngram max_ngram=3", 5), ("suffix+model", 7)]
    assert contenders[0].options == {"max_ngram": 3}
    assert contenders[1].drafter == ["suffix", "embedded"]
    assert [c.label for c in LabModels().contenders()] == ["model", "suffix"]
    assert [c.length for c in LabModels().contenders()] == [4, 10]
    assert [c.length for c in LabModels().contenders(adaptive=True)] == ["auto", "auto"]
    named = LabModels(drafter=["ngram:draft_tokens=5", "suffix:draft_tokens=auto"])
    assert [c.length for c in named.contenders(adaptive=True)] == [5, "auto"]
    with pytest.raises(ParameterError, match="needs a fixed draft length"):
        named.contenders()
    assert [c.label for c in LabModels(target="elsewhere").contenders()] == ["suffix"]


MEASURE = {
    "bench": ["--drafter", "ngram", "--rounds", "1", "-n", "4"],
    "tune": ["--drafter", "ngram", "-k", "2", "--rounds", "1", "-n", "4"],
    "verify": ["--drafter", "ngram", "-k", "2", "--check", "greedy", "-n", "4"],
}


@pytest.mark.parametrize("command", MEASURE)
def test_conversations_are_asked_by_turns_and_prompts_chosen_by_category(cli, pair, tmp_path, command):
    """Later turns follow the target's own answers."""
    file, out = tmp_path / "talk.jsonl", tmp_path / "r.json"
    kinds = [(81, "writing", ["import os", "def f("]), (82, "coding", ["for x in"])]
    rows = [{"question_id": i, "category": kind, "turns": turns} for i, kind, turns in kinds]
    file.write_text("\n".join(map(json.dumps, rows)))
    given = [command, file, *pair[:2], *pair[4:], *MEASURE[command]]
    result = cli(*given, "--category", "writing", "--out", out, "--json")
    assert result.code in (0, 1, 2), result.said
    assert "2 prompts of talk.jsonl" in result.said
    assert json.loads(out.read_text())["data"]["prompts"]["names"] == ["81", "81, turn 2"]
    assert "has no category 'other'" in cli(*given, "--category", "other").said


def test_only_the_first_turn_is_asked_if_it_alone_is_wanted(cli, pair, tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["import os", "def f("]}))
    assert "1 prompt of talk.jsonl" in cli("bench", file, *pair, *MEASURE["bench"], "--turns", "1").said
