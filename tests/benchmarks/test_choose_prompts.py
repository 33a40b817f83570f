"""Choosing prompts whose outputs do not loop, with a decoder that is made up."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import choose_prompts as command
from benchmarks.choose_prompts import choose, examine, untracked
from benchmarks.prompts import SETS, Prompt, choice, load

TOKENIZER = SimpleNamespace(
    encode=lambda text, add_special_tokens=True: [ord(letter) for letter in text],
    apply_chat_template=lambda messages, **how: messages[0]["content"],
)


def entries(name: str, count: int) -> list[dict]:
    return [{"prompt": f"{name} {i}", "source": name, "line": i} for i in range(count)]


def decode(prompt: Prompt) -> list[int]:
    """A loop for prompts that begin with L."""
    return [1, 2] * (prompt.tokens // 2) if prompt.ids[0] == ord("L") else list(range(prompt.tokens))


def test_looping_and_overlong_candidates_are_dropped_and_counted(tmp_path):
    file = tmp_path / "outside.jsonl"
    lines = [
        {"prompt": "Loop"}, {"prompt": "Good", "canonical_solution": "x"}, {"prompt": "x" * 1000}, {"prompt": "End"},
    ]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    candidates = examine(file, "code", 64, TOKENIZER, decode)
    assert [(e["prompt"], e["line"]) for e in candidates.kept] == [("Good", 2), ("End", 4)]
    assert "canonical_solution" not in candidates.kept[0]
    counts = candidates.as_dict()
    assert (counts["examined"], counts["kept"], counts["loops"], counts["too_long"]) == (4, 2, 1, 1)


def count(chosen: list[dict], kind: str) -> int:
    return sum(entry["source"] == kind for entry in chosen[:-3])


def test_half_is_code_half_of_it_from_outside_and_what_one_kind_lacks_another_fills():
    for had, chosen in (((20, 20, 20), (6, 6, 12)), ((4, 30, 9), (4, 14, 6)), ((17, 0, 15), (12, 0, 12))):
        kinds = [entries(kind, n) for kind, n in zip(("own", "outside", "edit"), had, strict=True)]
        code, edit = choose(*kinds, 24)
        assert (count(code, "own"), count(code, "outside"), count(edit, "edit")) == chosen
        texts = [entry["prompt"] for entry in code + edit]
        assert len(texts) == len(set(texts)) == 24 + 6  # with those on which draft lengths are chosen
    with pytest.raises(SystemExit, match="too few"):
        choose(entries("own", 4), entries("outside", 30), entries("edit", 3), 24)


def test_a_folder_that_git_tracks_is_refused(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path / "repo"], check=True)
    (tmp_path / "repo" / ".gitignore").write_text("runs/\n")
    assert untracked(tmp_path / "elsewhere" / "new")
    assert untracked(tmp_path / "repo" / "runs" / "new")
    assert not untracked(tmp_path / "repo" / "new")
    with pytest.raises(SystemExit, match="tracked by git"):
        command.main(["--out", str(tmp_path / "repo" / "new")])
    with pytest.raises(SystemExit, match="no such file"):
        command.main(["--out", str(tmp_path / "new"), "--outside", str(tmp_path / "nothing")])


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """The folder that the command writes, with a decoder that is made up."""
    answer = lambda ids, params: [SimpleNamespace(token_ids=decode(Prompt(ids[0], params.max_tokens)))]  # noqa: E731
    monkeypatch.setattr(command, "LLM", lambda *a, **k: SimpleNamespace(tokenizer=TOKENIZER, generate=answer))
    outside = tmp_path / "texts.jsonl"
    outside.write_text("".join(json.dumps({"prompt": f"{'LG'[i % 2]}{i}"}) + "\n" for i in range(20)))
    words = ["--out", str(tmp_path / "new"), "--outside", str(outside), "--count", "8", "--tokens", "32"]
    assert command.main(words) == 0
    return tmp_path / "new"


def test_the_command_writes_prompts_and_how_they_were_chosen(chosen):
    record = json.loads((chosen / "choice.json").read_text())
    assert record["examined"]["texts.jsonl"]["kept"] == record["examined"]["texts.jsonl"]["loops"] == 10
    assert record["measured"]["code"] == {"texts.jsonl": 2, "code.jsonl": 2}
    assert "output of 32 tokens" in record["criterion"]
    measured, spare = load(chosen, TOKENIZER, 12)
    assert [len(measured[name]) for name in SETS] == [4, 4]
    assert [p.kind for p in spare["edit"]] == ["edit"] * 3


def test_prompts_that_were_changed_later_are_refused(chosen, tmp_path):
    record = choice(chosen)
    assert set(record["digests"]) == set(SETS)
    assert len(record["sha256"]) == 16
    assert choice(tmp_path) is None
    (chosen / "edit.jsonl").write_text("")
    with pytest.raises(SystemExit, match=r"edit\.jsonl is not the file"):
        choice(chosen)
