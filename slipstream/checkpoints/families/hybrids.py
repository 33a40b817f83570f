"""Families with recurrent layers: LFM2 (short convolutions), Qwen3-Next and Qwen3.5 (Gated DeltaNet), Granite 4 H
(Mamba-2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import (
    FULL,
    count_of,
    flag,
    make_refusal,
    partial_rope,
    positive,
    refuse,
    rope_parameters,
)
from slipstream.checkpoints.families.extras import biases, granite_keys, multipliers
from slipstream.checkpoints.families.family import Family, Fields, common, describe
from slipstream.checkpoints.families.llama import sparse_layers
from slipstream.checkpoints.families.mixtures import GRANITE_MOE, SHARED, describe_mixture
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.checkpoints.module_shape import Experts
from slipstream.checkpoints.recurrence import CONVOLUTION, DELTA, STATE_SPACE, Recurrence
from slipstream.core.strict import JsonMapping
from slipstream.errors import ConfigError

LINEAR = "linear_attention"


def _mixers(config: ReadKeys, part: Recurrence, default: Seq[str]) -> list[Recurrence | None]:
    """Return the mixer of each layer by `layer_types`: `part`, or attention (None)."""
    layers, types = len(default), config.get("layer_types", config.get("layers_block_type"))
    types = default if types is None else types
    attention, recurrent = (FULL, "attention"), ("conv",) if part.kind == CONVOLUTION else (LINEAR, "mamba")
    known = (*attention, *recurrent)
    if not isinstance(types, (list, tuple)) or len(types) != layers or any(each not in known for each in types):
        what = f"layer_types must name {recurrent[0]} or {FULL} for each of {layers} layers, got {types!r:.200}"
        raise ConfigError(what, fix="correct config.json")
    return [part if each in recurrent else None for each in types]


def _lfm2(config: ReadKeys) -> Fields:
    given = common(config, context=128_000, eps=1e-5, norm_eps="norm_eps", tied=True, act=("hidden_act", "silu"))
    part = Recurrence(
        kind=CONVOLUTION, taps=count_of(config, "conv_L_cache", 3), value=given["hidden_size"],
        conv_bias=flag(config, "conv_bias", False), bias=flag(config, "conv_bias", False),
    )  # fmt: skip
    attending = config.get("full_attn_idxs")
    attending = range(given["layers"]) if attending is None else attending
    default = [FULL if i in attending else "conv" for i in range(given["layers"])]
    inner = given["intermediate_size"]
    if flag(config, "block_auto_adjust_ff_dim", True):
        inner = int(positive(config, "block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        unit = count_of(config, "block_multiple_of", 256)
        inner = -(-inner // unit) * unit
    given |= {"rope_parameters": rope_parameters(config, 1e6), "intermediate_size": inner}
    return describe(given, recurrence=_mixers(config, part, default), qk_norm="head")


def _delta(config: ReadKeys) -> Recurrence:
    value = count_of(config, "linear_value_head_dim", 128)
    return Recurrence(
        kind=DELTA, taps=count_of(config, "linear_conv_kernel_dim", 4), value=value, normed=value,
        heads=count_of(config, "linear_num_value_heads", 32), groups=count_of(config, "linear_num_key_heads", 16),
        key=count_of(config, "linear_key_head_dim", 128), tiled=flag(config, "value_heads_tiled", False),
    )  # fmt: skip


def _qwen(config: ReadKeys) -> Fields:
    """Qwen3-Next and Qwen3.5: three of four layers are Gated DeltaNet, the fourth is attention with a gate."""
    given = common(config, context=32768, size=256) | {"qkv_bias": flag(config, "attention_bias", False)}
    given["o_bias"] = given["qkv_bias"]
    refuse(config, "attn_output_gate", True)
    layers, every = given["layers"], count_of(config, "full_attention_interval", 4)
    given["rope_parameters"] = partial_rope(config, given["head_dim"], 1e4, 0.25)
    for key in ("mrope_section", "mrope_interleaved"):
        given["rope_parameters"].get(key)  # of pictures: the positions of a text are the same in all sections
    mixers = _mixers(config, _delta(config), [LINEAR if (i + 1) % every else FULL for i in range(layers)])
    if given["model_type"] == "qwen3_5_text":
        return describe(given, recurrence=mixers, qk_norm="head", gate=True)
    experts = Experts(
        count_of(config, "num_experts", 512), count_of(config, "num_experts_per_tok", 10),
        count_of(config, "moe_intermediate_size", 512), flag(config, "norm_topk_prob", True),
        sparse_layers(config, layers), shared=count_of(config, "shared_expert_intermediate_size", 512),
        shared_gate=True,
    )  # fmt: skip
    return describe_mixture(given, experts, recurrence=mixers, qk_norm="head", gate=True)


def _granite_hybrid(config: ReadKeys) -> Fields:
    """Granite 4, whose layers are Mamba-2 or attention, with or without experts beside a shared MLP."""
    given = common(config, context=2048) | biases(config) | multipliers(config)
    heads = count_of(config, "mamba_n_heads", 128)
    width = count_of(config, "mamba_expand", 2) * given["hidden_size"]
    if config.get("mamba_d_head") == "auto":
        config["mamba_d_head"] = width // heads
    config.get("mamba_chunk_size")  # how prompts are cut, which changes rounding only
    limits, unbounded = config.get("time_step_limit"), (float("inf"), {"__float__": "Infinity"})
    if limits is not None and (not isinstance(limits, (list, tuple)) or limits[0] != 0 or limits[-1] not in unbounded):
        why = "transformers applies it to prompts, and not to the tokens that follow"
        raise make_refusal(f"time_step_limit is {limits!r:.100}, only [0, inf] is supported", why)
    groups = count_of(config, "mamba_n_groups", 1)
    part = Recurrence(
        kind=STATE_SPACE, taps=count_of(config, "mamba_d_conv", 4), heads=heads, groups=groups,
        key=count_of(config, "mamba_d_state", 256), value=count_of(config, "mamba_d_head", width // heads),
        conv_bias=flag(config, "mamba_conv_bias", True), bias=flag(config, "mamba_proj_bias", False),
        normed=width // groups, gate_first=True,
    )  # fmt: skip
    given["rope_parameters"] = rope_parameters(config)
    shared, count = count_of(config, "shared_intermediate_size", 1024), count_of(config, "num_local_experts", 8, 0)
    mixers = _mixers(config, part, [LINEAR] * given["layers"])
    rotary = 0 if config.get("position_embedding_type") == "rope" else None
    scale = positive(config, "attention_multiplier", 1.0)
    if not count:
        return describe(given | {"intermediate_size": shared}, recurrence=mixers, scale=scale, rotary=rotary)
    experts = Experts(
        count, count_of(config, "num_experts_per_tok", 2), given["intermediate_size"], True,
        (True,) * given["layers"], shared=shared,
    )  # fmt: skip
    return describe_mixture(given, experts, recurrence=mixers, scale=scale, rotary=rotary)


# --- GGUF files ------------------------------------------------------------------------------------------------------


def _layer_types(header: GgufHeader, recurrent: str) -> list[str]:
    """`layer_types` of config.json: layers without heads of keys and values are recurrent."""
    given = header.setting("attention.head_count_kv")
    given = given if isinstance(given, list) else [given] * header.size("block_count")
    return [FULL if heads else recurrent for heads in given]


def _lfm2_keys(header: GgufHeader) -> JsonMapping:
    return {
        "conv_L_cache": header.size("shortconv.l_cache"), "block_auto_adjust_ff_dim": False,
        "layer_types": _layer_types(header, "conv"),
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


def _granite_hybrid_keys(header: GgufHeader) -> JsonMapping:
    heads, inner = header.size("ssm.time_step_rank"), header.size("ssm.inner_size")
    shared = header.size("expert_shared_feed_forward_length") if header.size("expert_count") else 0
    return {
        **granite_keys(header), "layer_types": _layer_types(header, "mamba"),
        "num_local_experts": header.size("expert_count"),
        "shared_intermediate_size": shared or header.size("feed_forward_length"),
        "mamba_n_heads": heads, "mamba_d_head": inner // max(heads, 1), "mamba_d_conv": header.size("ssm.conv_kernel"),
        "mamba_expand": inner // header.size("embedding_length"), "mamba_n_groups": header.size("ssm.group_count"),
        "mamba_d_state": header.size("ssm.state_size"),
        "position_embedding_type": "rope" if header.setting("rope.scaling.finetuned", True) else "nope",
    }  # fmt: skip


_SSM = {
    "recurrent.A_log": "ssm_a", "recurrent.dt_bias": "ssm_dt.bias", "recurrent.conv": "ssm_conv1d",
    "recurrent.norm": "ssm_norm", "recurrent.out_proj": "ssm_out",
}  # fmt: skip
_QWEN_GGUF = _SSM | {
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
    plus_one=True, further=True, gguf="qwen35", gguf_names=_QWEN_GGUF,
    keys=lambda header: {**_qwen_keys(header), "value_heads_tiled": True},
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "lfm2": Family(
        read=_lfm2,
        gguf="lfm2",
        names={
            "conv.in_proj": "recurrent.in_proj", "conv.conv": "recurrent.conv_values",
            "conv.out_proj": "recurrent.out_proj", "operator_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm", "feed_forward": "mlp", "w1": "gate_proj", "w3": "up_proj",
            "w2": "down_proj", "self_attn.out_proj": "self_attn.o_proj", "q_layernorm": "q_norm",
            "k_layernorm": "k_norm", "embedding_norm": "norm",
        },
        fused={"recurrent.in_proj": ["recurrent.factors", "recurrent.gates", "recurrent.values"]},
        keys=_lfm2_keys,
        gguf_names={
            "recurrent.in_proj": "shortconv.in_proj", "recurrent.conv_values": "shortconv.conv",
            "recurrent.out_proj": "shortconv.out_proj", "norm": "token_embd_norm",
        },
    ),
    "granitemoehybrid": Family(
        read=_granite_hybrid,
        names={"mamba.conv1d": "recurrent.conv", "mamba": "recurrent"} | GRANITE_MOE,
        fused=SHARED | {
            "recurrent.conv": ["recurrent.conv_values", "recurrent.conv_keys", "recurrent.conv_queries"],
            "recurrent.in_proj": [
                "recurrent.gates", "recurrent.values", "recurrent.keys", "recurrent.queries", "recurrent.steps",
            ],
        },
        gguf="granitehybrid", gguf_pairs=True, keys=_granite_hybrid_keys,
        gguf_names=_SSM | {"recurrent.in_proj": "ssm_in", "recurrent.D": "ssm_d"},
    ),
    "qwen3_next": replace(
        _QWEN, gguf="qwen3next", keys=_qwen_keys, gguf_names=_QWEN_GGUF | {"recurrent.in_proj_ba": "ssm_ba"}
    ),
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": replace(_QWEN, gguf="qwen35moe"),
}  # fmt: skip
