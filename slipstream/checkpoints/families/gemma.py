"""Gemma, text only: embeddings scaled by sqrt(width), GELU; before Gemma 4, norms are stored as weight - 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import (
    FULL,
    SLIDING,
    cap_of,
    count_of,
    flag,
    layer_kinds,
    make_refusal,
    object_of,
    positive,
    refuse,
    rope_parameters,
    ropes_by_kind,
)
from slipstream.checkpoints.families.family import SANDWICH, Family, Fields, common, describe
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.checkpoints.module_shape import Experts
from slipstream.core.strict import JsonObject
from slipstream.errors import ConfigError, UnsupportedModelError

GELU = ("hidden_activation", "gelu_pytorch_tanh")


def _shape(config: ReadKeys, context: int, act: tuple[str, str] = GELU) -> JsonObject:
    refuse(config, "use_bidirectional_attention", False)
    biased = flag(config, "attention_bias", False)
    return common(config, context=context, tied=True, size=256, act=act) | {
        "embedding_scale": math.sqrt(count_of(config, "hidden_size")), "qkv_bias": biased, "o_bias": biased,
    }  # fmt: skip


def _gemma(config: ReadKeys) -> Fields:
    act = GELU if config.get("hidden_activation") else ("hidden_act", "gelu_pytorch_tanh")
    return describe(_shape(config, 8192, act) | {"rope_parameters": rope_parameters(config)})


def _gemma2(config: ReadKeys) -> Fields:
    given = _shape(config, 8192) | {"logits_cap": cap_of(config, "final_logit_softcapping", 30.0)}
    slides, window = layer_kinds(config, given["layers"], 2), count_of(config, "sliding_window", 4096)
    return describe(
        given | {"rope_parameters": rope_parameters(config)},
        window=[window if each else None for each in slides],
        scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        cap=cap_of(config, "attn_logit_softcapping", 50.0),
        norm_after=True,
    )


def _gemma3(config: ReadKeys) -> Fields:
    given = _shape(config, 131072) | {"logits_cap": cap_of(config, "final_logit_softcapping")}
    pattern, window = count_of(config, "sliding_window_pattern", 6), count_of(config, "sliding_window", 4096)
    slides = layer_kinds(config, given["layers"], pattern)
    ropes = ropes_by_kind(config, config.get("rope_local_base_freq", 1e4), config.get("rope_theta", 1e6))
    return describe(
        given | {"ropes": ropes, "rope_parameters": ropes[1]},
        window=[window if each else None for each in slides],
        rotary=[0 if each else 1 for each in slides],
        scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        cap=cap_of(config, "attn_logit_softcapping"),
        qk_norm="head",
        norm_after=True,
    )


def _gemma4(config: ReadKeys) -> Fields:
    """Describe Gemma 4: layers without a window have heads of another size, and the last layers read the keys and
    values of earlier layers. 26B-A4B has experts beside the MLP, which is described as a shared expert here."""
    both = config.get("use_bidirectional_attention")
    if both not in (None, "vision"):
        raise make_refusal(f"use_bidirectional_attention is {both!r}", "our own decoder is causal")
    given = common(config, context=131072, tied=True, size=256, act=GELU)
    biased, layers = flag(config, "attention_bias", False), given["layers"]
    given |= {"qkv_bias": biased, "o_bias": biased, "embedding_scale": math.sqrt(given["hidden_size"])}
    given["logits_cap"] = cap_of(config, "final_logit_softcapping")
    given["side_width"] = count_of(config, "hidden_size_per_layer_input", 256, least=0)
    vocab = count_of(config, "vocab_size_per_layer_input", 262144)
    given["side_vocab"] = vocab if given["side_width"] else 0
    slides, window = layer_kinds(config, layers, 6), count_of(config, "sliding_window", 512)
    slides[-1] = False  # as in transformers, even if the file says otherwise
    equal, own = flag(config, "attention_k_eq_v", False), _own_shapes(config, slides, given)
    first = layers - count_of(config, "num_kv_shared_layers", 0, least=0)
    last = {kind: max((i for i in range(first) if slides[i] == kind), default=-1) for kind in set(slides)}
    if min(last.values()) < 0:
        raise ConfigError(
            f"num_kv_shared_layers leaves {first} layers with keys and values, but each kind of layer needs one",
            fix="correct config.json",
        )
    if not config.get("rope_parameters"):
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        config["rope_parameters"] = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: full}
    ropes = ropes_by_kind(config, config.get("rope_freq_base_swa", 1e4), 1e6)  # a key of GGUF files
    for rope, kind in zip(ropes, (True, False), strict=True):
        rope["head_dim"] = next((size for size, each in zip(own["head_dim"], slides, strict=True) if each == kind), 2)
    doubled = flag(config, "use_double_wide_mlp", False)
    inner = [given["intermediate_size"] * (2 if doubled and i >= first else 1) for i in range(layers)]
    sparse = flag(config, "enable_moe_block", False)
    if sparse:
        if inner != inner[:1] * layers:
            raise make_refusal(
                "use_double_wide_mlp is true for a model with experts",
                "our own decoder has shared experts of one width",
            )
        given["experts"] = Experts(
            count_of(config, "num_experts"), count_of(config, "top_k_experts"),
            count_of(config, "moe_intermediate_size"), True, (True,) * layers, shared=inner[0], apart=True,
        )  # fmt: skip
        inner = [0] * layers
    return describe(
        given | {"ropes": ropes, "rope_parameters": ropes[1]},
        **own,
        window=[window if each else None for each in slides],
        rotary=[0 if each else 1 for each in slides],
        scale=1.0,
        qk_norm="head",
        value_norm=True,
        key_is_value=[equal and not each for each in slides],
        shared=[None if i < first else last[slides[i]] for i in range(layers)],
        intermediate_size=inner,
        sparse=sparse,
        norm_after=True,
        scaled=True,
    )


def _gemma4_unified(config: ReadKeys) -> Fields:
    """Describe Gemma 4 12B: like Gemma 4 with other defaults, and without an embedding for each layer."""
    usual = {"max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
    config.update({**usual, **config})
    return _gemma4(config)


def _own_shapes(config: ReadKeys, slides: list[bool], given: Fields) -> dict[str, list[int]]:
    """Return the head size and the number of key/value heads of each layer."""
    overrides = object_of(config, "per_layer_config")
    full = {"head_dim": config.get("global_head_dim", 512)}
    if flag(config, "attention_k_eq_v", False) and config.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = count_of(config, "num_global_key_value_heads")
    every: list[Mapping[str, Any]] = [{} if each else full for each in slides]
    if overrides:
        every = [object_of(overrides, str(i)) for i in range(len(slides))]
    if odd := {key for each in every for key in each} - {"head_dim", "num_key_value_heads"}:
        raise make_refusal(f"per_layer_config has {', '.join(sorted(odd))}", "our own decoder reads only heads from it")
    return {
        "head_dim": [count_of(each, "head_dim", given["head_dim"]) for each in every],
        "kv_heads": [count_of(each, "num_key_value_heads", given["kv_heads"]) for each in every],
    }


def _gemma2_keys(header: GgufHeader) -> JsonObject:
    heads, width = header.size("attention.head_count"), header.size("embedding_length")
    size = header.size("attention.key_length") or 256
    return {
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": header.size("attention.sliding_window") or 4096,
        "attn_logit_softcapping": header.setting("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.setting("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": width // heads if header.size("block_count") == 46 else size,  # 27B, as in llama.cpp
    }  # fmt: skip


def _gemma3_keys(header: GgufHeader) -> JsonObject:
    heads, width = header.size("attention.head_count"), header.size("embedding_length")
    size = header.size("attention.key_length") or 256
    local = header.setting("rope.freq_base_swa", 1e4)
    window = header.size("attention.sliding_window")
    return {
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": window or 4096, "rope_local_base_freq": local,
        "layer_types": header.layer_types(6) if window else ["full_attention"] * header.size("block_count"),
        "final_logit_softcapping": header.setting("final_logit_softcapping"),
        "query_pre_attn_scalar": width // heads if header.size("block_count") == 62 else size,  # 27B, as in llama.cpp
    }  # fmt: skip


def _gemma4_keys(header: GgufHeader) -> JsonObject:
    layers, kinds = header.size("block_count"), header.layer_types(6)
    tensors = {tensor.name: tensor.shape for tensor in header.tensors}
    shared, widths = header.size("attention.shared_kv_layers"), header.by_layer("feed_forward_length")
    kv_heads, doubled, wrong = header.by_layer("attention.head_count_kv"), len(set(widths)) > 1, ""
    if {len(kinds), len(kv_heads), len(widths)} != {layers}:
        wrong = f"its lists by layer do not have {layers} entries, one for each layer"
    elif widths != [widths[0] * (2 if doubled and i >= layers - shared else 1) for i in range(layers)]:
        wrong = "its feed_forward_length is doubled in layers that do not share keys"
    elif kinds[-1] == SLIDING:
        wrong = "its last layer has a sliding window"
    elif "rope_freqs.weight" not in tensors:
        wrong = "it has no rope_freqs.weight, the rotary frequencies of layers without a sliding window"
    if wrong:
        why = "no known model of this architecture is built so"
        fix = "convert the model again, or give the folder of the checkpoint that it was made from"
        raise UnsupportedModelError(f"our own decoder does not run {header.path.name}: {wrong}", why=why, fix=fix)
    sizes = {SLIDING: header.size("attention.key_length_swa"), FULL: header.size("attention.key_length")}
    full, holders = [i for i in range(layers - shared) if kinds[i] == FULL], ("attn_v", "attn_qkv")
    return {
        "sliding_window": header.size("attention.sliding_window"), "layer_types": kinds,
        "rope_freq_base_swa": header.setting("rope.freq_base_swa", 1e4), "num_kv_shared_layers": shared,
        "final_logit_softcapping": header.setting("final_logit_softcapping", 30.0) or None,
        "hidden_size_per_layer_input": header.size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": tensors.get("per_layer_token_embd.weight", (1,))[0],
        "intermediate_size": widths[0], "use_double_wide_mlp": doubled,
        "enable_moe_block": header.size("expert_count") > 1, "top_k_experts": header.size("expert_used_count") or 1,
        "attention_k_eq_v": not all(any(f"blk.{i}.{part}.weight" in tensors for part in holders) for i in full),
        "per_layer_config": {
            str(i): {"head_dim": sizes[kinds[i]], "num_key_value_heads": kv_heads[i]} for i in range(layers)
        },
    }  # fmt: skip


_GEMMA4 = SANDWICH | {
    "layer_scalar": "layer_scalar.weight", "per_layer_input_gate": "side_gate",
    "per_layer_projection": "side_projection", "post_per_layer_input_norm": "side_norm", "mlp": "mlp.shared_expert",
    "router.proj": "mlp.gate", "router.scale": "mlp.router_norm.weight", "experts": "mlp.experts",
    "router.per_expert_scale": "mlp.expert_scales.weight", "pre_feedforward_layernorm_2": "mlp.experts_norm",
    "post_feedforward_layernorm_1": "mlp.shared_out_norm", "post_feedforward_layernorm_2": "mlp.experts_out_norm",
}  # fmt: skip

_GEMMA4_GGUF = {
    "side_embed_tokens": "per_layer_token_embd", "side_projection": "per_layer_model_proj",
    "side_norm": "per_layer_proj_norm", "side_gate": "inp_gate", "side_projection.weight": "proj.weight",
    "side_norm.weight": "post_norm.weight", "layer_scalar": "layer_output_scale",
    "mlp.router_norm.weight": "ffn_gate_inp.scale", "mlp.expert_scales.weight": "ffn_down_exps.scale",
    "mlp.experts_norm": "pre_ffw_norm_2", "mlp.experts_out_norm": "post_ffw_norm_2",
    "mlp.shared_out_norm": "post_ffw_norm_1", "mlp.shared_expert.gate_proj": "ffn_gate",
    "mlp.shared_expert.up_proj": "ffn_up", "mlp.shared_expert.down_proj": "ffn_down",
}  # fmt: skip
_GEMMA4_TEXT = Family(
    read=_gemma4, names=_GEMMA4, reads=["per_layer_config"], gguf="gemma4", keys=_gemma4_keys, gguf_names=_GEMMA4_GGUF,
    gguf_lists=["feed_forward_length", "attention.head_count_kv"],
)  # fmt: skip

FAMILIES = {
    "gemma": Family(
        read=_gemma, plus_one="all", gguf="gemma", keys=lambda _: {"hidden_activation": "gelu_pytorch_tanh"}
    ),
    "gemma2": Family(read=_gemma2, names=SANDWICH, plus_one="all", gguf="gemma2", keys=_gemma2_keys),
    "gemma3_text": Family(read=_gemma3, names=SANDWICH, plus_one="all", gguf="gemma3", keys=_gemma3_keys),
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified_text": Family(read=_gemma4_unified, names=_GEMMA4, reads=["per_layer_config"]),
}
