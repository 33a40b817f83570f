"""Llama, the families that differ from it only in biases, windows and experts, and GPT-2."""

from __future__ import annotations

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import (
    activation_of,
    count_of,
    eos_ids,
    flag,
    layer_kinds,
    positive,
    refuse,
    rope_parameters,
)
from slipstream.checkpoints.families.family import QKV, Family, Fields, common
from slipstream.checkpoints.module_shape import Experts
from slipstream.core.strict import JsonMapping
from slipstream.errors import ConfigError

LIKE_LLAMA = {
    "llama": 2048, "mistral": 131072, "mixtral": 131072, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768,
}  # fmt: skip
"""By `model_type`, the context if config.json lacks it, because transformers 4 does not write default values."""


def _llama_like(config: ReadKeys) -> Fields:
    """Describe a family with RMS norm, rotary positions and a gated MLP."""
    kind, hidden = config["model_type"], count_of(config, "hidden_size")
    heads, layers = count_of(config, "num_attention_heads"), count_of(config, "num_hidden_layers")
    attention_bias = kind in ("llama", "qwen3", "qwen3_moe") and flag(config, "attention_bias", False)
    size = 128 if kind == "qwen3" else hidden // heads if kind.startswith("qwen") else None
    return dict(
        **common(config, context=LIKE_LLAMA[kind], eps=1e-5 if kind == "mixtral" else 1e-6, size=size),
        qkv_bias=attention_bias or kind == "qwen2",
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and flag(config, "mlp_bias", False),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        rope_parameters=rope_parameters(config, 1e6 if kind == "mixtral" else 1e4),
        windows=_windows(config, kind, layers),
        experts=_experts(config, kind, layers),
    )


_VL = {
    "qwen2_vl_text": ("qwen2", 32768, 1e6), "qwen2_5_vl_text": ("qwen2", 32768, 1e6),
    "qwen3_vl_text": ("qwen3", 128000, 5e5), "qwen3_vl_moe_text": ("qwen3_moe", 128000, 5e5),
}  # fmt: skip
"""For text parts of Qwen-VL: (the family that computes the same, default of the context, default of theta)."""


def _qwen_vl(config: ReadKeys) -> Fields:
    """Describe the text part of Qwen-VL. M-RoPE gives each section of a head its own position: time, height, width. For
    tokens of a text the three are equal, so M-RoPE equals the plain rotary embedding."""
    config["model_type"], context, theta = _VL[config["model_type"]]
    rope = rope_parameters(config, theta)
    for key in ("mrope_section", "mrope_interleaved"):
        rope.pop(key, None)
    if rope.get("rope_type", rope.get("type")) == "mrope":
        rope["rope_type"] = "default"
    config.setdefault("max_position_embeddings", context)
    if config["model_type"] == "qwen3_moe":
        refuse(config, "norm_topk_prob", True)
        config["norm_topk_prob"] = True
    return _llama_like(config)


def _gpt2(config: ReadKeys) -> Fields:
    """Describe GPT-2 and DistilGPT-2: LayerNorm, learned positions, plain MLP, biases everywhere, tied head."""
    hidden, heads, layers = count_of(config, "n_embd"), count_of(config, "n_head"), count_of(config, "n_layer")
    if hidden % heads:
        raise ConfigError(f"n_embd {hidden} is not a multiple of {heads} heads", fix="correct config.json")
    return {
        "model_type": "gpt2", "vocab_size": count_of(config, "vocab_size"), "hidden_size": hidden, "layers": layers,
        "heads": heads, "kv_heads": heads, "head_dim": hidden // heads, "windows": (None,) * layers,
        "intermediate_size": count_of(config, "n_inner", 4 * hidden),
        "context": count_of(config, "n_positions", 1024), "position": "learned",
        "norm": "layer", "norm_eps": positive(config, "layer_norm_epsilon", 1e-5),
        "activation": activation_of(config, "activation_function", "gelu_new"), "gated": False,
        "qkv_bias": True, "o_bias": True, "mlp_bias": True,
        "tie_embeddings": flag(config, "tie_word_embeddings", True), "eos_ids": eos_ids(config),
    }  # fmt: skip


def _windows(config: JsonMapping, kind: str, layers: int) -> tuple[int | None, ...]:
    if kind == "llama":
        return (None,) * layers
    if kind in ("mistral", "mixtral"):  # default: 4096 for Mistral, no window for Mixtral
        used = config.get("sliding_window", 4096 if kind == "mistral" else None) is not None
    else:
        used = config.get("sliding_window", 4096) is not None and flag(config, "use_sliding_window", False)
    types = config.get("layer_types") if kind in ("qwen2", "qwen3") else None
    if not used and "sliding_attention" not in (types or ()):
        return (None,) * layers
    window = count_of(config, "sliding_window", 4096, least=2) if used else None  # transformers treats 1 differently
    if kind in ("mistral", "mixtral", "qwen3_moe"):
        return (window,) * layers
    if types is None:
        first = count_of(config, "max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(layers))
    if not used:
        what = f"layer_types is {types!r:.200}, but config.json sets no sliding window"
        raise ConfigError(what, why="then all layers have full_attention", fix="correct config.json")
    return tuple(window if slides else None for slides in layer_kinds(config, layers))


def _experts(config: JsonMapping, kind: str, layers: int) -> Experts | None:
    count_key = "num_experts" if "num_experts" in config else "num_local_experts"  # transformers knows both names
    if kind == "mixtral":
        return Experts(
            count=count_of(config, count_key, 8),
            per_token=count_of(config, "num_experts_per_tok", 2),
            intermediate_size=count_of(config, "intermediate_size"),
            norm_topk=True,
            layers=(True,) * layers,
        )
    if kind != "qwen3_moe":
        return None
    return Experts(
        count=count_of(config, count_key, 128),
        per_token=count_of(config, "num_experts_per_tok", 8),
        intermediate_size=count_of(config, "moe_intermediate_size", 768),
        norm_topk=flag(config, "norm_topk_prob", False),
        layers=sparse_layers(config, layers),
    )


def sparse_layers(config: JsonMapping, layers: int) -> tuple[bool, ...]:
    """Return for each layer of a Qwen whether it is a mixture of experts."""
    step, dense = count_of(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


_MIXTRAL = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_GPT2 = {
    "wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm", "h": "layers", "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm", "attn.c_attn": "self_attn.qkv_proj", "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
}  # fmt: skip

FAMILIES = {
    "llama": Family(read=_llama_like, gguf="llama", gguf_pairs=True),
    "mistral": Family(read=_llama_like, gguf_pairs=True),
    "mixtral": Family(read=_llama_like, names=_MIXTRAL, gguf_pairs=True),
    "qwen2": Family(read=_llama_like, gguf="qwen2"),
    "qwen3": Family(read=_llama_like, gguf="qwen3"),
    "qwen3_moe": Family(read=_llama_like, gguf="qwen3moe"),
    "qwen2_vl_text": Family(read=_qwen_vl),
    "qwen2_5_vl_text": Family(read=_qwen_vl, gguf="qwen2vl"),
    "qwen3_vl_text": Family(read=_qwen_vl, gguf="qwen3vl"),
    "qwen3_vl_moe_text": Family(read=_qwen_vl, gguf="qwen3vlmoe"),
    "gpt2": Family(read=_gpt2, names=_GPT2, fused=QKV, columns=True, gguf="gpt2"),
}
