"""Families with mixtures of experts whose parts differ from Mixtral's and Qwen3's."""

from __future__ import annotations

from typing import Any

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import (
    FULL,
    count_of,
    flag,
    flags_of,
    layer_kinds,
    partial_rope,
    positive,
    refuse,
    rope_parameters,
)
from slipstream.checkpoints.families.extras import biases, granite_keys, multipliers, read_windows
from slipstream.checkpoints.families.family import Family, Fields, common, describe
from slipstream.checkpoints.families.llama import sparse_layers
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.checkpoints.module_shape import Experts
from slipstream.core.strict import JsonMapping

CHUNKED = "chunked_attention"


def describe_mixture(given: JsonMapping, experts: Experts, **parts: Any) -> Fields:
    """Describe a decoder in which the layers that `experts` names are mixtures."""
    inner = [0 if sparse else given["intermediate_size"] for sparse in experts.layers]
    sparse = list(experts.layers)
    return describe({**given, "experts": experts}, sparse=sparse, intermediate_size=inner, **parts)


def _gpt_oss(config: ReadKeys) -> Fields:
    given = common(config, context=131072, eps=1e-5, size=64)
    biased = flag(config, "attention_bias", True)
    given |= {"qkv_bias": biased, "o_bias": biased, "mlp_bias": True, "activation": "swiglu"}
    refuse(config, "swiglu_alpha", 1.702)
    given["limit"] = positive(config, "swiglu_limit", 7.0)
    default = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_parameters"] = default
    layers, window = given["layers"], count_of(config, "sliding_window", 128)
    experts = Experts(
        count_of(config, "num_local_experts", 128), count_of(config, "num_experts_per_tok", 4),
        given["intermediate_size"], True, (True,) * layers, router_bias=True,
    )  # fmt: skip
    return describe_mixture(
        given | {"rope_parameters": rope_parameters(config, 150000.0)},
        experts,
        window=[window if slides else None for slides in layer_kinds(config, layers, 2)],
        sinks=True,
    )


