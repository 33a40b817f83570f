"""Families that are Llama with other norms, positions, multipliers or activations."""

from __future__ import annotations

from typing import Any

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import (
    FULL,
    cap_of,
    count_of,
    flag,
    flags_of,
    layer_kinds,
    make_refusal,
    partial_rope,
    positive,
    refuse,
    rope_parameters,
    ropes_by_kind,
)
from slipstream.checkpoints.families.family import GATE_UP, QKV, SANDWICH, Family, Fields, common, describe
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.core.strict import JsonMapping, JsonObject


def biases(config: ReadKeys, attention: bool = False) -> dict[str, bool]:
    """Return the biases of families with Llama's flags. attention: the default of `attention_bias`."""
    biased = flag(config, "attention_bias", attention)
    return {"qkv_bias": biased, "o_bias": biased, "mlp_bias": flag(config, "mlp_bias", False)}


def _phi3(config: ReadKeys) -> Fields:
    """Describe Phi-3, Phi-4 and Phi-4-mini. With LongRoPE, the context ends at the length where its factors change."""
    given = common(config, context=4096, eps=1e-5)
    rope = partial_rope(config, given["head_dim"])
    trained = count_of(config, "original_max_position_embeddings", 4096)
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn", "longrope"):
        rope |= {"rope_type": "longrope", "max_position_embeddings": given["context"]}
        rope.setdefault("original_max_position_embeddings", trained)
        rope.get("long_factor")
        given["context"] = min(given["context"], rope["original_max_position_embeddings"])
    window = config.get("sliding_window") and count_of(config, "sliding_window")
    return describe(given | {"rope_parameters": rope}, window=window or None)


def _smollm3(config: ReadKeys) -> Fields:
    given = common(config, context=32768, tied=True) | biases(config)
    interval = count_of(config, "no_rope_layer_interval", 4)
    rotates = flags_of(config, "no_rope_layers", [(i + 1) % interval != 0 for i in range(given["layers"])])
    window, slides = None, layer_kinds(config, given["layers"])
    if flag(config, "use_sliding_window", False) and config.get("sliding_window"):
        window = count_of(config, "sliding_window")
        slides = slides if config.get("layer_types") else [not each for each in rotates]
    return describe(
        given | {"rope_parameters": rope_parameters(config, 2e6)},
        rotary=[0 if each else None for each in rotates],
        window=[window if each else None for each in slides],
    )


def multipliers(config: ReadKeys) -> dict[str, float]:
    """Return Granite's multipliers of the embedding, of the outputs added to the residual stream, and of the logits."""
    return {
        "embedding_scale": positive(config, "embedding_multiplier", 1.0),
        "residual_scale": positive(config, "residual_multiplier", 1.0),
        "logits_scale": 1 / positive(config, "logits_scaling", 1.0),
    }


def _granite(config: ReadKeys) -> Fields:
    given = common(config, context=2048) | biases(config) | multipliers(config)
    scale = positive(config, "attention_multiplier", 1.0)
    return describe(given | {"rope_parameters": rope_parameters(config)}, scale=scale)


def _olmo2(config: ReadKeys) -> Fields:
    """Describe OLMo 2 and 3: outputs are normalised instead of inputs, queries and keys over all heads together."""
    given, kind = common(config, context=2048, eps=1e-5) | biases(config), config["model_type"]
    if kind == "olmo2":
        given["rope_parameters"] = rope_parameters(config)
        return describe(given, qk_norm="width", norm_before=False, norm_after=True)
    theta = config.get("rope_theta", 5e5)
    ropes = ropes_by_kind(config, theta, theta)
    slides, window = layer_kinds(config, given["layers"], 4), count_of(config, "sliding_window", 4096)
    return describe(
        given | {"ropes": ropes, "rope_parameters": ropes[1]},
        window=[window if each else None for each in slides],
        rotary=[0 if each else 1 for each in slides],
        qk_norm="width",
        norm_before=False,
        norm_after=True,
    )


def _ministral3(config: ReadKeys) -> Fields:
    given = common(config, context=262144, eps=1e-5, size=128)
    rope = rope_parameters(config, 1e6)
    beta = rope.get("llama_4_scaling_beta")
    rope.get("max_position_embeddings")  # repeats the key of config.json
    if beta:
        given["growth"] = (beta, count_of(rope, "original_max_position_embeddings"), 0)
    window = config.get("sliding_window") and count_of(config, "sliding_window")
    return describe(given | {"rope_parameters": rope}, growing=bool(beta), window=window or None)


