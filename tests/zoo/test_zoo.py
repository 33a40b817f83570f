"""The heads that ship with the embedded target still draft as well as on the day they were added: a
changed norm, shift or tap does not crash, it halves the acceptance."""

import ast
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams, zoo
from slipstream.core.stats import SpecStats
from slipstream.errors import CheckpointError, ParameterError
from slipstream.heads.eagle_format import load_eagle

EAGLE3 = {1: 1.895, 3: 3.429, 5: 4.645}
"""Mean acceptance length for each draft length, over three prompts of 96 tokens, greedy."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded", draft="eagle3", threads=1, draft_tokens=4)


def prompts(llm: LLM) -> list[list[int]]:
    code, edit = zoo.prompts("code"), zoo.prompts("edit")
    return [*(llm.tokenizer.encode(each["prompt"]) for each in code[:2]), llm.chat_prompt(edit[0]["prompt"])]


def measured(llm: LLM, prompts: Seq[list[int]], tokens: int) -> SpecStats:
    done = llm.generate(prompts, SamplingParams(max_tokens=tokens))
    return sum((c.stats for c in done[1:]), done[0].stats)


@pytest.mark.parametrize("k", EAGLE3)
def test_the_eagle3_head_reaches_its_acceptance_length(llm: LLM, k: int) -> None:
    """Greedy, so only near ties in float32 can change it: tolerance 4 %."""
    llm.use("eagle3")
    llm.draft_tokens = k
    stats = measured(llm, prompts(llm), 96)
    assert llm.drafter.name == "eagle3"
    assert stats.drafter_faults == 0
    assert stats.mean_acceptance_length >= 0.96 * EAGLE3[k]


def test_the_eagle3_head_by_its_folder_and_below_a_suffix_drafter(llm: LLM) -> None:
    llm.draft_tokens = 5
    alone = None
    for draft, name in (
        (str(zoo.head_dir("eagle3", zoo.target_dir())), "eagle3"),
        (["suffix", "eagle3"], "suffix,eagle3"),
    ):
        llm.use(draft)
        stats = measured(llm, prompts(llm)[:2], 48)
        assert llm.drafter.name == name
        assert stats.drafter_faults == 0
        alone = stats.mean_acceptance_length if alone is None else alone
        assert stats.mean_acceptance_length >= 0.9 * alone > 3


def test_an_eagle3_head_ships_for_the_file_of_smollm2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(zoo, "has_smollm2", lambda: True)
    monkeypatch.setattr(zoo, "smollm2_file", lambda: file)
    head = load_eagle(zoo.head_dir("eagle3", file))
    c, ids = head.config, set(head.target_ids.tolist())
    assert (c.hidden_size, c.target_hidden, c.decoder.vocab_size, c.taps) == (576, 576, 49_152, (2, 15, 27))
    assert head.in_8_bits
    assert len(ids) == 8_192
    assert 2 in ids  # <|im_end|>
    for kind, target in (("medusa", file), ("dflash", file), ("eagle3", tmp_path / "other.gguf")):
        with pytest.raises(ParameterError, match=f"slipstream train {kind} --target"):
            zoo.head_dir(kind, target)


def test_smollm2_carries_the_sampling_that_its_authors_recommend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert zoo.find_sampling(file) == {}
    monkeypatch.setattr(zoo, "has_smollm2", lambda: True)
    monkeypatch.setattr(zoo, "smollm2_file", lambda: file)
    assert zoo.find_sampling(str(file)) == {"temperature": 0.2, "top_p": 0.9}
    assert zoo.find_sampling("org/other") == {}


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
