"""The same settings for vLLM: with its names, or a clear statement that it has no equivalent."""

import json
import shlex
from pathlib import Path

import pytest

from slipstream.errors import ParameterError
from slipstream.measure.configs import PLUGIN, DrafterChoice, slipstream, vllm

MODEL = DrafterChoice("model", 4, "org/target", "org/draft")


def test_a_draft_model():
    assert vllm(MODEL).values == {
        "speculative_config": {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 4}
    }


def test_lookups():
    choice = DrafterChoice("ngram", 8, "org/target", options={"max_ngram": 3})
    assert vllm(choice).values == {
        "speculative_config": {"method": "custom_class", "model": PLUGIN, "num_speculative_tokens": 8},
        "additional_config": {"slipstream": {"drafter": "ngram", "options": {"max_ngram": 3}}},
    }  # fmt: skip
    more = vllm(DrafterChoice("suffix,ngram", 6)).values["additional_config"]
    assert more == {"slipstream": {"drafter": ["suffix", "ngram"]}}


def test_mtp_layers_need_no_draft():
    choice = DrafterChoice("mtp", 3, "org/target")
    assert vllm(choice).values == {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


def test_what_a_shell_reads_is_the_json():
    text = vllm(DrafterChoice("eagle3", 5, "t", "it's/head")).text
    flag, value = shlex.split(text)
    assert flag == "--speculative-config"
    assert json.loads(value) == {"method": "eagle3", "model": "it's/head", "num_speculative_tokens": 5}


@pytest.mark.parametrize(("rank", "method"), [(None, "dflash"), (16, "dspark")])
def test_a_head_that_drafts_blocks_is_named_by_whether_it_has_a_markov_head(tmp_path: Path, rank: int, method: str):
    """As speculators writes it, with the mask token at the top: no flag of a parallel head."""
    (tmp_path / "config.json").write_text(json.dumps({"markov_rank": rank, "mask_token_id": 4}))
    head = str(tmp_path)
    choice = DrafterChoice("dflash", 7, "t", head)
    assert vllm(choice).values == {"speculative_config": {"method": method, "model": head, "num_speculative_tokens": 7}}


def test_settings_without_an_equivalent_are_reported():
    for drafter in ("lookahead", "medusa", "ngram,model"):
        settings = vllm(DrafterChoice(drafter, 4, draft="d"))
        assert (settings.values, settings.text) == (None, "")
        assert f"has no drafter that corresponds to {drafter!r}" in settings.note
    assert "0.32" in vllm(DrafterChoice("medusa", 4, draft="d")).note


def test_plain_decoding_has_settings_too():
    plain = vllm(DrafterChoice("none"))
    assert (plain.values, plain.text) == ({}, "")
    assert plain.note.startswith("for plain decoding")
    assert "draft" not in slipstream(DrafterChoice("ngram", 3, draft="d"))
    assert slipstream(DrafterChoice("none", engine={"quantize": "int8", "dtype": None})) == {
        "target": "embedded", "drafter": "none", "draft_tokens": 0, "quantize": "int8"
    }  # fmt: skip


def test_our_own_names_are_options_of_generate_and_a_model_without_a_name_is_refused():
    with pytest.raises(ParameterError, match="none was given"):
        vllm(DrafterChoice("model", 4))
    settings = slipstream(DrafterChoice("suffix,model", 6, "t", "d", options={"min_match": 3}))
    assert settings == {
        "target": "t", "draft": "d", "drafter": "suffix,model", "draft_tokens": 6, "drafter_option": ["min_match=3"]
    }  # fmt: skip


def test_settings_of_a_draft_model_are_left_out_with_a_drafter_that_has_none():
    """`slipstream generate` would refuse the file."""
    engine = {"draft_quantize": "int8", "draft_tokenizer": "string", "threads": 2}
    assert slipstream(DrafterChoice("suffix", 5, draft="some", engine=engine)) == {
        "target": "embedded", "drafter": "suffix", "draft_tokens": 5, "threads": 2,
    }  # fmt: skip
    assert engine.items() <= slipstream(DrafterChoice("model", 5, draft="some", engine=engine)).items()
    assert "draft_quantize" not in slipstream(DrafterChoice("eagle3", 5, draft="head", engine=engine))


def test_another_tokenizer_has_no_counterpart():
    same, string = (
        vllm(DrafterChoice("model", 4, draft="d", engine={"draft_tokenizer": method})) for method in ("same", "string")
    )
    assert same == vllm(DrafterChoice("model", 4, draft="d"))
    assert (string.values, "draft_tokenizer='string'" in string.note) == (None, True)


@pytest.mark.parametrize(("drafter", "key"), [("model", "pard_token"), ("eagle3", "ptd_token_id")])
def test_vllm_is_told_of_a_draft_that_takes_one_pass(tmp_path: Path, drafter: str, key: str):
    (tmp_path / "config.json").write_text(json.dumps({key: 7}))
    settings = vllm(DrafterChoice(drafter, 5, draft=str(tmp_path)))
    assert settings.values["speculative_config"]["parallel_drafting"] is True
    assert "V1 runner" in settings.note
    (tmp_path / "config.json").write_text(json.dumps({key: None}))
    assert "parallel_drafting" not in vllm(DrafterChoice(drafter, 5, draft=str(tmp_path))).values["speculative_config"]
