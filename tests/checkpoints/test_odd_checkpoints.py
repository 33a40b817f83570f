"""Checkpoints as people have them, by hand, by other tools, by older versions: `generate` of transformers is the truth.
Each has its text under both executors, or is refused by name, or a warning names what is left out."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.gguf.gguf_writer import convert_to_gguf
from slipstream import LLM, SamplingParams
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.generation_defaults import GenerationDefaults
from slipstream.errors import CheckpointError, ConfigError, LoadError, UnsupportedModelError
from tests.tiny_checkpoints import EXACT, FAMILIES, rewrite

PROMPT, TOKENS = [5, 9, 33, 71, 2, 14, 60, 8, 8, 41, 90, 17], 12
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Change = Callable[[Path], Any]


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Family -> a copy of its checkpoint that may be changed."""
    return lambda family="llama": Path(shutil.copytree(checkpoint(family), tmp_path / family))


def own(folder: Path, **settings: Any) -> list[int]:
    return LLM(folder, **EXACT | settings).generate([PROMPT], SamplingParams(max_tokens=TOKENS))[0].token_ids


def by_generate(folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def keys(**changed: Any) -> Change:
    return lambda folder: rewrite(folder, **changed)


def rope(**parameters: Any) -> Change:
    return keys(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0} | parameters)


def generation(**settings: Any) -> Change:
    return lambda folder: (folder / "generation_config.json").write_text(json.dumps(settings))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any], **more: Any) -> Change:
    return lambda folder: rewrite(folder, change, **more)