def _exaone4(config: ReadKeys) -> Fields:
    """Describe EXAONE 4: layers without a window have no positions, unless no layer has a window."""
    given = common(config, context=2048, eps=1e-5)
    used, pattern = config.get("sliding_window", 4096) is not None, config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):  # as in "LLLG"
        given_types = [pattern[i % len(pattern)] == "L" for i in range(given["layers"])]
    else:
        given_types = [used and bool(pattern) and bool((i + 1) % pattern) for i in range(given["layers"])]
    slides = layer_kinds(config, given["layers"]) if config.get("layer_types") else given_types
    window = count_of(config, "sliding_window", 4096) if used else None
    return describe(
        given | {"rope_parameters": rope_parameters(config)},
        window=[window if each else None for each in slides],
        rotary=[0 if each or not used else None for each in slides],
        qk_norm="head",
        norm_before=False,
        norm_after=True,
    )


def _hunyuan(config: ReadKeys) -> Fields:
    given = common(config, context=2048, eps=1e-5) | biases(config)
    rope, size = rope_parameters(config), given["head_dim"]
    if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):  # independent of the length
        theta = positive(rope, "rope_theta") * positive(rope, "alpha") ** (size / (size - 2))
        rope |= {"rope_type": "default", "rope_theta": theta, "factor": None}
    return describe(given | {"rope_parameters": rope}, qk_norm="head", late_norm=True)


def _seed_oss(config: ReadKeys) -> Fields:
    given = common(config, context=524288, size=128) | biases(config, attention=True)
    given["o_bias"] = flag(config, "attention_out_bias", False)
    return describe(given | {"rope_parameters": rope_parameters(config)})


def _glm4(config: ReadKeys) -> Fields:
    """Describe GLM-4-9B (`glm`) and GLM-4-0414 (`glm4`). GLM-4-0414 also normalises outputs."""
    given = common(config, context=131072, eps=1.5625e-07, size=128)
    given["qkv_bias"] = flag(config, "attention_bias", True)
    rope = partial_rope(config, given["head_dim"], default=0.5)
    rope.get("mrope_section")  # read, but without effect: text has one position in all sections
    return describe(given | {"rope_parameters": rope}, norm_after=config["model_type"] == "glm4")


def _stablelm(config: ReadKeys) -> Fields:
    refuse(config, "qk_layernorm", False)
    given = common(config, context=4096, norm_eps="layer_norm_eps", eps=1e-5) | {"norm": "layer"}
    given["qkv_bias"] = flag(config, "use_qkv_bias", False)
    rope = partial_rope(config, given["head_dim"], default=0.25)
    parallel = flag(config, "use_parallel_residual", False)
    return describe(given | {"rope_parameters": rope}, parallel=parallel, one_norm=parallel)


def _nemotron(config: ReadKeys) -> Fields:
    """Describe Nemotron 3 and 4, Minitron: LayerNorm, squared ReLU without a gate."""
    given = common(config, context=4096, norm_eps="norm_eps", eps=1e-5, act=("hidden_act", "relu2")) | biases(config)
    given |= {"norm": "layer", "gated": False}
    return describe(given | {"rope_parameters": partial_rope(config, given["head_dim"], default=0.5)})


def _arcee(config: ReadKeys) -> Fields:
    given = common(config, context=4096, eps=1e-5, act=("hidden_act", "relu2")) | biases(config) | {"gated": False}
    return describe(given | {"rope_parameters": rope_parameters(config)})


def _starcoder2(config: ReadKeys) -> Fields:
    act = ("hidden_act", "gelu_pytorch_tanh")
    given = common(config, context=4096, norm_eps="norm_epsilon", eps=1e-5, act=act, tied=True)
    biased = flag(config, "use_bias", True)
    given |= {"norm": "layer", "gated": False, "qkv_bias": biased, "o_bias": biased, "mlp_bias": biased}
    window = config.get("sliding_window") and count_of(config, "sliding_window")
    return describe(given | {"rope_parameters": rope_parameters(config)}, window=window or None)


