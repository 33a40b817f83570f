"""`slipstream generate --json-schema`, `--json-object`, `--regex`, `--grammar`, `--choice`, `--after`."""

import json

import pytest

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("where", ["line", "file"])
def test_the_text_meets_a_schema(cli, pair, tmp_path, where):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    given = json.dumps(SCHEMA) if where == "line" else tmp_path / "schema.json"
    result = cli(
        "generate", "def add(", "-q", "-n", "64", "--temperature", "1", "--seed", "1", "--json-schema", given, *pair
    )
    assert result.code == 0
    assert json.loads(result.out)["a"] in (1, 2)


def test_the_text_is_one_of_the_choices(cli, pair):
    result = cli("generate", "def add(", "--choice", "yes", "--choice", "no", *pair)
    assert result.out.strip() in ("yes", "no")
    assert "finish reason stop" in result.said


def test_the_text_matches_a_regex_and_a_grammar(cli, pair, tmp_path):
    assert cli("generate", "x", "-q", "--regex", "a(bc|cb)d", *pair).out.strip() in ("abcd", "acbd")
    (tmp_path / "answer.lark").write_text('start: "x" y\ny: "1" | "2"')
    assert cli("generate", "x", "-q", "--grammar", tmp_path / "answer.lark", *pair).out.strip() in ("x1", "x2")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--regex", "a", "--choice", "b"], "names regex and choice"),
        (["--after", "</think>"], "names no form"),
        (["--json-schema", '{"type": }'], "not JSON: Expecting value: line 1 column 10"),
        (["--json-schema", "missing.json"], "--json-schema missing.json cannot be read"),
        (["--grammar", "missing.lark"], "--grammar missing.lark cannot be read"),
        (["--json-schema", '{"items": {"type": "strin"}}'], "Invalid type: strin, at #/items"),
        (["--regex", "a(b"], "unclosed group"),
    ],
)
def test_a_form_that_cannot_be_had_ends_with_code_two(cli, pair, given, said):
    result = cli("generate", "x", *given, *pair)
    assert (result.code, result.out) == (2, "")
    assert said in result.said
