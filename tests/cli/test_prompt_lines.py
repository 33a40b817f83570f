"""`slipstream generate` with prompts from JSON lines and from standard input."""

from __future__ import annotations

import json

import pytest

from slipstream.cli.prompt_lines import read_lines
from slipstream.errors import PromptError


def test_each_line_is_answered_with_a_line_in_the_same_order(cli, pair, tmp_path):
    file = tmp_path / "p.jsonl"
    texts = ["for x in", "import", "a"]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n\n" for text in texts))
    result = cli("generate", "--file", file, *pair, "-n", "5")
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in result.out.splitlines()]
    for text, row in zip(texts, rows, strict=True):
        alone = json.loads(cli("generate", text, *pair, "-n", "5", "--json").out)
        assert row["token_ids"] == alone["token_ids"]
        assert row.keys() == alone.keys()
    assert "3 of 3 prompts" in result.said


def test_a_field_can_be_named(cli, pair, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"question": "for x in", "prompt": "another"}\n')
    result = cli("generate", "--file", file, "--prompt-field", "question", *pair, "-n", "5", "-q")
    alone = json.loads(cli("generate", "for x in", *pair, "-n", "5", "--json").out)
    assert json.loads(result.out)["token_ids"] == alone["token_ids"]
    assert not result.err


def test_conversations_are_read(tmp_path):
    file = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "hello"}]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    assert read_lines(file, None) == [turns]


BAD = {
    "not JSON": ('{"prompt": "x"}\n{', "p.jsonl, line 2, is not JSON"),
    "a list": ("[1]", "is a list"),
    "no field": ('{"question": "x"}', "has no field prompt or text or messages; it has 'question'"),
    "a number": ('{"prompt": 3}', "field 'prompt' is 3"),
    "empty": ('{"prompt": ""}', "must be text or a list of messages"),
    "turns without role": ('{"messages": [{"content": "x"}]}', "must be text or a list of messages"),
    "nothing": ("\n\n", "holds no prompt"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_are_refused_with_their_number(name, tmp_path):
    content, said = BAD[name]
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(PromptError, match=said):
        read_lines(tmp_path / "p.jsonl", None)


def test_a_misspelt_field_gets_a_suggestion(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"question": "x"}')
    with pytest.raises(PromptError, match="did you mean 'question'"):
        read_lines(tmp_path / "p.jsonl", "qestion")


def test_standard_input_is_the_prompt_if_none_is_given(cli, pair):
    piped = cli("generate", *pair, "-n", "5", "--json", stdin="for x in")
    assert (
        json.loads(piped.out)["token_ids"]
        == json.loads(cli("generate", "for x in", *pair, "-n", "5", "--json").out)["token_ids"]
    )


def test_a_prompt_field_without_lines_is_refused(cli, pair):
    result = cli("generate", "x", "--prompt-field", "question", *pair)
    assert (result.code, "--prompt-field is for JSON lines" in result.said) == (2, True)
