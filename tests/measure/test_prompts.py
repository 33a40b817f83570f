"""Prompt files: every format, and one clear error for each way they can be wrong."""

import json

import pytest

from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError, PromptError
from slipstream.measure.prompts import choose_prompts, read_entries, take_in_turns


def lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def test_spec_bench_files(tmp_path, tiny_llm):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorter."]},
        {"question_id": 111, "category": "math", "turns": ["1 + 1?"]},
        {"question_id": 82, "category": "writing", "turns": ["Write a letter."]},
    ]
    path = lines(tmp_path / "question.jsonl", *rows)
    file_entries = read_entries(path)
    assert [(e.text, e.category, e.name, e.request) for e in file_entries] == [
        ("Write a poem.", "writing", "81", True),
        ("1 + 1?", "math", "111", True),
        ("Write a letter.", "writing", "82", True),
    ]
    prompt_set = choose_prompts(tiny_llm, path)
    assert prompt_set.as_dict()["categories"] == {"writing": 2, "math": 1}
    assert prompt_set.prompts[0].ids == tiny_llm.chat_prompt("Write a poem.")
    assert choose_prompts(tiny_llm, path, categories=["math"]).categories == ["math"]


def test_human_eval_json_lines_and_text(tmp_path):
    path = lines(tmp_path / "HumanEval.jsonl", {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "x"})
    assert [(e.category, e.name, e.request) for e in read_entries(path)] == [("HumanEval", "HumanEval/0", False)]
    path = lines(tmp_path / "own.jsonl", {"prompt": "a b"}, "", {"text": "c d", "category": "news"})
    assert [(e.text, e.category, e.name) for e in read_entries(path)] == [("a b", "own", "1"), ("c d", "news", "3")]
    path = lines(tmp_path / "a.txt", "first one", "", "second one")
    assert [e.text for e in read_entries(path)] == ["first one", "second one"]


def test_the_embedded_prompts(tiny_llm):
    prompt_set = choose_prompts(tiny_llm, "code,edit", 4)
    assert prompt_set.categories == ["code", "code", "edit", "edit"]
    assert prompt_set.origin == "code,edit"
    assert all(0 < len(p.ids) < tiny_llm.target.context for p in prompt_set.prompts)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["{"], r"bad\.jsonl, line 1, is not JSON"),
        ([{"prompt": "fine"}, '{"prompt": "broken'], r"line 2, is not JSON"),
        ([{"question": "?"}], r"line 1, contains no prompt; it has 'question'"),
        ([{"prompt": "  "}], r"line 1, contains no prompt"), ([{"turns": []}], r"line 1, contains no prompt"),
        ([{"turns": ["a", 3]}], r"line 1, contains a turn that is not text"), (["3"], r"line 1, is a int"),
        ([""], "contains no prompt"),
    ],
)  # fmt: skip
def test_malformed_files(tmp_path, rows, said):
    with pytest.raises(PromptError, match=said):
        read_entries(lines(tmp_path / "bad.jsonl", *rows))


def test_names_that_are_wrong(tmp_path, tiny_llm):
    with pytest.raises(PromptError, match="no prompt file 'codes'"):
        read_entries("codes")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(PromptError, match="cannot be read"):
        read_entries(str(tmp_path / "x.txt"))
    with pytest.raises(ParameterError, match="did you mean 'edit'"):
        choose_prompts(tiny_llm, categories=["edti"])
    with pytest.raises(ParameterError, match="did you mean 'chat'"):
        choose_prompts(tiny_llm, template="chatt")


def test_too_many_prompts_are_reduced_evenly_over_categories(tmp_path):
    kinds = ["a"] * 5 + ["b"] + ["c"] * 3
    rows = read_entries(lines(tmp_path / "x.jsonl", *({"prompt": f"p{i}", "category": k} for i, k in enumerate(kinds))))
    assert [e.category for e in take_in_turns(rows, 6)] == ["a", "a", "a", "b", "c", "c"]
    assert [e.text for e in take_in_turns(rows, None)] == [e.text for e in rows]
    assert len(take_in_turns(rows, 99)) == 9


def test_repeated_prompts_are_left_out_and_reported(tmp_path, tiny_llm):
    path = lines(tmp_path / "x.txt", "one and the same", "another", "one and the same")
    prompt_set = choose_prompts(tiny_llm, path)
    assert len(prompt_set.prompts) == 2
    assert any("1 of 3 prompts left out as duplicates" in warning for warning in prompt_set.warnings)


def test_prompts_longer_than_the_context_are_left_out(tmp_path, tiny_llm):
    prompt_set = choose_prompts(tiny_llm, lines(tmp_path / "x.txt", "word " * 400, "short one"))
    assert len(prompt_set.prompts) == 1
    assert any("too long for the context" in warning for warning in prompt_set.warnings)
    with pytest.raises(PromptError, match="no prompt of"):
        choose_prompts(tiny_llm, lines(tmp_path / "y.txt", "word " * 400))


def test_a_later_turn_follows_the_targets_own_answers(tiny_llm, tmp_path):
    drafter = tiny_llm.drafter
    turns = ["for x in y", "if a:", "while b:"]
    path = lines(tmp_path / "spec.jsonl", {"question_id": 81, "category": "qa", "turns": turns})
    prompt_set = choose_prompts(tiny_llm, path, turns=3, tokens=5)
    assert [prompt.name for prompt in prompt_set.prompts] == ["81", "81, turn 2", "81, turn 3"]
    assert set(prompt_set.categories) == {"qa"}
    first, second, third = prompt_set.ids
    answer = tiny_llm.generate([first], SamplingParams(max_tokens=5))[0].text
    said = [("user", "for x in y"), ("assistant", answer), ("user", "if a:")]
    assert second == tiny_llm.chat_prompt([{"role": role, "content": text} for role, text in said])
    assert len(third) > len(second)
    assert tiny_llm.drafter is drafter
    one = choose_prompts(tiny_llm, path)
    assert len(one.prompts) == 1
    assert one.digest != prompt_set.digest


def test_a_context_is_earlier_text_before_each_prompt(prompt_set):
    rows = prompt_set.in_context(8, 100)
    assert [len(row) for row in rows] == [8, 8, 8]
    for row, prompt in zip(rows, prompt_set.ids, strict=True):
        assert row[-len(prompt) :] == prompt
    assert prompt_set.in_context(2, 100)[0] == [6, 7]  # its end
    with pytest.raises(ParameterError, match="room for 5 tokens before the answer"):
        prompt_set.in_context(8, 5)
