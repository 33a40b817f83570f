"""Token maps decide whether two models are compatible, not sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, MixtralConfig

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.errors import LoadError, PairError, ParameterError
from slipstream.targets.describe import describe
from slipstream.targets.pair_check import check_pair
from slipstream.tokens.token_map import has_chat_template
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import CONTEXT, OTHER_TEXTS, clone, make_model, make_tokenizer, rewrite


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokens, with an output of 448 ids."""
    folder = tmp_path_factory.mktemp("padded")
    make_model(folder, vocab_size=448)
    make_tokenizer(folder)
    return folder


def bare(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


def edit_tokenizer(folder: Path, old: str, new: str) -> Path:
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


def test_the_same_tokens_are_compatible(tiny):
    report = check_pair(tiny.target, tiny.draft)
    assert (report.fits, report.compared, report.differing, report.notes) == (True, True, 0, ())
    assert report.common == len(describe(tiny.target).token_map.tokens)
    check_pair(tiny.target, str(tiny.draft)).require()


def test_padding_and_tokens_of_one_side_alone_are_compatible(tiny, padded, tmp_path):
    make_model(tmp_path, vocab_size=330)
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.add_special_tokens(["<|tool|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for other in (padded, tmp_path):
        for pair in ((tiny.target, other), (other, tiny.target)):
            assert (check_pair(*pair).fits, check_pair(*pair).notes) == (True, ())
            check_pair(*pair).require()


def test_other_tokens_are_incompatible_and_the_first_five_are_listed(tiny, tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, texts=OTHER_TEXTS)
    report = check_pair(tiny.target, tmp_path)
    tokens, draft_tokens = (describe(path).token_map.tokens for path in (tiny.target, tmp_path))
    wrong = [i for i in sorted(tokens.keys() & draft_tokens.keys()) if tokens[i] != draft_tokens[i]]
    assert report.differing == len(wrong) > 5
    first = [(i, tokens[i], draft_tokens[i]) for i in wrong[:5]]
    assert [(d.id, d.target, d.draft) for d in report.differences] == first
    with pytest.raises(PairError) as error:
        check_pair(tiny.target, tmp_path).require()
    for difference in report.differences:
        assert str(difference) in str(error.value)
    assert f"{len(wrong)} of {report.common} common ids" in str(error.value)


def test_special_tokens_may_have_other_names(tiny, tmp_path):
    folder = edit_tokenizer(clone(tiny.draft, tmp_path / "draft"), "<|user|>", "<|human|>")
    report = check_pair(tiny.target, folder)
    assert (report.fits, report.differing) == (True, 1)
    assert any("1 special tokens have different names (1: '<|user|>' / '<|human|>')" in note for note in report.notes)


def test_a_shorter_draft_context_is_noted(tiny, tmp_path):
    folder = rewrite(clone(tiny.draft, tmp_path / "draft"), max_position_embeddings=64)
    (note,) = check_pair(tiny.target, folder).notes
    assert f"the draft model's context is 64 tokens, the target's {CONTEXT}: after 64" in note
    assert not check_pair(folder, tiny.target).notes


@pytest.mark.parametrize("side", ["target", "draft", "both"])
def test_without_tokenizers_only_sizes_are_compared(tiny, padded, tmp_path, side):
    target, draft = clone(tiny.target, tmp_path / "target"), clone(tiny.draft, tmp_path / "draft")
    for name, folder in (("target", target), ("draft", draft)):
        if side in (name, "both"):
            bare(folder)
    report = check_pair(target, draft)
    assert (report.fits, report.compared) == (True, False)
    who = "neither model has" if side == "both" else f"the {side} has no"
    assert any(note.startswith("only sizes were compared (320 and 320 ids)") and who in note for note in report.notes)
    check_pair(target, draft).require()


def test_without_tokenizers_a_token_that_has_no_row_is_an_error(tiny, tmp_path):
    small = tmp_path / "small"
    make_model(small, vocab_size=300)
    for target, draft in ((tiny.target, small), (small, tiny.target)):
        with pytest.raises(PairError, match=r"has \d+ tokens, .* has only 300 logits, and no tokenizer"):
            check_pair(target, draft).require()
    with pytest.raises(PairError, match=r"320 logits.* 300|300 logits.* 320"):
        check_pair(bare(clone(tiny.target, tmp_path / "bare")), small).require()


def test_a_broken_tokenizer_is_an_error_of_loading(tiny, tmp_path):
    folder = clone(tiny.draft, tmp_path / "draft")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match=r"tokenizer\.json cannot be read"):
        check_pair(tiny.target, folder).require()


def test_sizes_are_those_of_the_files(tiny, tmp_path, monkeypatch):
    seen = describe(tiny.target)
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny.target).parameters())
    assert seen.config.parameters == seen.config.active_parameters == count
    assert seen.stored == {"F32": 4 * count}
    for downloaded, stored in ((tiny.target, {"F32": 4 * count}), (tmp_path, None)):  # with its weights, and without
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, folder=downloaded, **__: str(folder))
        assert replace(seen, checkpoint=Checkpoint.open("a/hub-id")).stored == stored
    assert seen.config.step_parameters == count - 320 * 48  # a step reads one row of the input embedding
    assert seen.config.kv_bytes(4) == 2 * 2 * 2 * 16 * 4
    assert has_chat_template(seen.checkpoint)


def test_only_the_chosen_experts_count_as_active(tmp_path):
    MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=1,
    ).save_pretrained(tmp_path)  # fmt: skip
    seen = describe(tmp_path)
    expert = 3 * 16 * 24
    assert seen.config.parameters - seen.config.active_parameters == 2 * 3 * expert
    assert seen.token_map is None


def test_the_cost_of_a_draft_token_follows_from_the_weights_that_are_read(tiny, tmp_path):
    make_model(tmp_path, num_hidden_layers=8)
    make_tokenizer(tmp_path)
    report = check_pair(tmp_path, tiny.target)
    c = report.cost_ratio
    assert c == describe(tiny.target).config.step_parameters / describe(tmp_path).config.step_parameters
    assert 0.2 < c < 0.5
    assert json.loads(json.dumps(report.as_dict()))["cost_ratio"] == c


def test_the_embedded_pair_is_named_as_everywhere():
    assert check_pair("embedded", "embedded").fits


def test_a_model_in_memory_is_refused_with_what_to_give_instead(tiny):
    with pytest.raises(
        ParameterError, match=r"the draft is a model in memory, of the class ToyTarget.*give the folder"
    ):
        check_pair(tiny.target, ToyTarget())  # type: ignore[arg-type]
