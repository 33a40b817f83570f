"""Options that the commands which measure share."""

import json

import pytest

MEASURE = {
    "bench": ["--drafter", "ngram", "--rounds", "1", "-n", "4"],
    "tune": ["--drafter", "ngram", "-k", "2", "--rounds", "1", "-n", "4"],
    "verify": ["--drafter", "ngram", "-k", "2", "--check", "greedy", "-n", "4"],
}


@pytest.mark.parametrize("command", MEASURE)
@pytest.mark.parametrize(("turns", "asked"), [([], ["81", "81, turn 2"]), (["--turns", "1"], ["81"])])
def test_every_command_asks_the_later_turns_of_a_conversation(cli, pair, tmp_path, command, turns, asked):
    """After the target's own answers, unless only the first is wanted."""
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["import os", "def f("]}) + "\n")
    result = cli(command, file, *pair[:2], *pair[4:], *MEASURE[command], *turns, "--out", tmp_path / "r.json", "--json")
    assert result.code in (0, 1), result.said
    assert f"{len(asked)} prompt{'s' * (len(asked) > 1)} of talk.jsonl" in result.said
    assert json.loads((tmp_path / "r.json").read_text())["data"]["prompts"]["names"] == asked


@pytest.mark.parametrize("command", MEASURE)
def test_only_the_named_category_is_used(cli, pair, tmp_path, command):
    file = tmp_path / "two.jsonl"
    kinds = [{"prompt": text, "category": kind} for kind, text in (("a", "import os"), ("b", "def f("))]
    file.write_text("\n".join(map(json.dumps, kinds)))
    result = cli(command, file, *pair[:2], *pair[4:], *MEASURE[command], "--category", "b", "--json")
    assert "1 prompt of two.jsonl" in result.said
    refused = cli(command, file, *pair[:2], *pair[4:], *MEASURE[command], "--category", "c")
    assert refused.code == 2
    assert "has no category 'c'" in refused.said
