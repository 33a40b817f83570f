"""Multimodal checkpoints: their text part runs on our own kernels, and is named what is left out."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.weights import load_weights
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from tests.checkpoints.tiny_wrapped import WRAPPED, make
from tests.targets.reference import Wide
from tests.tiny_checkpoints import rewrite
from tests.tiny_families import MINISTRAL

PROMPT = [(i * i * 7 + i) % 91 + 3 for i in range(23)]


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_part_of_a_whole_multimodal_model_has_the_text_of_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(name, tmp_path)
    model.config.text_config._experts_implementation = "eager"
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    text = LLM(tmp_path, "ngram", executor="native", draft_tokens=4).generate([PROMPT], params)[0].token_ids
    named = [message for message in caplog.messages if "left out" in message]
    assert ["for pictures or sounds, which are left out: " in message for message in named] == [True], named
    with torch.no_grad(), Wide():
        logits = model(torch.tensor([PROMPT + text])).logits[0, len(PROMPT) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < 1e-4 * logits.abs().max()
    assert LLM(model.float(), executor="native").generate([PROMPT], params)[0].token_ids == text


def test_configurations_of_tiny_models_do_not_change_each_other() -> None:
    """transformers writes Mistral 4's default of partial_rotary_factor into the rotary parameters that it gets."""
    before = copy.deepcopy(MINISTRAL)
    WRAPPED["mistral3 of Mistral 4"]()
    assert before == MINISTRAL


def same_weights(folder: Path, before: dict[str, torch.Tensor]) -> None:
    now = load_weights(folder, DecoderConfig.load(folder))
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], values) for name, values in before.items())


def test_a_published_gemma_3_leaves_out_what_its_architecture_has_by_default(tmp_path: Path) -> None:
    """As google/gemma-3-4b-it does."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    whole = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "mm_tokens_per_image": 256}
    config, theirs = DecoderConfig.from_dict(whole), transformers.Gemma3Config(**whole).text_config
    assert (config.vocab_size, config.heads, config.kv_heads) == (theirs.vocab_size, 8, 4)
    assert (config.head_dim, config.tie_embeddings, config.eos_ids) == (theirs.head_dim, True, (1, 106))
    assert [layer.window for layer in config.described[4:7]] == [1024, None, 1024]
    assert [rope["rope_theta"] for rope in config.ropes] == [1e4, 1e6]


def test_older_files_of_qwen_say_everything_in_one_object(tmp_path: Path) -> None:
    make("qwen2_5_vl", tmp_path)
    before = dict(load_weights(tmp_path, DecoderConfig.load(tmp_path)))
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    old = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6, "rope_parameters": None}
    rewrite(tmp_path, text_config=None, **{**inner, **old, "model_type": "qwen2_5_vl"})
    same_weights(tmp_path, before)
    assert DecoderConfig.load(tmp_path).rope_parameters == {"rope_type": "default", "type": "mrope", "rope_theta": 1e6}


def test_published_experts_of_qwen_are_stored_transposed(tmp_path: Path) -> None:
    make("qwen3_vl_moe", tmp_path)
    before = dict(load_weights(tmp_path, DecoderConfig.load(tmp_path)))

    def transpose(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if ".experts." in name]:
            state[name] = state[name].transpose(1, 2).contiguous()

    rewrite(tmp_path, transpose)
    same_weights(tmp_path, before)


def test_parts_for_pictures_are_unknown_tensors_of_a_model_for_texts(tmp_path: Path) -> None:
    make("mistral3", tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    rewrite(tmp_path, text_config=None, vision_config=None, **inner)
    with pytest.raises(CheckpointError, match=r"does not describe: multi_modal_projector\.linear_1"):
        load_weights(tmp_path, DecoderConfig.load(tmp_path))


@pytest.mark.parametrize(
    ("whole", "error", "says"),
    [
        ({"text_config": {"model_type": "mamba9"}}, UnsupportedModelError, "architecture 'mamba9'"),
        ({"text_config": {}}, ConfigError, "has no hidden_size"),
        ({"text_config": 7}, ConfigError, "text_config is 7, expected an object"),
        ({"text_config": {"model_type": None}}, ConfigError, "has no model_type"),
        ({"model_type": "llava9", "text_config": {}}, UnsupportedModelError, "architecture 'llava9'"),
    ],
)
def test_a_text_part_that_cannot_be_run_is_refused_by_name(
    whole: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        DecoderConfig.from_dict({"model_type": "mistral3"} | whole)