def _qwen2_moe(config: ReadKeys) -> Fields:
    refuse(config, "use_sliding_window", False)
    given = common(config, context=32768)
    layer_kinds(config, given["layers"])  # checks that no layer has a window
    given["qkv_bias"] = flag(config, "qkv_bias", True)
    experts = Experts(
        count_of(config, "num_experts", 60), count_of(config, "num_experts_per_tok", 4),
        count_of(config, "moe_intermediate_size", 1408), flag(config, "norm_topk_prob", False),
        sparse_layers(config, given["layers"]), shared=count_of(config, "shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )  # fmt: skip
    return describe_mixture(given | {"rope_parameters": rope_parameters(config)}, experts)


def _granite_moe(config: ReadKeys) -> Fields:
    """Describe Granite 3 MoE, with or without a shared expert."""
    given = common(config, context=2048) | biases(config) | multipliers(config)
    shared = count_of(config, "shared_intermediate_size", 0, least=0) if "shared_intermediate_size" in config else 0
    experts = Experts(
        count_of(config, "num_local_experts", 8), count_of(config, "num_experts_per_tok", 2),
        given["intermediate_size"], True, (True,) * given["layers"], shared=shared,
    )  # fmt: skip
    scale = positive(config, "attention_multiplier", 1.0)
    return describe_mixture(given | {"rope_parameters": rope_parameters(config)}, experts, scale=scale)


def _glm4_moe(config: ReadKeys) -> Fields:
    """Describe GLM-4.5 to 4.7."""
    given = common(config, context=131072, eps=1e-5)
    given["qkv_bias"] = flag(config, "attention_bias", False)
    rope = partial_rope(config, given["head_dim"], default=0.5)
    config.get("num_nextn_predict_layers")
    inner, dense = count_of(config, "moe_intermediate_size", 1408), count_of(config, "first_k_dense_replace", 1, 0)
    experts = Experts(
        count_of(config, "n_routed_experts", 128), count_of(config, "num_experts_per_tok", 8), inner,
        flag(config, "norm_topk_prob", True), tuple(i >= dense for i in range(given["layers"])), sigmoid=True,
        corrected=True, groups=count_of(config, "n_group", 1), top_groups=count_of(config, "topk_group", 1),
        scale=positive(config, "routed_scaling_factor", 1.0), shared=inner * count_of(config, "n_shared_experts", 1),
    )  # fmt: skip
    qk_norm = "head" if flag(config, "use_qk_norm", False) else ""
    return describe_mixture(given | {"rope_parameters": rope}, experts, qk_norm=qk_norm)


def _minimax_m2(config: ReadKeys) -> Fields:
    given = common(config, context=196608, size=128)
    rotary = config.get("rotary_dim")
    if rotary is not None:
        config["partial_rotary_factor"] = count_of(config, "rotary_dim") / given["head_dim"]
    experts = Experts(
        count_of(config, "num_local_experts", 256), count_of(config, "num_experts_per_tok", 8),
        given["intermediate_size"], True, (True,) * given["layers"], sigmoid=True, corrected=True,
    )  # fmt: skip
    rope = partial_rope(config, given["head_dim"], 5e6)
    return describe_mixture(given | {"rope_parameters": rope}, experts, qk_norm="width")


def _ernie_moe(config: ReadKeys) -> Fields:
    given = common(config, context=131072, eps=1e-5, tied=True)
    refuse(config, "use_bias", False)  # experts would have no biases
    refuse(config, "moe_norm_min", 1e-12)
    layers = given["layers"]
    names = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}  # transformers reads both names
    for name, other in names.items():
        config.setdefault(other, config.get(name))
    first, step = count_of(config, "moe_layer_start_index", 1, least=0), count_of(config, "moe_layer_interval", 1)
    config.get("num_nextn_predict_layers")
    last = count_of(config, "moe_layer_end_index", -1, least=-1) % layers
    inner = count_of(config, "moe_intermediate_size", 1536)
    experts = Experts(
        count_of(config, "moe_num_experts", 64), count_of(config, "moe_k", 6), inner, True,
        tuple((i + 1) % step == 0 and first <= i <= last for i in range(layers)), corrected=True,
        shared=inner * count_of(config, "moe_num_shared_experts", 2, least=0),
    )  # fmt: skip
    return describe_mixture(given | {"rope_parameters": rope_parameters(config, 5e5)}, experts)


def _olmoe(config: ReadKeys) -> Fields:
    refuse(config, "clip_qkv", None)
    given = common(config, context=4096, eps=1e-5) | biases(config)
    experts = Experts(
        count_of(config, "num_experts", 64), count_of(config, "num_experts_per_tok", 8),
        given["intermediate_size"], flag(config, "norm_topk_prob", False), (True,) * given["layers"],
    )  # fmt: skip
    return describe_mixture(given | {"rope_parameters": rope_parameters(config)}, experts, qk_norm="width")


def _llama4(config: ReadKeys) -> Fields:
    """Describe Llama 4. Three of four layers attend to a chunk of the sequence; the fourth attends to all, without
    positions. Experts are chosen by their scores, whose sigmoids multiply the experts' inputs."""
    given, biased = common(config, context=131072, eps=1e-5, size=128), flag(config, "attention_bias", False)
    given |= {"qkv_bias": biased, "o_bias": biased}
    layers, inner = given["layers"], given["intermediate_size"]
    given["intermediate_size"] = count_of(config, "intermediate_size_mlp", 16384)
    step, interval = count_of(config, "interleave_moe_layer_step", 1), count_of(config, "no_rope_layer_interval", 4)
    listed = config.get("moe_layers")
    sparse = [(i + 1) % step == 0 if listed is None else i in listed for i in range(layers)]
    rotates = [(i + 1) % interval != 0 for i in range(layers)]
    if config.get("no_rope_layers"):  # an empty list means the default
        rotates = flags_of(config, "no_rope_layers", rotates)
    chunked = rotates
    if config.get("layer_types") is not None:
        chunked = layer_kinds(config, layers, near=CHUNKED)
    chunk = config.get("attention_chunk_size", 8192) and count_of(config, "attention_chunk_size", 8192)
    tuned = bool(config.get("attn_temperature_tuning", True))  # 4 in published files
    if tuned:
        given["growth"] = positive(config, "attn_scale", 0.1), count_of(config, "floor_scale", 8192), 1
    experts = Experts(
        count_of(config, "num_local_experts", 16), count_of(config, "num_experts_per_tok", 1), inner, False,
        tuple(sparse), sigmoid=True, shared=inner, weighted_inputs=True,
    )  # fmt: skip
    normed = flag(config, "use_qk_norm", True)
    return describe_mixture(
        given | {"rope_parameters": rope_parameters(config, 5e5)},
        experts,
        window=[chunk or None if each else None for each in chunked],
        chunked=[bool(chunk) and each for each in chunked],
        rotary=[0 if each else None for each in rotates],
        qk_norm=["plain" if normed and each else "" for each in rotates],
        late_norm=normed,
        growing=[tuned and not each for each in rotates],
    )


# --- GGUF files ------------------------------------------------------------------------------------------------------


def _gpt_oss_keys(header: GgufHeader) -> JsonMapping:
    width = header.size("expert_feed_forward_length")
    return {**read_windows(2)(header), "intermediate_size": width, "attention_bias": True}


def _qwen2_moe_keys(header: GgufHeader) -> JsonMapping:
    shared = header.size("expert_shared_feed_forward_length") or header.size("feed_forward_length")
    return {"norm_topk_prob": False, "shared_expert_intermediate_size": shared, "qkv_bias": True}


def _granite_moe_keys(header: GgufHeader) -> JsonMapping:
    shared = header.size("expert_shared_feed_forward_length")
    return granite_keys(header) | (
        {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}
    )


def _glm4_moe_keys(header: GgufHeader) -> JsonMapping:
    names = {tensor.name for tensor in header.tensors}
    return {
        "num_hidden_layers": header.size("block_count") - header.size("nextn_predict_layers"),
        "n_routed_experts": header.size("expert_count"), "n_shared_experts": header.size("expert_shared_count") or 1,
        "first_k_dense_replace": header.size("leading_dense_block_count"),
        "routed_scaling_factor": header.setting("expert_weights_scale") or 1.0,
        "norm_topk_prob": header.setting("expert_weights_norm", False),
        "n_group": header.size("expert_group_count") or 1,
        "topk_group": header.size("expert_group_used_count") or 1, "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
    }  # fmt: skip


def _ernie_moe_keys(header: GgufHeader) -> JsonMapping:
    inner, shared = header.size("expert_feed_forward_length"), header.size("expert_shared_feed_forward_length")
    return {
        "use_bias": False,  # the tensor exp_probs_b.bias is not the bias of a linear layer
        "moe_layer_start_index": header.size("leading_dense_block_count"),
        "moe_layer_interval": header.size("interleave_moe_layer_step"),
        "moe_num_shared_experts": header.size("expert_shared_count") or shared // max(inner, 1),
    }  # fmt: skip


def _llama4_keys(header: GgufHeader) -> JsonMapping:
    """Return keys of config.json. In llama.cpp, chunks and growth are constants; a window of 0 switches both off."""
    plain, layers = header.setting("attention.sliding_window") == 0, header.size("block_count")
    kinds = header.layer_types(4)
    return {
        "intermediate_size": header.size("expert_feed_forward_length"),
        "intermediate_size_mlp": header.size("feed_forward_length"),
        "interleave_moe_layer_step": header.size("interleave_moe_layer_step"),
        "use_qk_norm": header.size("expert_count") != 128,
        "no_rope_layers": [1 if plain else int((i + 1) % 4 > 0) for i in range(layers)],
        "layer_types": [FULL if plain or kind == FULL else CHUNKED for kind in kinds],
    }  # fmt: skip


_ROUTER = {"router": "gate", "sinks": "sinks.weight"}
_GPT_OSS_GGUF = {"post_attention_layernorm": "post_attention_norm"}
GRANITE_MOE = {
    "block_sparse_moe.router.layer": "mlp.gate", "block_sparse_moe.router": "mlp.gate",
    "block_sparse_moe.experts": "mlp.experts", "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj", "shared_mlp.input_linear": "mlp.shared_mlp",
    "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
}  # fmt: skip
SHARED = {"mlp.shared_mlp": ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"]}
CORRECTED = {"gate.e_score_correction_bias": "gate_correction.bias", "shared_experts": "shared_expert"}
_ERNIE = {
    "gate.moe_statics.e_score_correction_bias": "gate_correction.bias", "shared_experts": "shared_expert",
    "moe_statics.e_score_correction_bias": "gate_correction.bias", "mtp_block": "mtp.layers",
    "mtp_emb_norm.0": "mtp.enorm", "mtp_hidden_norm.0": "mtp.hnorm", "mtp_linear_proj.0": "mtp.eh_proj",
}  # fmt: skip
_ERNIE_MOE = Family(
    read=_ernie_moe, names=_ERNIE, pairs=True, further=True, gguf="ernie4_5-moe", gguf_pairs=True, keys=_ernie_moe_keys
)
_MINIMAX = {
    "block_sparse_moe.gate": "mlp.gate", "block_sparse_moe.e_score_correction_bias": "mlp.gate_correction.bias",
    "block_sparse_moe.experts": "mlp.experts", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
    "mlp.e_score_correction_bias": "mlp.gate_correction.bias",
}  # fmt: skip

FAMILIES = {
    "gpt_oss": Family(
        read=_gpt_oss,
        names=_ROUTER,
        transposed=True,
        in_turn=True,
        gguf="gpt-oss",
        keys=_gpt_oss_keys,
        gguf_names=_GPT_OSS_GGUF,
    ),
    "qwen2_moe": Family(read=_qwen2_moe, gguf="qwen2moe", keys=_qwen2_moe_keys),
    "granitemoe": Family(
        read=_granite_moe, names=GRANITE_MOE, gguf="granitemoe", gguf_pairs=True, keys=_granite_moe_keys
    ),
    "granitemoeshared": Family(read=_granite_moe, names=GRANITE_MOE, fused=SHARED, gguf_pairs=True),
    "glm4_moe": Family(
        read=_glm4_moe,
        names=CORRECTED,
        further=True,
        gguf="glm4moe",
        keys=_glm4_moe_keys,
        gguf_names={"post_attention_layernorm": "post_attention_norm"},
    ),
    "minimax_m2": Family(
        read=_minimax_m2,
        names=_MINIMAX,
        gguf="minimax-m2",
        keys=lambda header: {"intermediate_size": header.size("expert_feed_forward_length")},
    ),
    "ernie4_5_moe": _ERNIE_MOE,
    "llama4_text": Family(
        read=_llama4,
        reads=["attention_chunk_size"],
        names={"feed_forward.router": "mlp.gate", "feed_forward": "mlp"},
        pairs=True,
        transposed=True,
        gguf="llama4",
        gguf_pairs=True,
        keys=_llama4_keys,
    ),
    "olmoe": Family(read=_olmoe, gguf="olmoe", keys=lambda _: {"norm_topk_prob": False}),
}
