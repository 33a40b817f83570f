"""Families with recurrent layers: LFM2 and LFM3 (short convolutions), Qwen3-Next, Qwen3.5 and OLMo Hybrid (Gated
DeltaNet). `mamba2` has the families with Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import (
    FULL,
    SLIDING,
    count_of,
    flag,
    object_of,
    partial_rope,
    positive,
    refuse,
    rope_parameters,
    ropes_by_kind,
)
from slipstream.checkpoints.families.extras import biases
from slipstream.checkpoints.families.family import Family, Fields, common, describe
from slipstream.checkpoints.families.llama import sparse_layers
from slipstream.checkpoints.families.mixtures import describe_mixture
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.checkpoints.module_shape import Experts
from slipstream.checkpoints.recurrence import CONVOLUTION, DELTA, Recurrence
from slipstream.core.strict import JsonMapping
from slipstream.errors import ConfigError

LINEAR = "linear_attention"


def mixers(config: ReadKeys, part: Recurrence, default: Seq[str]) -> list[Recurrence | None]:
    """Return the mixer of each layer by `layer_types`: `part`, or None for attention."""
    layers, types = len(default), config.get("layer_types", config.get("layers_block_type"))
    types = default if types is None else types
    recurrent = ("conv",) if part.kind == CONVOLUTION else (LINEAR, "mamba")
    attention = (FULL, SLIDING) if config["model_type"] == "lfm3" else (FULL, "attention")
    known = (*attention, *recurrent)
    if not isinstance(types, (list, tuple)) or len(types) != layers or any(each not in known for each in types):
        what = f"layer_types must name {', '.join(known)} for each of {layers} layers, but is {types!r:.200}"
        raise ConfigError(what, fix="correct config.json")
    return [part if each in recurrent else None for each in types]


def _lfm(config: ReadKeys, taps: int = 3, **more: Any) -> tuple[Fields, Recurrence]:
    tied = flag(config, "tie_embedding", True)
    given = common(config, context=128_000, eps=1e-5, norm_eps="norm_eps", tied=tied, **more)
    part = Recurrence(
        kind=CONVOLUTION, taps=count_of(config, "conv_L_cache", taps), value=given["hidden_size"],
        conv_bias=flag(config, "conv_bias", False), bias=flag(config, "conv_bias", False),
    )  # fmt: skip
    return given, part


def _lfm2(config: ReadKeys) -> Fields:
    given, part = _lfm(config)
    attending = config.get("full_attn_idxs")
    attending = range(given["layers"]) if attending is None else attending
    default = [FULL if i in attending else "conv" for i in range(given["layers"])]
    inner, unit = given["intermediate_size"], count_of(config, "block_multiple_of", 256)
    factor = positive(config, "block_ffn_dim_multiplier", 1.0)
    if flag(config, "block_auto_adjust_ff_dim", True):
        inner = -(-int(factor * int(2 * inner / 3)) // unit) * unit
    given |= {"rope_parameters": rope_parameters(config, 1e6), "intermediate_size": inner}
    return describe(given, recurrence=mixers(config, part, default), qk_norm="head")


def _lfm2_moe(config: ReadKeys) -> Fields:
    refuse(config, "expert_gating_func", 2)  # key of GGUF files; 2: the sigmoid
    given, part = _lfm(config)
    given["rope_parameters"] = rope_parameters(config, 1e6)
    layers, dense = given["layers"], count_of(config, "num_dense_layers", 2, least=0)
    experts = Experts(
        count_of(config, "num_experts", 32), count_of(config, "num_experts_per_tok", 4),
        count_of(config, "moe_intermediate_size", 1792), flag(config, "norm_topk_prob", True),
        tuple(i >= dense for i in range(layers)), sigmoid=True, corrected=flag(config, "use_expert_bias", True),
        scale=positive(config, "routed_scaling_factor", 1.0),
    )  # fmt: skip
    return describe_mixture(given, experts, recurrence=mixers(config, part, [FULL] * layers), qk_norm="head")


def _lfm3(config: ReadKeys) -> Fields:
    """Describe LFM3: some layers have windows, attention has a gate for each head, and outputs are normalised, too."""
    given, part = _lfm(config, 7, size=128)
    given["qkv_bias"] = given["o_bias"] = flag(config, "attention_bias", False)
    layers, window = given["layers"], config.get("sliding_window") and count_of(config, "sliding_window")
    usual = ["conv" if i % 2 or i == 0 else SLIDING if i % 4 == 0 else FULL for i in range(layers)]
    types = config.get("layer_types") or usual
    recurrence = mixers(config, part, usual)
    if not config.get("rope_parameters"):
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}
        config["rope_parameters"] = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: full}
    ropes = ropes_by_kind(config, 1e4, 1e6)
    for rope in ropes:
        rope["head_dim"] = given["head_dim"]
    return describe(
        given | {"ropes": ropes, "rope_parameters": ropes[1]}, recurrence=recurrence, qk_norm="head",
        window=[window if each == SLIDING else None for each in types],
        rotary=[0 if each == SLIDING else 1 for each in types],
        gate="head" if flag(config, "use_attention_gate", True) else "",
        norm_after=flag(config, "use_sandwich_norm", True),
    )  # fmt: skip


def _delta(config: ReadKeys) -> Recurrence:
    value = count_of(config, "linear_value_head_dim", 128)
    return Recurrence(
        kind=DELTA, taps=count_of(config, "linear_conv_kernel_dim", 4), value=value, normed=value,
        heads=count_of(config, "linear_num_value_heads", 32), groups=count_of(config, "linear_num_key_heads", 16),
        key=count_of(config, "linear_key_head_dim", 128), tiled=flag(config, "value_heads_tiled", False),
    )  # fmt: skip


def _qwen(config: ReadKeys) -> Fields:
    """Describe Qwen3-Next and Qwen3.5: three of four layers are Gated DeltaNet, the fourth is attention with a gate."""
    given = common(config, context=32768, size=256) | {"qkv_bias": flag(config, "attention_bias", False)}
    given["o_bias"] = given["qkv_bias"]
    refuse(config, "attn_output_gate", True)
    layers, every = given["layers"], count_of(config, "full_attention_interval", 4)
    given["rope_parameters"] = partial_rope(config, given["head_dim"], 1e4, 0.25)
    for key in ("mrope_section", "mrope_interleaved"):
        given["rope_parameters"].get(key)  # read, but without effect: text has one position in all sections
    parts = mixers(config, _delta(config), [LINEAR if (i + 1) % every else FULL for i in range(layers)])
    if given["model_type"] == "qwen3_5_text":
        return describe(given, recurrence=parts, qk_norm="head", gate="output")
    experts = Experts(
        count_of(config, "num_experts", 512), count_of(config, "num_experts_per_tok", 10),
        count_of(config, "moe_intermediate_size", 512), flag(config, "norm_topk_prob", True),
        sparse_layers(config, layers), shared=count_of(config, "shared_expert_intermediate_size", 512),
        shared_gate=True,
    )  # fmt: skip
    return describe_mixture(given, experts, recurrence=parts, qk_norm="head", gate="output")


def _olmo_hybrid(config: ReadKeys) -> Fields:
    """Describe OLMo Hybrid: layers of Gated DeltaNet normalise inputs, layers of attention normalise outputs."""
    given = common(config, context=65536) | biases(config)
    heads, layers = given["heads"], given["layers"]
    for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor"):
        config.get(f"linear_{name}")  # read, but only used when training begins
    rope = rope_parameters(config)
    rotates = bool(object_of(config, "rope_parameters").get("rope_theta") or config.get("rope_theta"))
    key = count_of(config, "linear_key_head_dim", 3 * given["hidden_size"] // (4 * heads))
    value = count_of(config, "linear_value_head_dim", 2 * key)
    part = Recurrence(
        kind=DELTA, taps=count_of(config, "linear_conv_kernel_dim", 4), value=value, normed=value, key=key,
        heads=count_of(config, "linear_num_value_heads", heads), eps=1e-5,
        groups=count_of(config, "linear_num_key_heads", heads), doubled=flag(config, "linear_allow_neg_eigval", True),
    )  # fmt: skip
    usual = [LINEAR if i % 4 != 3 else FULL for i in range(layers)]
    parts = mixers(config, part, usual if FULL in usual else [*usual[:-1], FULL])
    recurs = [each is not None for each in parts]
    return describe(
        given | {"rope_parameters": rope}, recurrence=parts, norm_before=recurs, qk_norm="width",
        norm_after=[not each for each in recurs], rotary=0 if rotates else None,
    )  # fmt: skip


# --- GGUF files ------------------------------------------------------------------------------------------------------


def layer_types(header: GgufHeader, recurrent: str) -> list[str]:
    """Return `layer_types` of config.json: layers without key/value heads are recurrent."""
    return [FULL if heads else recurrent for heads in header.by_layer("attention.head_count_kv")]


def _lfm2_keys(header: GgufHeader) -> JsonMapping:
    return {
        "conv_L_cache": header.size("shortconv.l_cache"), "block_auto_adjust_ff_dim": False,
        "layer_types": layer_types(header, "conv"),
    }  # fmt: skip


def _lfm2_moe_keys(header: GgufHeader) -> JsonMapping:
    return {
        **_lfm2_keys(header), "num_dense_layers": header.size("leading_dense_block_count"),
        "expert_gating_func": header.setting("expert_gating_func"),
    }  # fmt: skip


def _qwen_keys(header: GgufHeader) -> JsonMapping:
    layers = header.size("block_count") - header.size("nextn_predict_layers")
    heads, given = header.size("ssm.time_step_rank"), header.setting("attention.recurrent_layers")
    every = header.size("full_attention_interval") or 4
    recurrent = given or [(i + 1) % every > 0 for i in range(layers)]
    size = header.size("attention.key_length") or header.size("embedding_length") // header.size("attention.head_count")
    return {
        "num_hidden_layers": layers, "layer_types": [LINEAR if each else FULL for each in recurrent[:layers]],
        "linear_conv_kernel_dim": header.size("ssm.conv_kernel"), "linear_num_value_heads": heads,
        "linear_num_key_heads": header.size("ssm.group_count"), "linear_key_head_dim": header.size("ssm.state_size"),
        "linear_value_head_dim": header.size("ssm.inner_size") // max(heads, 1),
        "shared_expert_intermediate_size": header.size("expert_shared_feed_forward_length"),
        "partial_rotary_factor": (header.size("rope.dimension_count") or size) / size,
    }  # fmt: skip


SSM = {
    "recurrent.A_log": "ssm_a", "recurrent.dt_bias": "ssm_dt.bias", "recurrent.conv": "ssm_conv1d",
    "recurrent.norm": "ssm_norm", "recurrent.out_proj": "ssm_out",
}  # fmt: skip
_QWEN_GGUF = SSM | {
    "recurrent.in_proj_qkv": "attn_qkv", "recurrent.gates": "attn_gate", "recurrent.betas": "ssm_beta",
    "recurrent.steps": "ssm_alpha", "self_attn.q_proj": "attn_q", "post_attention_layernorm": "post_attention_norm",
}  # fmt: skip

_CONVOLVED = ["recurrent.conv_queries", "recurrent.conv_keys", "recurrent.conv_values"]
_GATED = {
    "self_attn.q_proj": ["self_attn.q_proj", "self_attn.gate_proj"], "recurrent.conv": _CONVOLVED,
    "recurrent.in_proj_qkv": ["recurrent.queries", "recurrent.keys", "recurrent.values"],
    "recurrent.in_proj_qkvz": ["recurrent.queries", "recurrent.keys", "recurrent.values", "recurrent.gates"],
    "recurrent.in_proj_ba": ["recurrent.betas", "recurrent.steps"],
}  # fmt: skip
_QWEN = Family(
    read=_qwen,
    names={
        "linear_attn.conv1d": "recurrent.conv", "linear_attn.in_proj_z": "recurrent.gates",
        "linear_attn.in_proj_b": "recurrent.betas", "linear_attn.in_proj_a": "recurrent.steps",
        "linear_attn": "recurrent",
    },
    fused=_GATED,
    grouped={"self_attn.q_proj": "heads", "recurrent.in_proj_qkvz": "groups", "recurrent.in_proj_ba": "groups"},
    plus_one="all", further=True, gguf="qwen35", gguf_names=_QWEN_GGUF,
    keys=lambda header: {**_qwen_keys(header), "value_heads_tiled": True},
)  # fmt: skip

_LFM2 = Family(
    read=_lfm2,
    gguf="lfm2",
    names={
        "conv.in_proj": "recurrent.in_proj", "conv.conv": "recurrent.conv_values",
        "conv.out_proj": "recurrent.out_proj", "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "feed_forward.expert_bias": "mlp.gate_correction.bias",
        "feed_forward": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
        "self_attn.out_proj": "self_attn.o_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm",
        "embedding_norm": "norm", "self_attn.g_proj": "self_attn.gate_proj",
        "post_operator_norm": "attention_out_norm", "post_ffn_norm": "mlp_out_norm",
    },
    fused={"recurrent.in_proj": ["recurrent.factors", "recurrent.gates", "recurrent.values"]},
    keys=_lfm2_keys,
    gguf_names={
        "recurrent.in_proj": "shortconv.in_proj", "recurrent.conv_values": "shortconv.conv",
        "recurrent.out_proj": "shortconv.out_proj", "norm": "token_embd_norm",
    },
)  # fmt: skip
_OLMO = {
    **{f"linear_attn.{x}_proj": f"recurrent.{part}" for x, part in zip("qkvgba", (
        "queries", "keys", "values", "gates", "betas", "steps"), strict=True)},
    **{f"linear_attn.{x}_conv1d": f"recurrent.conv_{part}" for x, part in zip("qkv", (
        "queries", "keys", "values"), strict=True)},
    "linear_attn.conv1d": "recurrent.conv", "linear_attn.o_proj": "recurrent.out_proj",
    "linear_attn.o_norm": "recurrent.norm", "linear_attn": "recurrent", "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm", "post_feedforward_layernorm": "mlp_out_norm",
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, read=_lfm2_moe, gguf="lfm2moe", keys=_lfm2_moe_keys),
    "lfm3": replace(_LFM2, read=_lfm3, gguf="", keys=None),
    "olmo_hybrid": Family(
        read=_olmo_hybrid, names=_OLMO, fused={"recurrent.conv": _CONVOLVED},
        otherwise={"post_attention_layernorm": "attention_out_norm"},
    ),
    "qwen3_next": replace(
        _QWEN, gguf="qwen3next", keys=_qwen_keys, gguf_names=_QWEN_GGUF | {"recurrent.in_proj_ba": "ssm_ba"}
    ),
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": replace(_QWEN, gguf="qwen35moe"),
}  # fmt: skip
