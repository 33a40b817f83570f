"""What configurations and tensors of every family may say wrongly: one error that names the key or the tensor, and what
would run the model instead."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.module_shape import Experts
from slipstream.checkpoints.weights import load_weights
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from tests.tiny_checkpoints import clone, rewrite

Edit = Callable[[dict[str, Tensor]], Any]
EXPERTS = "model.layers.1.mlp.experts."


def read(folder: Path, **keys: Any) -> DecoderConfig:
    return DecoderConfig.from_dict(json.loads((folder / "config.json").read_text()) | keys)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "an activation that is no name": ("llama", {"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]"),
    "an unknown activation": ("gemma4-moe", {"hidden_activation": "mish"}, "hidden_activation is 'mish'"),
    "rope of one kind of layer that is no object": (
        "gemma3", {"rope_parameters": {"sliding_attention": [1], "full_attention": {}}},
        r"sliding_attention is \[1\], but must be a JSON object",
    ),
    "a layer list that is too short": ("gpt-oss", {"layer_types": ["full_attention"]}, "layer_types must name .* 4"),
    "a share that is no number": (
        "gemma4", {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": "x"}}},
        "partial_rotary_factor is 'x'",
    ),
    "a list of layers that is none": ("qwen3-moe", {"mlp_only_layers": 7}, "last key .* is 'mlp_only_layers'"),
    "layers of experts that are no list": ("llama4", {"moe_layers": 7}, "last key .* is 'moe_layers'"),
    "a chunk that is no number": ("llama4", {"attention_chunk_size": "x"}, "attention_chunk_size is 'x'"),
    "windows where chunks belong": (
        "llama4", {"layer_types": ["sliding_attention"] * 4}, r"must name one of \('chunked_attention'"
    ),
    "a last layer that is none": ("ernie4.5-moe", {"moe_layer_end_index": "x"}, "moe_layer_end_index is 'x'"),
    "biases that experts do not have": ("ernie4.5-moe", {"use_bias": True}, "use_bias is True"),
    "experts without their number": ("gemma4", {"enable_moe_block": True}, "has no num_experts"),
    "latent attention without its rank": ("deepseek-v3", {"kv_lora_rank": None}, "has no kv_lora_rank"),
    "latent attention without a size": ("glm4-moe-lite", {"qk_nope_head_dim": None}, "has no qk_nope_head_dim"),
    "a rank of queries that is none": ("deepseek-v2", {"q_lora_rank": "x"}, "q_lora_rank is 'x'"),
    "rotary embeddings that are not interleaved": (
        "deepseek-v3", {"rope_interleave": False}, "rope_interleave is False"
    ),
    "odd rotated dimensions": ("deepseek-v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim 15 is odd"),
    "biases of queries that have none": ("deepseek-v2", {"q_lora_rank": None}, "does not run without q_lora_rank"),
    "an unknown choice of experts": ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    "weights that are not normalised there": ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
    "scores of another kind": ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    "fewer experts in the groups than are chosen": (
        "deepseek-v2-lite", {"num_experts_per_tok": 5}, "more than the experts of the chosen groups"
    ),
    "kinds of MLP that are too few": ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name"),
    "more experts chosen than there are": ("gemma4-moe", {"top_k_experts": 5}, "num_experts_per_tok is 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_key_is_named(name: str, checkpoint: Callable[[str], Path]) -> None:
    family, keys, says = WRONG[name]
    with pytest.raises((ConfigError, UnsupportedModelError), match=says):
        read(checkpoint(family), **keys)


@pytest.mark.parametrize("kind", ["deepseek_v32", "minicpm3"])
def test_a_family_that_is_not_run_is_refused_by_name_with_what_runs_it(kind: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"architecture {kind!r}.*'auto', with which transformers runs this model"
    ):
        DecoderConfig.from_dict({"model_type": kind, "hidden_size": 64})


@pytest.mark.parametrize(
    ("family", "parts", "says"),
    [
        ("cohere", {"scaled": True}, "parallel attention and MLP only without"),
        ("cohere", {"norm_after": True}, "parallel attention and MLP only without"),
        ("stablelm-parallel", {"sparse": True}, "parallel attention and MLP only without"),
    ],
)
def test_parts_in_a_combination_that_no_kernel_computes_are_refused(
    family: str, parts: dict[str, Any], says: str, checkpoint: Callable[[str], Path]
) -> None:
    config = DecoderConfig.load(checkpoint(family))
    with pytest.raises(UnsupportedModelError, match=says):
        replace(config, each=tuple(replace(layer, **parts) for layer in config.described)).check()


def test_experts_and_embeddings_with_norms_of_their_own_need_their_surroundings(
    checkpoint: Callable[[str], Path],
) -> None:
    with pytest.raises(UnsupportedModelError, match="runs an embedding for each layer only without"):
        replace(DecoderConfig.load(checkpoint("gemma4-shared")), embed_norm=True).check()
    experts = Experts(4, 2, 32, True, (True,) * 4, apart=True)
    with pytest.raises(UnsupportedModelError, match="only without LayerNorm"):
        replace(DecoderConfig.load(checkpoint("nemotron")), experts=experts).check()


def change(name: str, how: Callable[[Tensor], Tensor]) -> Edit:
    return lambda state: state.update({name: how(state[name]).clone().contiguous()})


DAMAGED: dict[str, tuple[str, Edit, str]] = {
    "a sink for each layer only": (
        "gpt-oss", change("model.layers.0.self_attn.sinks", lambda t: t[:1]), r"layers\.0\.self_attn\.sinks .* \(1,\)"
    ),
    "keys and values of too few heads": (
        "deepseek-v3", change("model.layers.1.self_attn.kv_b_proj.weight", lambda t: t[:288]),
        r"layers\.1\.self_attn\.kv_b_proj\.weight in .* makes layers\.1\.self_attn\.v_up_proj.* shape \(160, 64\)",
    ),
    "keys and values that do not divide": (
        "deepseek-v3", change("model.layers.1.self_attn.kv_b_proj.weight", lambda t: t[:-1]), r"\(383, 64\)"
    ),
    "keys and values of another rank": (
        "deepseek-v2", change("model.layers.0.self_attn.kv_b_proj.weight", lambda t: t[:, :-1]), r"\(252, 32\)"
    ),
    "latent vectors of another width": (
        "deepseek-v2", change("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", lambda t: t[:-16]), r"\(64, 64\)"
    ),
    "a number in place of fused experts": (
        "gpt-oss", change(EXPERTS + "down_proj", lambda t: t.sum()), r"unknown tensors: .*layers\.1\.mlp\.experts\.down"
    ),
    "a number in place of fused queries": (
        "phi3", change("model.layers.1.self_attn.qkv_proj.weight", lambda t: t.sum()), r"unknown .*layers\.1\.self_attn"
    ),
    "too few experts": (
        "gpt-oss", change(EXPERTS + "gate_up_proj", lambda t: t[:3]), r"lacks 2 of .*layers\.1\.mlp\.experts\.3\.gate"
    ),
    "too many experts": (
        "gemma4-moe", change("model.layers.1.experts.down_proj", lambda t: torch.cat([t, t])),
        r"does not describe: model\.layers\.1\.experts\.down_proj"
    ),
    "factors for other experts": (
        "gemma4-moe", change("model.layers.2.router.per_expert_scale", lambda t: t[:2]), r"2\.router\.per_expert_scale"
    ),
    "a bias of too many outputs": (
        "gpt2", change("transformer.h.1.attn.c_attn.bias", lambda t: torch.cat([t, t])),
        r"h\.1\.attn\.c_attn\.bias in .* makes layers\.1\.self_attn\.q_proj\.bias of the shape \(384,\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_tensor_that_does_not_fit_is_named(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    family, edit, says = DAMAGED[name]
    folder = rewrite(clone(checkpoint(family), tmp_path / "damaged"), edit)
    with pytest.raises(CheckpointError, match=says):
        load_weights(folder, DecoderConfig.load(folder))


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe"])
def test_layers_that_neither_the_decoder_has_nor_an_mtp_layer_is_are_named(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = rewrite(clone(checkpoint(family), tmp_path / "damaged"), num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"does not describe: model\.layers\.2\.input_layernorm"):
        load_weights(folder, DecoderConfig.load(folder))


def test_latent_attention_must_say_whether_queries_have_a_vector_of_their_own(
    checkpoint: Callable[[str], Path],
) -> None:
    config = json.loads((checkpoint("deepseek-v2-lite") / "config.json").read_text())
    assert DecoderConfig.from_dict(config).described[0].latent is not None
    del config["q_lora_rank"]
    with pytest.raises(ConfigError, match="has no q_lora_rank"):
        DecoderConfig.from_dict(config)
