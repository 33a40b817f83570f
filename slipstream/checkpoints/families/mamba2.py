"""Families with Mamba-2: Granite 4 H, Nemotron-H (Nemotron 3 Nano), Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import FULL, count_of, flag, make_refusal, positive, refuse, rope_parameters
from slipstream.checkpoints.families.extras import biases, granite_keys, multipliers
from slipstream.checkpoints.families.family import Family, Fields, common, describe
from slipstream.checkpoints.families.hybrids import LINEAR, SSM, layer_types, mixers
from slipstream.checkpoints.families.mixtures import GRANITE_MOE, SHARED, describe_mixture
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.checkpoints.module_shape import Experts
from slipstream.checkpoints.recurrence import STATE_SPACE, Recurrence
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import ConfigError


def _mamba(config: ReadKeys, width: int, normed: bool = True, gate_first: bool = True) -> Recurrence:
    """Return a Mamba-2 mixer with `width` outputs. normed: whether outputs are normalised in groups."""
    for key in ("mamba_chunk_size", "chunk_size", "mamba_expand", "expand"):  # no effect here
        config.get(key)
    limits, unbounded = config.get("time_step_limit"), (float("inf"), {"__float__": "Infinity"})
    if limits is not None and (not isinstance(limits, (list, tuple)) or limits[0] != 0 or limits[-1] not in unbounded):
        why = "transformers applies the limit to prompts, but not to the tokens that follow"
        raise make_refusal(f"time_step_limit is {limits!r:.100}, but our own decoder supports only [0, inf]", why)
    heads, groups = count_of(config, "mamba_n_heads", 128), count_of(config, "mamba_n_groups", 1)
    if config.get("mamba_d_head") == "auto":
        config["mamba_d_head"] = width // heads
    value = count_of(config, "mamba_d_head", width // heads)
    if heads * value != width:
        what = f"{heads} Mamba-2 heads of {value} outputs need the width {heads * value}, but config.json says {width}"
        raise ConfigError(what, fix="correct config.json")
    return Recurrence(
        kind=STATE_SPACE, taps=count_of(config, "mamba_d_conv", 4), heads=heads, groups=groups,
        key=count_of(config, "mamba_d_state", 256), value=value,
        conv_bias=flag(config, "mamba_conv_bias", True), bias=flag(config, "mamba_proj_bias", False),
        normed=width // groups if normed else 0, gate_first=gate_first,
    )  # fmt: skip


def _granite_hybrid(config: ReadKeys) -> Fields:
    """Describe Granite 4, whose layers are Mamba-2 or attention, with or without experts beside a shared MLP."""
    given = common(config, context=2048) | biases(config) | multipliers(config)
    part = _mamba(config, count_of(config, "mamba_expand", 2) * given["hidden_size"])
    given["rope_parameters"] = rope_parameters(config)
    shared, count = count_of(config, "shared_intermediate_size", 1024), count_of(config, "num_local_experts", 8, 0)
    parts = mixers(config, part, [LINEAR] * given["layers"])
    rotary = 0 if config.get("position_embedding_type") == "rope" else None
    scale = positive(config, "attention_multiplier", 1.0)
    if not count:
        return describe(given | {"intermediate_size": shared}, recurrence=parts, scale=scale, rotary=rotary)
    experts = Experts(
        count, count_of(config, "num_experts_per_tok", 2), given["intermediate_size"], True,
        (True,) * given["layers"], shared=shared,
    )  # fmt: skip
    return describe_mixture(given, experts, recurrence=parts, scale=scale, rotary=rotary)


_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_KINDS = {"mamba": LINEAR, "attention": FULL} | {kind: kind for kind in _LETTERS.values()}
_MAMBA_KEYS = {
    "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}  # fmt: skip
"""For keys of Nemotron-H, their names in other families."""


def _nemotron_h(config: ReadKeys) -> Fields:
    """Describe Nemotron-H and Nemotron 3 Nano: a layer is Mamba-2, attention without positions, an MLP or a mixture."""
    types = config.get("layers_block_type", config.get("layer_types")) or config.get("hybrid_override_pattern")
    kinds = [_LETTERS.get(each) if isinstance(types, str) else _KINDS.get(each) for each in types or ()]
    if not kinds or None in kinds:
        what = f"layers_block_type must name one of {', '.join(sorted(_KINDS))} for each layer, but is {types!r:.200}"
        raise ConfigError(what, fix="correct config.json")
    config["num_hidden_layers"] = len(kinds)
    plain = {"moe_latent_size": None, "sliding_window": None, "mamba_hidden_act": "silu", "n_shared_experts": 1}
    for name, value in plain.items():
        refuse(config, name, value)
    for name in ("time_step_min", "time_step_max", "time_step_floor"):
        config.get(name)  # read, but only used when training begins
    act, eps = ("mlp_hidden_act", "relu2"), "layer_norm_epsilon" if config.get("layer_norm_epsilon") else "norm_eps"
    size = count_of(config, "attention_head_dim", 128)
    given = common(config, context=4096, eps=1e-5, norm_eps=eps, size=size, act=act) | biases(config)
    given |= {"gated": False, "rope_parameters": rope_parameters(config)}
    config.pop("mamba_proj_bias", None)  # transformers does not read it
    own = {other: config[name] for name, other in _MAMBA_KEYS.items() if name in config}
    config.update({"mamba_n_groups": 8, "mamba_d_state": 128, "mamba_d_head": 64, **config, **own})
    part = _mamba(config, count_of(config, "mamba_n_heads", 128) * count_of(config, "mamba_d_head"))
    sparse = [kind == "moe" for kind in kinds]
    if any(sparse):
        given["experts"] = Experts(
            count_of(config, "n_routed_experts", 8), count_of(config, "num_experts_per_tok", 2),
            count_of(config, "moe_intermediate_size", 7688), flag(config, "norm_topk_prob", True), tuple(sparse),
            sigmoid=True, corrected=True, groups=count_of(config, "n_group", 1),
            top_groups=count_of(config, "topk_group", 1), scale=positive(config, "routed_scaling_factor", 1.0),
            shared=count_of(config, "moe_shared_expert_intermediate_size", 7688),
        )  # fmt: skip
    return describe(
        given, recurrence=[part if kind == LINEAR else None for kind in kinds], sparse=sparse, rotary=None,
        mixes=[kind in (LINEAR, FULL) for kind in kinds], one_norm=True,
        intermediate_size=[given["intermediate_size"] if kind == "mlp" else 0 for kind in kinds],
    )  # fmt: skip


def _numbers(config: ReadKeys, key: str, count: int) -> list[float]:
    """Return a list of `count` positive numbers; ones if the key is missing."""
    values = config.get(key)
    values = [1.0] * count if values is None else values
    if not isinstance(values, (list, tuple)) or len(values) != count:
        raise ConfigError(f"{key} must be a list of {count} numbers, but is {values!r:.200}", fix="correct config.json")
    return [positive({key: value}, key) for value in values]


def _falcon_h1(config: ReadKeys) -> Fields:
    """Describe Falcon-H1: Mamba-2 and attention read the same input, and nearly every projection has a multiplier.
    Those of output projections are folded into the projection before: `attention_out` into values, `down` into `up`."""
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        refuse(config, key, False)
    given = common(config, context=8192, eps=1e-5)
    width = count_of(config, "mamba_d_ssm", count_of(config, "mamba_expand", 2) * given["hidden_size"])
    gate_first = not flag(config, "mamba_norm_before_gate", True)
    part = _mamba(config, width, flag(config, "mamba_rms_norm", False), gate_first)
    into, out = (positive(config, f"attention_{name}_multiplier", 1.0) for name in ("in", "out"))
    keys, ssm = (positive(config, f"{name}_multiplier", 1.0) for name in ("key", "ssm_in"))
    parts = ("gates", "values", "keys", "queries", "steps")
    each, (gate, down) = _numbers(config, "ssm_multipliers", 5), _numbers(config, "mlp_multipliers", 2)
    factors = {
        "self_attn.q_proj": into, "self_attn.k_proj": into * keys, "self_attn.v_proj": into * out,
        "mlp.gate_proj": gate, "mlp.up_proj": down,
        **{f"recurrent.{name}": ssm * own for name, own in zip(parts, each, strict=True)},
    }  # fmt: skip
    given |= {
        "rope_parameters": rope_parameters(config), "logits_scale": positive(config, "lm_head_multiplier", 1.0),
        "embedding_scale": positive(config, "embedding_multiplier", 1.0),
    }  # fmt: skip
    scale = positive(config, "ssm_out_multiplier", 1.0)
    return describe(given, recurrence=part, beside=True, factors=factors, out_scale=scale)


# --- GGUF files ------------------------------------------------------------------------------------------------------


def _mamba_keys(header: GgufHeader) -> JsonObject:
    heads, inner = header.size("ssm.time_step_rank"), header.size("ssm.inner_size")
    return {
        "mamba_n_heads": heads, "mamba_d_head": inner // max(heads, 1), "mamba_d_conv": header.size("ssm.conv_kernel"),
        "mamba_n_groups": header.size("ssm.group_count"), "mamba_d_state": header.size("ssm.state_size"),
    }  # fmt: skip


def _granite_hybrid_keys(header: GgufHeader) -> JsonMapping:
    shared = header.size("expert_shared_feed_forward_length") if header.size("expert_count") else 0
    return {
        **granite_keys(header), **_mamba_keys(header), "layer_types": layer_types(header, "mamba"),
        "num_local_experts": header.size("expert_count"),
        "shared_intermediate_size": shared or header.size("feed_forward_length"),
        "mamba_expand": header.size("ssm.inner_size") // header.size("embedding_length"),
        "position_embedding_type": "rope" if header.setting("rope.scaling.finetuned", True) else "nope",
    }  # fmt: skip


def _nemotron_h_keys(header: GgufHeader) -> JsonMapping:
    layers, names = header.size("block_count") - header.size("nextn_predict_layers"), _names(header)
    given, signs = _mamba_keys(header), {"ffn_gate_inp": "moe", "ffn_up": "mlp", "attn_q": FULL}
    kinds = [
        next((kind for sign, kind in signs.items() if f"blk.{i}.{sign}.weight" in names), LINEAR) for i in range(layers)
    ]
    return {
        **{name: given[other] for name, other in _MAMBA_KEYS.items() if other in given},
        "layers_block_type": kinds, "use_bias": any(name.endswith("ssm_in.bias") for name in names),
        "n_routed_experts": header.size("expert_count"), "norm_topk_prob": header.setting("expert_weights_norm", False),
        "moe_shared_expert_intermediate_size": header.size("expert_shared_feed_forward_length"),
        "routed_scaling_factor": header.setting("expert_weights_scale") or 1.0,
        "n_group": header.size("expert_group_count") or 1, "topk_group": header.size("expert_group_used_count") or 1,
        "n_shared_experts": header.size("expert_shared_count") or 1,
        "moe_latent_size": header.setting("moe_latent_size"),
    }  # fmt: skip


def _falcon_h1_keys(header: GgufHeader) -> JsonMapping:
    """Return keys of config.json. The converter has applied all multipliers to the weights."""
    normed = any(name.endswith("ssm_norm.weight") for name in _names(header))
    return _mamba_keys(header) | {
        "mamba_d_ssm": header.size("ssm.inner_size"), "mamba_rms_norm": normed, "mamba_norm_before_gate": False,
    }  # fmt: skip


def _names(header: GgufHeader) -> set[str]:
    return {tensor.name for tensor in header.tensors}


_FUSED = {
    "recurrent.conv": ["recurrent.conv_values", "recurrent.conv_keys", "recurrent.conv_queries"],
    "recurrent.in_proj": [
        "recurrent.gates", "recurrent.values", "recurrent.keys", "recurrent.queries", "recurrent.steps",
    ],
}  # fmt: skip
_GGUF = SSM | {"recurrent.in_proj": "ssm_in", "recurrent.D": "ssm_d"}

FAMILIES: Mapping[str, Family] = {
    "granitemoehybrid": Family(
        read=_granite_hybrid,
        names={"mamba.conv1d": "recurrent.conv", "mamba": "recurrent"} | GRANITE_MOE,
        fused=SHARED | _FUSED,
        gguf="granitehybrid", gguf_pairs=True, keys=_granite_hybrid_keys, gguf_names=_GGUF,
    ),
    "nemotron_h": Family(
        read=_nemotron_h,
        names={
            "backbone.layers": "layers", "backbone.embeddings": "embed_tokens", "backbone.norm_f": "norm",
            "embeddings": "embed_tokens", "norm_f": "norm",
            "mixer.gate.e_score_correction_bias": "mlp.gate_correction.bias",
            "mixer.shared_experts": "mlp.shared_expert",
            **{f"mixer.{part}": f"mlp.{part}" for part in ("gate", "experts", "up_proj", "down_proj")},
            **{f"mixer.{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
            "mixer.conv1d": "recurrent.conv", "mixer.norm": "recurrent.norm", "mixer": "recurrent",
            "norm": "input_layernorm",
        },
        fused=_FUSED, further=True, gguf="nemotron_h nemotron_h_moe", keys=_nemotron_h_keys, gguf_names=_GGUF,
    ),
    "falcon_h1": Family(
        read=_falcon_h1,
        names={
            "mamba.conv1d": "recurrent.conv", "mamba": "recurrent", "pre_ff_layernorm": "post_attention_layernorm",
            "feed_forward": "mlp", "final_layernorm": "norm",
        },
        fused=_FUSED, gguf="falcon-h1", keys=_falcon_h1_keys,
        gguf_names=_GGUF | {"post_attention_layernorm.weight": "ffn_norm"},
    ),
}  # fmt: skip