def other(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 0.25


def float8(held: dict[str, torch.Tensor], kind: torch.dtype = torch.float8_e4m3fn) -> None:
    held |= {name: tensor.to(kind) for name, tensor in held.items() if tensor.ndim == 2}


def in_two_shards(folder: Path) -> None:
    """The index does not name the head."""
    held = load_file(folder / "model.safetensors")
    names = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in held}
    for file in set(names.values()):
        save_file({n: t for n, t in held.items() if names[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    del names[HEAD]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SAME: dict[str, tuple[str, Change]] = {
    "a scaling beside rope_parameters": ("llama", keys(rope_scaling=YARN)),
    "a linear one, with its theta outside": (
        "mixtral", keys(rope_scaling={"type": "linear", "factor": 4}, rope_theta=9.0)
    ),
    "no theta": ("mixtral", keys(rope_parameters={"rope_type": "default"})),
    "a length beside the scaling": ("llama", rope(original_max_position_embeddings=128)),
    "a length at the top, which wins": (
        "qwen2", keys(rope_scaling=YARN, original_max_position_embeddings=32, rope_parameters=None)
    ),
    "no length of llama3": ("llama", rope(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "yarn with every parameter": (
        "llama", rope(beta_fast=16, beta_slow=2.5, mscale=0.7, mscale_all_dim=0.9, truncate=False)
    ),
    "yarn with zeros and null": ("llama", rope(factor=None, beta_fast=0, mscale=0.7, mscale_all_dim=0.0)),
    "an attention factor": ("llama", rope(attention_factor=0.7)),
    "experts under their other name": ("mixtral", keys(num_local_experts=None, num_experts=4)),
    "an unused window": ("qwen2", keys(sliding_window=4, max_window_layers=0, use_sliding_window=False)),
    "a tied configuration with a head of its own": (
        "llama", tensors(lambda held: held.update({HEAD: other(held[HEAD])}), tie_word_embeddings=True)
    ),
    "the same of GPT-2": (
        "gpt2", tensors(lambda held: held.update({HEAD: other(held["transformer.wte.weight"])}))
    ),
    "a tied configuration with the head alone": (
        "llama-tied-mha", tensors(lambda held: held.update({HEAD: held.pop(EMBEDDING)}))
    ),
    "a tied configuration with the embedding twice": (
        "llama-tied-mha", tensors(lambda held: held.update({HEAD: held[EMBEDDING].clone()}))
    ),
    "float8": ("llama", tensors(float8)),
    "float8 of the other kind, tied": ("qwen3", tensors(lambda held: float8(held, torch.float8_e5m2))),
    "a tensor that the index does not name": ("llama", in_two_shards),
    "neutral top_p": ("llama", generation(do_sample=False, top_p=0.0, temperature=0.0)),
    "neutral top_k": ("llama", generation(do_sample=False, top_k=-1)),
    "no suppressed ids": ("llama", generation(suppress_tokens=[-1])),
    "renormalised": ("llama", generation(renormalize_logits=True, num_beams=1, guidance_scale=1, typical_p=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_an_odd_checkpoint_has_the_text_of_generate_under_both_executors(name: str, copy: Callable[..., Path]) -> None:
    family, change = SAME[name]
    folder = copy(family)
    before = own(folder) if "neutral" in name else None
    change(folder)
    wanted = by_generate(folder)
    assert own(folder) == wanted
    assert own(folder, executor="transformers") == wanted
    assert before in (None, wanted)


def test_a_loaded_model_with_a_head_of_its_own_keeps_it(copy: Callable[..., Path]) -> None:
    folder = copy()
    SAME["a tied configuration with a head of its own"][1](folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert model.config.tie_word_embeddings
    assert LLM(model).generate([PROMPT], SamplingParams(max_tokens=TOKENS))[0].token_ids == by_generate(folder)


def test_a_head_of_its_own_is_converted(copy: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = copy()
    SAME["a tied configuration with a head of its own"][1](folder)
    assert own(convert_to_gguf(folder, tmp_path / "own.gguf", "f32").file) == by_generate(folder)


NAMED: dict[str, tuple[str, Change]] = {
    "sliding_window": ("llama", keys(sliding_window=5)),
    "layer_types": ("mistral-window", keys(layer_types=3 * ["full_attention"])),
    "rope_parameters.mrope_section": ("llama", rope(mrope_section=[2, 3, 3])),
    "rope_parameters.factor": ("llama", keys(rope_parameters={"factor": 4.0})),
    "original_max_position_embeddings": ("llama", keys(original_max_position_embeddings=64)),
    "final_logit_softcapping": ("qwen2", keys(final_logit_softcapping=5.0)),
    "auto_map": ("llama", keys(auto_map={"AutoModelForCausalLM": "modeling.X"})),
    "quantization": ("llama", keys(quantization={"bits": 4})),
    "num_hidden_layers": ("gpt2", keys(num_hidden_layers=2)),
    "num_beams=3": ("llama", generation(num_beams=3)),
    "no_such_setting=True": ("llama", generation(no_such_setting=True)),
    "top_p=0.0": ("llama", generation(top_p=0.0)),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_is_left_out_is_named(name: str, copy: Callable[..., Path], caplog: Any) -> None:
    family, change = NAMED[name]
    folder = copy(family)
    own(folder)
    assert not caplog.messages
    change(folder)
    own(folder)
    assert sum(name in message for message in caplog.messages) == 1


PUBLISHED: list[dict[str, Any]] = [  # keys beside those of the architecture, as they are in files that are widely used
    {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"x": 1},
     "pretraining_tp": 1, "_name_or_path": "x", "torch_dtype": "bfloat16", "attention_dropout": 0.0},
    {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21,
     "use_mrope": False, "use_cache": True, "cache_implementation": "hybrid"},
    {"model_type": "mistral", "sliding_window": None, "head_dim": 16, "unsloth_version": "2026.1",
     "id2label": {"0": "x"}},
    {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 3,
     "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False},
    {"model_type": "gpt2", "n_ctx": 128, "summary_type": "cls_index", "resid_pdrop": 0.1, "architectures": ["X"],
     "task_specific_params": {"text-generation": {"max_length": 50}}, "n_embd": 64, "n_head": 4, "n_layer": 2,
     "vocab_size": 96},
]  # fmt: skip


@pytest.mark.parametrize("more", PUBLISHED, ids=lambda more: more["model_type"])
def test_usual_keys_are_not_warned_of(more: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    usual = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
             "hidden_act": "silu", "tie_word_embeddings": True}  # fmt: skip
    config = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, **more}
    (tmp_path / "config.json").write_text(json.dumps(config if more["model_type"] == "gpt2" else usual | config))
    DecoderConfig.load(tmp_path)
    GenerationDefaults.of({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.51.0",
                           "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [2, 3], "max_length": 4096,
                           "max_new_tokens": 512, "num_beams": 1, "use_cache": True, "_from_model_config": True,
                           "cache_implementation": "static"})  # fmt: skip
    assert not caplog.messages


def test_every_family_saves_files_without_a_warning(checkpoint: Callable[[str], Path], caplog: Any) -> None:
    for family in FAMILIES:
        DecoderConfig.load(checkpoint(family))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def scaled(held: dict[str, torch.Tensor]) -> None:
    """As ModelOpt writes them."""
    float8(held)
    held |= {f"{name}_scale": torch.tensor(0.5) for name in list(held) if "proj.weight" in name}


REFUSED: dict[str, tuple[str, Change, type[LoadError], str]] = {
    "attention of both sides": ("llama", keys(is_causal=False), UnsupportedModelError, "is_causal is False"),
    "layers that differ": ("llama", keys(per_layer_config={"0": {}}), UnsupportedModelError, "per_layer_config is"),
    "rope by kind of layer": (
        "qwen3", keys(rope_parameters={"full_attention": {"rope_type": "default"}}), UnsupportedModelError,
        "rotary parameters differ for 'full_attention'"
    ),
    "windows without a size": (
        "qwen2", keys(layer_types=3 * ["sliding_attention"]), ConfigError, "all layers have full_attention"
    ),
    "integers": ("llama", tensors(lambda held: float8(held, torch.int8)), CheckpointError, "stored as torch.int8"),
    "the same tensor twice": (
        "llama", tensors(lambda held: held.update({"norm.weight": held["model.norm.weight"] * 2})), CheckpointError,
        r"norm\.weight"
    ),
    "scales without a configuration": ("llama", tensors(scaled), CheckpointError, "down_proj.weight_scale"),
    "more layers than any model": ("llama", keys(num_hidden_layers=10**9), ConfigError, "at most 10000 is allowed"),
    "more experts than any model": ("mixtral", keys(num_local_experts=10**9), ConfigError, "at most 100000 is"),
    "more labels than memory": ("llama", keys(num_labels=10**9), ConfigError, "num_labels is 1000000000, but at most"),
    "both": ("mixtral", keys(num_hidden_layers=9999, num_local_experts=99999), ConfigError, "more than any known"),
    "a size beyond 32 bits": ("llama", keys(vocab_size=2**40), ConfigError, "vocab_size is 1099511627776"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(name: str, copy: Callable[..., Path]) -> None:
    family, change, error, says = REFUSED[name]
    folder = copy(family)
    change(folder)
    with pytest.raises(error, match=says):
        own(folder)


BY_TRANSFORMERS: dict[str, tuple[Change, str]] = {
    "an unknown quantisation": (
        tensors(scaled, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}),
        "is quantised with the method 'modelopt'"
    ),
    "scales without a configuration": (tensors(scaled), r"has 21 tensors that the model .*down_proj\.weight_scale"),
    "a bias that config.json denies": (
        tensors(lambda held: held.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96)})), r"mlp\.up_proj\.bias"
    ),
    "more layers than any model": (keys(num_hidden_layers=10**9), "at most 10000 is allowed"),
    "more weights than the file": (keys(vocab_size=10**8), r"has 12,8\d\d,\d+,\d+ weights, but the files only "),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_transformers_does_not_run_what_it_would_leave_out(name: str, copy: Callable[..., Path]) -> None:
    change, says = BY_TRANSFORMERS[name]
    folder = copy()
    change(folder)
    with pytest.raises(LoadError, match=says):
        own(folder, executor="transformers")


def test_tensors_that_belong_to_no_weight_are_named(copy: Callable[..., Path], caplog: Any) -> None:
    folder = rewrite(copy(), lambda held: held.update({"v_head.summary.weight": torch.ones(1, 64)}))
    assert own(folder, executor="transformers") == by_generate(folder)
    assert "has 1 tensors that transformers does not use: v_head.summary.weight" in caplog.text
