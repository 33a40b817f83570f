"""Options that the commands which measure share."""

import json

import pytest

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
    assert result.code in (0, 1), result.said
    assert "2 prompts of talk.jsonl" in result.said
    assert json.loads(out.read_text())["data"]["prompts"]["names"] == ["81", "81, turn 2"]
    assert "has no category 'other'" in cli(*given, "--category", "other").said


def test_only_the_first_turn_is_asked_if_it_alone_is_wanted(cli, pair, tmp_path):
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["import os", "def f("]}))
    assert "1 prompt of talk.jsonl" in cli("bench", file, *pair, *MEASURE["bench"], "--turns", "1").said