def _cohere(config: ReadKeys) -> Fields:
    """Describe Command R and R7B: attention and MLP read the same LayerNorm, which has no bias. In R7B, layers without
    a window have no positions."""
    refuse(config, "use_qk_norm", False)
    given = common(config, context=8192, norm_eps="layer_norm_eps", eps=1e-5, tied=True)
    biased = flag(config, "attention_bias", False)
    given |= {"norm": "layer", "norm_bias": False, "qkv_bias": biased, "o_bias": biased}
    given["logits_scale"] = positive(config, "logit_scale", 0.0625)
    given["rope_parameters"] = rope_parameters(config, 5e5 if config["model_type"] == "cohere" else 1e4)
    if config["model_type"] == "cohere":
        return describe(given, parallel=True, one_norm=True)
    pattern, window = count_of(config, "sliding_window_pattern", 4), count_of(config, "sliding_window", 4096)
    slides = layer_kinds(config, given["layers"], pattern)
    return describe(
        given,
        window=[window if each else None for each in slides],
        rotary=[0 if each else None for each in slides],
        parallel=True,
        one_norm=True,
    )


def _ernie(config: ReadKeys) -> Fields:
    given, biased = common(config, context=131072, eps=1e-5, tied=True, size=128), flag(config, "use_bias", False)
    given |= {"qkv_bias": biased, "o_bias": biased, "mlp_bias": biased}
    return describe(given | {"rope_parameters": rope_parameters(config, 5e5)})


def _muse_glimmer(config: ReadKeys) -> Fields:
    """Describe Muse Glimmer: every fourth layer, counted from the last, has neither window nor positions. Queries and
    keys have norms without weights, and the output of attention has a gate."""
    given = common(config, context=131072, eps=1e-5, size=128, act=("hidden_activation", "silu"))
    biased, layers = flag(config, "attention_bias", False), given["layers"]
    given |= {"qkv_bias": biased, "o_bias": biased, "embed_norm": True}
    given["out_eps"] = positive(config, "post_norm_eps", 1e-8)
    given["logits_scale"] = positive(config, "output_multiplier", 26**-0.5)
    given["logits_cap"] = cap_of(config, "final_logit_softcapping", 20.0)
    full = [(layers - 1 - i) % 4 == 0 for i in range(layers)]
    slides = layer_kinds(config, layers) if config.get("layer_types") else [not each for each in full]
    rope, window = rope_parameters(config, 5e5), count_of(config, "sliding_window", 2048)
    theta = positive(rope, "rope_theta")
    thetas = config.get("layer_rope_theta") or [0 if each else theta for each in full]
    if not isinstance(thetas, list) or len(thetas) != layers or any(each not in (0, theta) for each in thetas):
        why = f"our own decoder needs 0 or the common rope_theta, {theta}, for each of {layers} layers"
        raise make_refusal(f"layer_rope_theta is {thetas!r:.200}", why)
    stored = flag(config, "qk_norm_stored", False)  # True for GGUF files: the weights of norms contain the factor
    return describe(
        given | {"rope_parameters": rope},
        window=[window if each else None for each in slides],
        rotary=[0 if each else None for each in thetas],
        qk_norm="head" if stored else "plain",
        query_scale=1.0 if stored else positive(config, "qk_scale_factor", 3.87),
        gate="output",
        norm_after=True,
    )


# --- GGUF files: metadata -> further keys of config.json -------------------------------------------------------------


def read_windows(pattern: int) -> Any:
    """Return a function that reads the windows of layers from metadata. If the file has no list of layers, all layers
    except every `pattern`-th have a window."""

    def keys(header: GgufHeader) -> JsonMapping:
        window = header.size("attention.sliding_window")
        types = header.layer_types(pattern) if window else [FULL] * header.size("block_count")
        return {"sliding_window": window or None, "layer_types": types}

    return keys


def granite_keys(header: GgufHeader) -> JsonObject:
    return {
        "embedding_multiplier": header.setting("embedding_scale"),
        "attention_multiplier": header.setting("attention.scale"),
        "residual_multiplier": header.setting("residual_scale"), "logits_scaling": header.setting("logit_scale"),
    }  # fmt: skip


