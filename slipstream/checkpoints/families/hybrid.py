"""Families with recurrent layers: LFM2 (short convolutions), Qwen3-Next and Qwen3.5 (Gated DeltaNet), Granite 4 H
(Mamba-2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import FULL, count_of, flag, partial_rope, positive, rope_parameters
from slipstream.checkpoints.families.family import Family, common, described
from slipstream.checkpoints.families.llama import sparse_layers
from slipstream.checkpoints.module_shape import Experts
from slipstream.checkpoints.recurrence import CONVOLUTION, DELTA, Recurrence
from slipstream.errors import ConfigError


def _mixed_by(config: ReadKeys, recurrent: str, part: Recurrence, default: Seq[str]) -> list[Recurrence | None]:
    """What `layer_types` says of each layer: `part` for the name `recurrent`, or attention."""
    layers, types = len(default), config.get("layer_types")
    types = default if types is None else types
    if not isinstance(types, (list, tuple)) or len(types) != layers or any(t not in (recurrent, FULL) for t in types):
        raise ConfigError(
            f"layer_types must name {recurrent} or {FULL} for each of {layers} layers, got {types!r:.200}",
            fix="correct config.json",
        )
    return [part if kind == recurrent else None for kind in types]


def _lfm2(config: ReadKeys) -> DecoderConfig:
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
    return described(given, recurrence=_mixed_by(config, "conv", part, default), qk_norm="head")


def _delta(config: ReadKeys) -> Recurrence:
    value = count_of(config, "linear_value_head_dim", 128)
    return Recurrence(
        kind=DELTA,
        taps=count_of(config, "linear_conv_kernel_dim", 4),
        heads=count_of(config, "linear_num_value_heads", 32),
        groups=count_of(config, "linear_num_key_heads", 16),
        key=count_of(config, "linear_key_head_dim", 128),
        value=value,
        normed=value,
    )


def _qwen(config: ReadKeys) -> DecoderConfig:
    """Qwen3-Next and Qwen3.5: three of four layers are Gated DeltaNet, the fourth is attention with a gate."""
    given = common(config, context=32768, size=256) | {"qkv_bias": flag(config, "attention_bias", False)}
    given["o_bias"] = given["qkv_bias"]
    layers, every = given["layers"], count_of(config, "full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else FULL for i in range(layers)]
    given["rope_parameters"] = partial_rope(config, given["head_dim"], 1e4, 0.25)
    parts: dict[str, Any] = {"recurrence": _mixed_by(config, "linear_attention", _delta(config), default)}
    if given["model_type"] != "qwen3_5_text":
        given["experts"] = Experts(
            count_of(config, "num_experts", 512), count_of(config, "num_experts_per_tok", 10),
            count_of(config, "moe_intermediate_size", 512), flag(config, "norm_topk_prob", True),
            sparse_layers(config, layers), shared=count_of(config, "shared_expert_intermediate_size", 512),
            shared_gate=True,
        )  # fmt: skip
        parts["sparse"] = list(given["experts"].layers)
        parts["intermediate_size"] = [0 if sparse else given["intermediate_size"] for sparse in parts["sparse"]]
    return described(given, **parts, qk_norm="head", gate=True)


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
    plus_one=True,
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
    ),
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}  # fmt: skip
