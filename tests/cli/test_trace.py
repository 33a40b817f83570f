"""`slipstream trace`."""

import json


def test_the_text_and_acceptance_over_time(cli, report, pair, tmp_path):
    given = ["--drafter", "model", "-n", "20", "--ignore-eos"]
    result = cli("trace", "def add", *pair, *given, "--out", tmp_path / "t.json", code=0)
    assert "20 tokens in" in result.shown
    assert "Who proposed what" in result.shown
    assert "\x1b" not in result.out
    trace = json.loads((tmp_path / "t.json").read_text())
    assert len(trace["data"]["tokens"]) == 20
    assert trace["data"]["prompt"]["text"] == "def add"
    page = report(tmp_path / "t.json")
    assert "Acceptance over time" in page
    assert "Accepted draft tokens per step" in page


def test_the_first_embedded_prompt_and_json(cli, pair):
    result = cli("trace", *pair, "--drafter", "ngram", "-n", "6", "--json", code=0)
    assert json.loads(result.out)["settings"]["contender"] == "ngram"
