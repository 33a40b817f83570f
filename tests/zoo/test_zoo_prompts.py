import ast

import pytest

from slipstream import zoo
from slipstream.errors import CheckpointError, ParameterError


@pytest.mark.parametrize(("kind", "least"), [("code", 16), ("edit", 12)])
def test_prompts_name_their_origin(kind: str, least: int) -> None:
    entries = zoo.prompts(kind)
    assert len(entries) >= least
    assert all(e["prompt"] and e["package"] and e["version"] and e["file"].endswith(".py") for e in entries)
    assert (zoo.HERE / "prompts" / f"{kind}.jsonl").stat().st_size < 40_000


def test_edit_prompts_have_correct_answers() -> None:
    for entry in zoo.prompts("edit"):
        ast.parse(entry["answer"])
        common = set(entry["prompt"].split("\n")) & set(entry["answer"].split("\n"))
        assert len(common) >= 3, entry["file"]  # most of the answer repeats the question


def test_unknown_kind_and_missing_model(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    with pytest.raises(ParameterError, match="poem"):
        zoo.prompts("poem")
    monkeypatch.setattr(zoo, "HERE", tmp_path)
    with pytest.raises(CheckpointError, match="draft"):
        zoo.draft_dir()