def _olmo2_keys(header: GgufHeader) -> JsonMapping:
    if not header.size("attention.sliding_window"):
        return {}
    rope = header.rope
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}  # scaling applies to layers without a window
    return {
        "model_type": "olmo3", **read_windows(4)(header),
        "rope_parameters": {"sliding_attention": plain, "full_attention": rope},
    }  # fmt: skip


def _muse_keys(header: GgufHeader) -> JsonMapping:
    keys, rope = read_windows(4)(header), header.rope
    theta = header.setting("rope.freq_base_swa", rope["rope_theta"])
    return {
        **keys, "qk_norm_stored": True, "output_multiplier": header.setting("logit_scale"),
        "final_logit_softcapping": header.setting("final_logit_softcapping", 0.0) or None,
        "rope_parameters": rope | {"rope_theta": theta},
        "layer_rope_theta": [0 if kind == FULL else theta for kind in keys["layer_types"]],
    }  # fmt: skip


def _mistral3_keys(header: GgufHeader) -> JsonObject:
    rope = dict(header.rope)
    if grown := header.setting("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": grown}
    if beta := header.setting("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = beta
    return {"rope_parameters": rope}


def _glm4_keys(header: GgufHeader) -> JsonObject:
    sections = header.setting("rope.dimension_sections", [])
    turned = isinstance(sections, list) and len(sections) > 1 and min(sections[:2]) > 0
    return {"rope_parameters": header.rope | ({"mrope_section": sections} if turned else {})}


def _cohere_keys(header: GgufHeader) -> JsonObject:
    windows = read_windows(4)(header) if header.architecture == "cohere2" else {}
    return {**windows, "logit_scale": header.setting("logit_scale")}


def _stablelm_keys(header: GgufHeader) -> dict[str, Any]:
    names = {tensor.name for tensor in header.tensors}
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in names, "use_qkv_bias": "blk.0.attn_q.bias" in names,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in names,
    }  # fmt: skip


_HUNYUAN = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
_GLM4 = {"post_self_attn_layernorm": "attention_out_norm", "post_mlp_layernorm": "mlp_out_norm"}

FAMILIES = {
    "phi3": Family(read=_phi3, fused=QKV | GATE_UP, gguf="phi3"),
    "smollm3": Family(read=_smollm3, gguf="smollm3", gguf_pairs=True),
    "granite": Family(read=_granite, gguf="granite", gguf_pairs=True, keys=granite_keys),
    "olmo2": Family(read=_olmo2, names=SANDWICH, gguf="olmo2", keys=_olmo2_keys),
    "olmo3": Family(read=_olmo2, names=SANDWICH),
    "ministral3": Family(read=_ministral3, gguf="mistral3", gguf_pairs=True, keys=_mistral3_keys),
    "exaone4": Family(read=_exaone4, names=SANDWICH, gguf="exaone4", keys=read_windows(4)),
    "hunyuan_v1_dense": Family(read=_hunyuan, names=_HUNYUAN, gguf="hunyuan-dense"),
    "seed_oss": Family(read=_seed_oss, gguf="seed_oss", gguf_names={"post_attention_layernorm": "post_attention_norm"}),
    "glm": Family(read=_glm4, fused=GATE_UP, pairs=True),
    "glm4": Family(read=_glm4, names=_GLM4, fused=GATE_UP, pairs=True, gguf="glm4", gguf_pairs=True, keys=_glm4_keys),
    "stablelm": Family(read=_stablelm, gguf="stablelm", keys=_stablelm_keys),
    "nemotron": Family(read=_nemotron, plus_one="all", gguf="nemotron"),
    "arcee": Family(read=_arcee, gguf="arcee", gguf_pairs=True),
    "starcoder2": Family(read=_starcoder2, names={"c_fc": "up_proj", "c_proj": "down_proj"}, gguf="starcoder2"),
    "cohere": Family(read=_cohere, pairs=True, gguf="command-r", gguf_pairs=True, keys=_cohere_keys),
    "cohere2": Family(read=_cohere, pairs=True, gguf="cohere2", gguf_pairs=True, keys=_cohere_keys),
    "muse_glimmer_text": Family(
        read=_muse_glimmer, names=SANDWICH, plus_one="layers", gguf="muse-glimmer", gguf_pairs=True, keys=_muse_keys
    ),
    "ernie4_5": Family(read=_ernie, pairs=True, gguf="ernie4_5", gguf_pairs=True),
}
