"""`Family`: how the checkpoints and GGUF files of an architecture are read, and what its readers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from slipstream.checkpoints.config_keys import ReadKeys
from slipstream.checkpoints.config_values import activation_of, count_of, eos_ids, flag, positive
from slipstream.checkpoints.gguf_header import GgufHeader
from slipstream.checkpoints.layers import LayerDescription
from slipstream.core.strict import JsonMapping, JsonObject
from slipstream.errors import ConfigError

Fields = JsonObject
"""Fields of a `DecoderConfig`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a `model_type` is read.

    read        config.json -> fields of its DecoderConfig.
    reads       keys that other families refuse, and this one reads.
    names       parts of tensor names in safetensors -> canonical ones (`weights`).
    fused       the canonical parts, one after another, of a tensor that holds several.
    grouped     which of these tensors hold all parts of one head or group, then of the next -> "heads" (of attention)
                or "groups" (of recurrent heads).
    otherwise   canonical parts that some layers lack -> the parts that their tensors are there.
    pairs       rotary embeddings rotate neighbours (2i, 2i + 1) of what is stored, instead of i and i + D / 2.
    plus_one    which norms are stored as their weight minus 1: "all", those of "layers", or none.
    transposed  weights of all experts are stored [E, in, out]. in_turn: gate and up rows in turn.
    further     whether its checkpoints may bring MTP layers, which predict further tokens: no part of the decoder.
    gguf        `general.architecture` of its GGUF files, or several; "": our own decoder reads none.
    keys        the further keys of config.json that a GGUF file's metadata say.
    gguf_names  canonical parts, or keys of `fused`, -> names in GGUF files, where llama.cpp's usual ones are others.
    gguf_pairs  as `pairs`, in GGUF files.
    gguf_lists  metadata of GGUF files that may differ between layers.
    """

    read: Callable[[ReadKeys], Fields]
    reads: Seq[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, Seq[str]] = field(default_factory=dict)
    grouped: Mapping[str, str] = field(default_factory=dict)
    otherwise: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    plus_one: str = ""
    transposed: bool = False
    in_turn: bool = False
    further: bool = False
    gguf: str = ""
    keys: Callable[[GgufHeader], JsonMapping] | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_pairs: bool = False
    gguf_lists: Seq[str] = ()


QKV = {"self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]}
GATE_UP = {"mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"]}
"""Fused tensors that several families have."""

SANDWICH = {
    "post_attention_layernorm": "attention_out_norm", "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_out_norm",
}  # fmt: skip
"""Names of norms in families that normalise outputs, too; here the norm before the MLP has Llama's name."""


def common(
    config: ReadKeys, *, context: int, eps: float = 1e-6, tied: bool = False, size: int | None = None,
    act: tuple[str, str] = ("hidden_act", "silu"), norm_eps: str = "rms_norm_eps",
) -> Fields:  # fmt: skip
    """Read the keys that nearly all families share, as fields of DecoderConfig. The arguments are a family's defaults.

    size  of a head; None: hidden_size / heads. act, norm_eps: the keys of the activation, with its default, and of the
          norms' epsilon.
    """
    heads, hidden = count_of(config, "num_attention_heads"), count_of(config, "hidden_size")
    if size is None and hidden % heads and not config.get("head_dim"):
        fix = "set head_dim in config.json"
        raise ConfigError(f"hidden_size {hidden} does not divide among {heads} heads", fix=fix)
    return {
        "model_type": config["model_type"], "vocab_size": count_of(config, "vocab_size"), "hidden_size": hidden,
        "layers": count_of(config, "num_hidden_layers"), "heads": heads,
        "kv_heads": count_of(config, "num_key_value_heads", heads),
        "head_dim": count_of(config, "head_dim", size or hidden // heads),
        "intermediate_size": count_of(config, "intermediate_size"),
        "context": count_of(config, "max_position_embeddings", context),
        "norm_eps": positive(config, norm_eps, eps), "activation": activation_of(config, *act),
        "tie_embeddings": flag(config, "tie_word_embeddings", tied), "eos_ids": eos_ids(config),
        "mask_token": config.get("pard_token"),
    }  # fmt: skip


def describe(given: JsonMapping, **parts: Any) -> Fields:
    """A DecoderConfig of these fields. parts: fields of its `LayerDescription`s, a list for each layer's own."""

    shape = {key: given[key] for key in ("heads", "kv_heads", "head_dim", "intermediate_size")} | parts
    each = tuple(
        LayerDescription(**{key: value[i] if isinstance(value, list) else value for key, value in shape.items()})
        for i in range(given["layers"])
    )
    largest = {key: max(getattr(layer, key) for layer in each) for key in ("heads", "kv_heads", "head_dim")}
    return {**given, **largest, "windows": tuple(layer.window for layer in each), "each": each}
