"""Families with latent attention (MLA): DeepSeek V2 and V3, GLM-4.7-Flash, Mistral Small 4."""

from __future__ import annotations

import math
from typing import Any

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import (
    count_of,
    flag,
    make_refusal,
    object_of,
    positive,
    refuse,
    rope_parameters,
)
from slipstream.checkpoints.families.family import Family, Fields, common
from slipstream.checkpoints.families.mixtures import CORRECTED, describe_mixture
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.checkpoints.layers import Latent
from slipstream.checkpoints.module_shape import Experts
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import ConfigError, UnsupportedModelError


def _describe(config: ReadKeys, given: Fields, experts: Experts) -> Fields:
    """Describe a decoder with these experts, whose layers all have latent attention."""
    refuse(config, "rope_interleave", True)
    refuse(config, "moe_layer_freq", 1)
    if "q_lora_rank" not in config:
        why = "it is the width of the vector that queries are computed from, or null if there is none"
        raise ConfigError("config.json has no q_lora_rank", why=why, fix="export it again")
    part = Latent(
        rank=count_of(config, "kv_lora_rank"), query_rank=count_of(config, "q_lora_rank", 0, least=0),
        plain=count_of(config, "qk_nope_head_dim"), rotated=count_of(config, "qk_rope_head_dim"),
        value=count_of(config, "v_head_dim"),
    )  # fmt: skip
    config.get("qk_head_dim")  # the sum of plain and rotated dimensions
    biased, rope = flag(config, "attention_bias", False), rope_parameters(config)
    if biased and not part.query_rank:
        raise make_refusal("attention_bias is true, which is not run without q_lora_rank")
    rope["dimensions"] = part.rotated
    rope.get("partial_rotary_factor")  # repeats `dimensions`
    scale, grown = (part.plain + part.rotated) ** -0.5, rope.get("mscale_all_dim")
    if grown and rope.get("rope_type", rope.get("type", "default")) != "default":
        scale *= (1 + 0.1 * positive(rope, "mscale_all_dim") * math.log(max(1.0, positive(rope, "factor")))) ** 2
    beta = rope.get("llama_4_scaling_beta") if given["model_type"] == "mistral4" else None
    if beta:
        given["growth"] = (beta, count_of(rope, "original_max_position_embeddings"), 0)
        rope.get("max_position_embeddings")  # repeats the key of config.json
    given |= {"qkv_bias": biased, "o_bias": biased, "rope_parameters": rope}
    return describe_mixture(
        given, experts, latent=part, kv_heads=1, head_dim=part.rotated + part.rank, scale=scale, growing=bool(beta)
    )


def _common(config: ReadKeys, context: int, eps: float = 1e-6) -> Fields:
    return common(config, context=context, eps=eps, size=count_of(config, "qk_rope_head_dim"))


def _experts(config: ReadKeys, sparse: list[bool], **parts: Any) -> Experts:
    """Return the mixture of the layers in `sparse`. parts: fields in which this family differs from the defaults."""
    inner = count_of(config, "moe_intermediate_size")
    usual: dict[str, Any] = {
        "norm_topk": flag(config, "norm_topk_prob", True), "groups": count_of(config, "n_group", 1),
        "top_groups": count_of(config, "topk_group", 1), "scale": positive(config, "routed_scaling_factor", 1.0),
        "shared": inner * count_of(config, "n_shared_experts", 1, least=0),
    }  # fmt: skip
    count, per_token = count_of(config, "n_routed_experts"), count_of(config, "num_experts_per_tok")
    return Experts(count, per_token, inner, layers=tuple(sparse), **usual | parts)


def _dense_first(config: ReadKeys, given: Fields, default: int) -> list[bool]:
    dense = count_of(config, "first_k_dense_replace", default, least=0)
    return [i >= dense for i in range(given["layers"])]


def _deepseek_v2(config: ReadKeys) -> Fields:
    given, method = _common(config, 2048), config.get("topk_method", "greedy")
    for key, plain in (("mlp_bias", False), ("norm_topk_prob", False), ("scoring_func", "softmax")):
        refuse(config, key, plain)
    parts: dict[str, Any] = {"norm_topk": False}
    if method == "greedy":
        parts |= {"groups": 1, "top_groups": 1}
    elif method != "group_limited_greedy":
        raise make_refusal(f"topk_method is {method!r}", "it supports greedy and group_limited_greedy")
    config.setdefault("n_shared_experts", 2)
    experts = _experts(config, _dense_first(config, given, 0), group_best=1, **parts)
    if experts.per_token > experts.top_groups * experts.count // experts.groups:
        raise make_refusal(f"num_experts_per_tok is {experts.per_token}, more than the chosen groups have")
    return _describe(config, given, experts)


