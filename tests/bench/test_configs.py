"""The same settings for other programs: with their names, or a clear statement that they have no equivalent."""

import json
import shlex
from pathlib import Path

import pytest

from slipstream.bench import configs
from slipstream.bench.configs import Choice, equivalents, llama_server, sglang, slipstream, transformers, vllm
from slipstream.errors import ParameterError

MODEL = Choice("model", 4, "org/target", "org/draft")


def test_a_draft_model_everywhere():
    assert vllm(MODEL).values == {
        "speculative_config": {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 4}
    }
    assert sglang(MODEL).values == {
        "speculative-algorithm": "STANDALONE", "speculative-draft-model-path": "org/draft", "speculative-num-steps": 4,
        "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 5,
    }  # fmt: skip
    assert llama_server(MODEL).text == (
        "--spec-type draft-simple --spec-draft-model org/draft.gguf --spec-draft-n-max 4"
    )
    assert transformers(MODEL).values == {
        "assistant_model": "org/draft", "num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }  # fmt: skip


def test_a_lookup_everywhere():
    choice = Choice("ngram", 8, "org/target", options={"max_ngram": 3})
    assert vllm(choice).values == {
        "speculative_config": {"method": "custom_class", "model": configs.PLUGIN, "num_speculative_tokens": 8},
        "additional_config": {"slipstream": {"drafter": "ngram", "options": {"max_ngram": 3}}},
    }  # fmt: skip
    assert sglang(choice).values == {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 8}
    assert llama_server(choice).values == {
        "spec-type": "ngram-simple", "spec-ngram-simple-size-n": 3, "spec-ngram-simple-size-m": 8
    }  # fmt: skip
    assert transformers(choice).text == "generate(prompt_lookup_num_tokens=8, max_matching_ngram_size=3)"


def test_mtp_layers_need_no_draft_anywhere():
    choice = Choice("mtp", 3, "org/target")
    assert vllm(choice).values == {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    assert sglang(choice).values == {
        "speculative-algorithm": "NEXTN", "speculative-num-steps": 3, "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
    }  # fmt: skip
    assert llama_server(choice).text == "--spec-type draft-mtp --spec-draft-n-max 3"
    assert transformers(choice).text == "generate(use_mtp=True)"


def test_what_a_shell_reads_is_the_json():
    text = vllm(Choice("eagle3", 5, "t", "it's/head")).text
    flag, value = shlex.split(text)
    assert flag == "--speculative-config"
    assert json.loads(value) == {"method": "eagle3", "model": "it's/head", "num_speculative_tokens": 5}


@pytest.mark.parametrize(("rank", "method"), [(None, "dflash"), (16, "dspark")])
def test_a_head_that_drafts_blocks_is_named_by_whether_it_has_a_markov_head(tmp_path: Path, rank: int, method: str):
    """As speculators writes it, with the mask token at the top: no flag of a parallel head."""
    (tmp_path / "config.json").write_text(json.dumps({"markov_rank": rank, "mask_token_id": 4}))
    head = str(tmp_path)
    choice = Choice("dflash", 7, "t", head)
    assert vllm(choice).values == {"speculative_config": {"method": method, "model": head, "num_speculative_tokens": 7}}
    assert sglang(choice).values == {
        "speculative-algorithm": method.upper(), "speculative-draft-model-path": head, "speculative-num-draft-tokens": 8
    }  # fmt: skip
    assert llama_server(choice).values["spec-type"] == f"draft-{method}"


def test_settings_without_an_equivalent_are_reported():
    for drafter in ("lookahead", "medusa"):
        settings = equivalents(Choice(drafter, 4, draft="d"))
        assert set(settings) == set(configs.PROGRAMS)
        for each in settings.values():
            assert (each.values, each.text) == (None, "")
            assert f"no counterpart of {drafter!r}" in each.note
    assert "0.32" in vllm(Choice("medusa", 4, draft="d")).note


def test_a_stack_is_a_list_for_programs_with_stacks_and_an_exit_is_of_the_target_itself():
    stack = Choice("ngram,model", 6, draft="d")
    assert llama_server(stack).values["spec-type"] == "ngram-simple,draft-simple"
    assert vllm(stack).values is None
    more = vllm(Choice("suffix,ngram", 6)).values["additional_config"]
    assert more == {"slipstream": {"drafter": ["suffix", "ngram"]}}
    assert llama_server(Choice("suffix,model", 6, draft="d")).values is None
    assert transformers(Choice("layerskip", 3, options={"exit": 4})).values == {
        "assistant_early_exit": 4, "num_assistant_tokens": 3
    }  # fmt: skip
    assert transformers(Choice("layerskip", 3)).values is None


def test_plain_decoding_has_settings_too():
    for each in equivalents(Choice("none")).values():
        assert (each.values, each.text) == ({}, "")
        assert each.note.startswith("plain decoding")
    assert "draft" not in slipstream(Choice("ngram", 3, draft="d"))
    assert slipstream(Choice("none", engine={"quantize": "int8", "dtype": None})) == {
        "target": "embedded", "drafter": "none", "draft_tokens": 0, "quantize": "int8"
    }  # fmt: skip


def test_our_own_names_are_options_of_generate_and_a_model_without_a_name_is_refused():
    with pytest.raises(ParameterError, match="none is named"):
        vllm(Choice("model", 4))
    settings = slipstream(Choice("suffix,model", 6, "t", "d", options={"min_match": 3}))
    assert settings == {
        "target": "t", "draft": "d", "drafter": "suffix,model", "draft_tokens": 6, "drafter_option": ["min_match=3"]
    }  # fmt: skip


def test_settings_of_a_draft_model_are_left_out_with_a_drafter_that_has_none():
    """`slipstream generate` would refuse the file."""
    engine = {"draft_quantize": "int8", "draft_tokenizer": "string", "threads": 2}
    assert slipstream(Choice("suffix", 5, draft="some", engine=engine)) == {
        "target": "embedded", "drafter": "suffix", "draft_tokens": 5, "threads": 2,
    }  # fmt: skip
    assert engine.items() <= slipstream(Choice("model", 5, draft="some", engine=engine)).items()
    assert "draft_quantize" not in slipstream(Choice("eagle3", 5, draft="head", engine=engine))


def test_another_tokenizer_has_a_counterpart_in_transformers_alone():
    same, string = (
        equivalents(Choice("model", 4, draft="d", engine={"draft_tokenizer": method})) for method in ("same", "string")
    )
    assert same == equivalents(Choice("model", 4, draft="d"))
    assert string["vllm"].values is string["sglang"].values is string["llama-server"].values is None
    assert "assistant_tokenizer" in string["transformers"].note


@pytest.mark.parametrize(("drafter", "key"), [("model", "pard_token"), ("eagle3", "ptd_token_id")])
def test_vllm_is_told_of_a_draft_that_takes_one_pass(tmp_path: Path, drafter: str, key: str):
    (tmp_path / "config.json").write_text(json.dumps({key: 7}))
    settings = vllm(Choice(drafter, 5, draft=str(tmp_path)))
    assert settings.values["speculative_config"]["parallel_drafting"] is True
    assert "V1 runner" in settings.note
    (tmp_path / "config.json").write_text(json.dumps({key: None}))
    assert "parallel_drafting" not in vllm(Choice(drafter, 5, draft=str(tmp_path))).values["speculative_config"]
