"""`Family` says how checkpoints and GGUF files of an architecture are read; with helpers for the families' readers."""

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
    """Says how checkpoints of a `model_type` are read.

    read        config.json -> fields of the DecoderConfig.
    reads       keys that this family reads, while other families refuse them.
    names       parts of tensor names in safetensors -> canonical parts (`weights`).
    fused       tensor with several parts -> its canonical parts, in order.
    grouped     fused tensors that contain all parts of one group, then all parts of the next group -> "heads" (of
                attention) or "groups" (of recurrent heads).
    otherwise   canonical parts that some layers lack -> the meaning of tensors with these names in those layers.
    pairs       whether rotary embeddings rotate neighbours (2i, 2i + 1) in stored weights, instead of i and i + D / 2.
    plus_one    norms that are stored as their weight minus 1: "all", those of "layers", or "" for none.
    columns     whether linear weights of layers are stored [in, out].
    transposed  whether weights of all experts are stored [E, in, out]. in_turn: whether gate and up rows alternate.
    further     whether checkpoints may have MTP layers, which predict further tokens and are no part of the decoder.
    gguf        names in `general.architecture` of GGUF files; "": our own decoder reads no GGUF files of this family.
    keys        function from a GGUF header to further keys of config.json.
    gguf_names  canonical parts, or keys of `fused`, -> names in GGUF files that differ from llama.cpp's usual names.
    gguf_pairs  as `pairs`, for GGUF files.
    gguf_lists  metadata keys of GGUF files whose value may differ between layers.
    """

    read: Callable[[ReadKeys], Fields]
    reads: Seq[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, Seq[str]] = field(default_factory=dict)
    grouped: Mapping[str, str] = field(default_factory=dict)
    otherwise: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    plus_one: str = ""
    columns: bool = False
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
"""Names of norms in families that also normalise outputs. The norm before the MLP gets Llama's name for it."""


def common(
    config: ReadKeys, *, context: int, eps: float = 1e-6, tied: bool = False, size: int | None = None,
    act: tuple[str, str] = ("hidden_act", "silu"), norm_eps: str = "rms_norm_eps",
) -> Fields:  # fmt: skip
    """Return the fields of DecoderConfig that nearly all families have. The arguments are the family's defaults.

    size  size of a head; None: hidden_size / heads. act: key of the activation, and its default. norm_eps: key of the
          norms' epsilon."""
    heads, hidden = count_of(config, "num_attention_heads"), count_of(config, "hidden_size")
    if size is None and hidden % heads and not config.get("head_dim"):
        fix = "set head_dim in config.json"
        raise ConfigError(f"hidden_size {hidden} is not a multiple of the number of heads, {heads}", fix=fix)
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
    """Add layers to fields of a DecoderConfig. parts: fields of `LayerDescription`, or lists with one per layer."""
    shape = {key: given[key] for key in ("heads", "kv_heads", "head_dim", "intermediate_size")} | parts
    each = tuple(
        LayerDescription(**{key: value[i] if isinstance(value, list) else value for key, value in shape.items()})
        for i in range(given["layers"])
    )
    largest = {key: max(getattr(layer, key) for layer in each) for key in ("heads", "kv_heads", "head_dim")}
    return {**given, **largest, "windows": tuple(layer.window for layer in each), "each": each}