def _deepseek_v3(config: ReadKeys) -> Fields:
    given = _common(config, 4096)
    refuse(config, "scoring_func", "sigmoid")
    refuse(config, "topk_method", "noaux_tc")
    config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    for key, value in (("n_group", 8), ("topk_group", 4), ("routed_scaling_factor", 2.5)):
        config.setdefault(key, value)
    return _describe(config, given, _experts(config, _dense_first(config, given, 3), sigmoid=True, corrected=True))


def _glm4_moe_lite(config: ReadKeys) -> Fields:
    given = _common(config, 202752, 1e-5)
    layers, kinds = given["layers"], config.get("mlp_layer_types")
    if kinds is None:
        refuse(config, "first_k_dense_replace", 1)
        kinds = ["dense", *["sparse"] * (layers - 1)]
    config.get("first_k_dense_replace")
    if not isinstance(kinds, list) or len(kinds) != layers or any(each not in ("dense", "sparse") for each in kinds):
        what = f"mlp_layer_types must name 'dense' or 'sparse' for each of {layers} layers, got {kinds!r:.200}"
        raise ConfigError(what, fix="correct config.json")
    refuse(config, "scoring_func", "sigmoid")
    refuse(config, "topk_method", "noaux_tc")
    config.get("num_nextn_predict_layers")
    config.setdefault("routed_scaling_factor", 1.8)
    sparse = [each == "sparse" for each in kinds]
    return _describe(config, given, _experts(config, sparse, sigmoid=True, corrected=True))


def _mistral4(config: ReadKeys) -> Fields:
    given = _common(config, 1048576)
    if not (object_of(config, "rope_parameters") or object_of(config, "rope_scaling")):
        raise ConfigError("config.json has no rope_parameters", why="the model depends on them", fix="export it again")
    return _describe(config, given, _experts(config, _dense_first(config, given, 0)))


def _keys(header: GgufHeader) -> JsonMapping:
    """Return keys of config.json for a GGUF file of any of these families."""
    if not header.size("attention.key_length_mla"):
        raise UnsupportedModelError(
            f"{header.path.name} has no {header.architecture}.attention.key_length_mla",
            why="the file was made before llama.cpp stored the keys and values of heads as attn_k_b and attn_v_b",
            fix="convert the model again, or download a newer file",
        )
    corrected = any(tensor.name.endswith(".exp_probs_b.bias") for tensor in header.tensors)
    sigmoid = header.setting("expert_gating_func", 2 if corrected else 1) == 2
    rotated, rope = header.size("rope.dimension_count"), dict(header.rope)
    if grown := header.setting("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": round(10 * grown, 6), "mscale_all_dim": round(10 * grown, 6)}
    if beta := header.setting("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = beta
    groups, model = header.size("expert_group_count") or 1, "deepseek_v3" if sigmoid else "deepseek_v2"
    keys: JsonObject = {
        "model_type": "mistral4" if header.architecture == "mistral4" or beta else model, "rope_parameters": rope,
        "num_hidden_layers": header.size("block_count") - header.size("nextn_predict_layers"),
        "q_lora_rank": header.size("attention.q_lora_rank") or None,
        "kv_lora_rank": header.size("attention.kv_lora_rank"), "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": header.size("attention.key_length_mla") - rotated,
        "v_head_dim": header.size("attention.value_length_mla"),
        "first_k_dense_replace": header.size("leading_dense_block_count"), "n_group": groups,
        "topk_group": header.size("expert_group_used_count") or 1,
        "topk_method": "noaux_tc" if sigmoid else "greedy" if groups == 1 else "group_limited_greedy",
        "n_routed_experts": header.size("expert_count"), "n_shared_experts": header.size("expert_shared_count"),
        "routed_scaling_factor": round(header.setting("expert_weights_scale") or 1.0, 6),
        "norm_topk_prob": header.setting("expert_weights_norm", False), "partial_rotary_factor": 1.0,
    }  # fmt: skip
    return keys


_NAMES = CORRECTED | {
    "q_a_layernorm": "q_a_norm", "kv_a_layernorm": "kv_a_norm", "kv_a_proj_with_mqa": "kv_a_proj",
}  # fmt: skip
_GGUF = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_norm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj": "attn_kv_a_mqa", "self_attn.kv_a_norm": "attn_kv_a_norm",
    "self_attn.k_up_proj": "attn_k_b", "self_attn.v_up_proj": "attn_v_b",
}  # fmt: skip


def _family(read: Any, gguf: str = "", further: bool = False) -> Family:
    return Family(
        read=read, names=_NAMES, pairs=True, further=further, gguf=gguf, keys=_keys, gguf_names=_GGUF, gguf_pairs=True
    )


FAMILIES = {
    "deepseek_v2": _family(_deepseek_v2),
    "deepseek_v3": _family(_deepseek_v3, "deepseek2", further=True),
    "glm4_moe_lite": _family(_glm4_moe_lite, further=True),
    "mistral4": _family(_mistral4, "mistral4"),
}
