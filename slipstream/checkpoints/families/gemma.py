"""Gemma 1 to 3, text only: embeddings scaled by their width, norms stored as their weight minus 1, GELU."""

from __future__ import annotations

import math

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import (
    cap_of,
    count_of,
    flag,
    layer_kinds,
    positive,
    refuse,
    rope_parameters,
    ropes_by_kind,
)
from slipstream.checkpoints.families.family import SANDWICH, Family, Fields, common, described
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.core.strict import JsonObject

GELU = ("hidden_activation", "gelu_pytorch_tanh")


def _shape(config: ReadKeys, context: int, act: tuple[str, str] = GELU) -> JsonObject:
    refuse(config, "use_bidirectional_attention", False)
    biased = flag(config, "attention_bias", False)
    return common(config, context=context, tied=True, size=256, act=act) | {
        "embedding_scale": math.sqrt(count_of(config, "hidden_size")), "qkv_bias": biased, "o_bias": biased,
    }  # fmt: skip


def _gemma(config: ReadKeys) -> Fields:
    act = GELU if config.get("hidden_activation") else ("hidden_act", "gelu_pytorch_tanh")
    return described(_shape(config, 8192, act) | {"rope_parameters": rope_parameters(config)})


def _gemma2(config: ReadKeys) -> Fields:
    given = _shape(config, 8192) | {"logits_cap": cap_of(config, "final_logit_softcapping", 30.0)}
    slides, window = layer_kinds(config, given["layers"], 2), count_of(config, "sliding_window", 4096)
    return described(
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
    return described(
        given | {"ropes": ropes, "rope_parameters": ropes[1]},
        window=[window if each else None for each in slides],
        rotary=[0 if each else 1 for each in slides],
        scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        cap=cap_of(config, "attn_logit_softcapping"),
        qk_norm="head",
        norm_after=True,
    )


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


FAMILIES = {
    "gemma": Family(
        read=_gemma, plus_one=True, gguf="gemma", keys=lambda _: {"hidden_activation": "gelu_pytorch_tanh"}
    ),
    "gemma2": Family(read=_gemma2, names=SANDWICH, plus_one=True, gguf="gemma2", keys=_gemma2_keys),
    "gemma3_text": Family(read=_gemma3, names=SANDWICH, plus_one=True, gguf="gemma3", keys=_gemma3_keys),
}
