"""GGUF files that llama.cpp reads and that differ from what converters write today: old keys, optional tensors, ..."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints.gguf_files import byte_level_keys, family_config, gguf_bytes, model_parts

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
WORDS, MERGES = ("he", "ll", "hell", "hello", "Ġhello", "Ġh"), ("h e", "l l", "he ll", "hell o")
SPECIAL = ("<s>", "<e>", "<|im_end|>", "<|fim_pad|>")
TOKENS = byte_level_keys("llama-bpe", WORDS, MERGES, SPECIAL, bos="<s>", eos="<e>")

Tensors = dict[str, np.ndarray]
_random = np.random.default_rng(7)


def write(
    file: Path, family: str = "llama", change: Callable[[Tensors], Tensors] | None = None,
    kinds: Mapping[str, str] | None = None, **metadata: Any,
) -> Path:  # fmt: skip
    """Write a model with two layers and random weights, whose greedy output depends on every setting. change: function
    that changes its tensors."""
    whole, tensors, _, _ = model_parts(family_config(family, **SHAPE), **TOKENS | metadata)
    tensors = {name: tensor if "norm" in name else tensor * 3 for name, tensor in tensors.items()}
    file.write_bytes(gguf_bytes(whole, change(tensors) if change else tensors, kinds=kinds))
    return file


def added(*parts: str) -> Callable[[Tensors], Tensors]:
    """Return a function that adds random biases of these parts of each layer to the tensors."""
    rows = {"q": 64, "k": 32, "v": 32, "output": 64, "gate": 96, "up": 96, "down": 64}
    biases = {
        f"blk.{i}.{part}.bias": _random.standard_normal(rows[part.split("_")[1]]) for i in range(2) for part in parts
    }
    return lambda tensors: tensors | biases


def fused(tensors: Tensors) -> Tensors:
    """Join the query, key and value projections of each layer to one tensor."""
    kept = dict(tensors)
    for kind in ("weight", "bias"):
        for i in range(2):
            if f"blk.{i}.attn_q.{kind}" in kept:
                parts = [kept.pop(f"blk.{i}.attn_{part}.{kind}") for part in "qkv"]
                kept[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate(parts)
    return kept


def without_biases(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(".bias")}


DIVISORS = np.linspace(1, 8, 8)
_FREQUENCIES = {"change": lambda tensors: tensors | {"rope_freqs.weight": DIVISORS}}
_YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
_YARN |= {"llama.rope.scaling.original_context_length": 64}

ODD: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "the old key of linear scaling": {"llama.rope.scale_linear": 4.0},
    "both keys of linear scaling": {"llama.rope.scale_linear": 4.0, "llama.rope.scaling.factor": 2.0},
    "a factor without a type": {"llama.rope.scaling.factor": 4.0},
    "a factor that is not used": {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"},
    "a factor of 0": {"llama.rope.scaling.factor": 0.0, "llama.rope.scaling.type": "linear"},
    "linear scaling without a factor": {"llama.rope.scaling.type": "linear"},
    "YaRN": _YARN,
    "YaRN without a length": _YARN | {"llama.rope.scaling.original_context_length": 0},
    "YaRN without a factor": {"llama.rope.scaling.type": "yarn"},
    "YaRN by the old key": {"llama.rope.scaling.type": "yarn", "llama.rope.scale_linear": 4.0},
    "YaRN with a factor of attention": _YARN | {"llama.rope.scaling.attn_factor": 1.5},
    "YaRN with its own bounds": _YARN
    | {"llama.rope.scaling.yarn_beta_fast": 8.0, "llama.rope.scaling.yarn_beta_slow": 2.0},
    "a factor of attention alone": {"llama.rope.scaling.attn_factor": 1.5},
    "divided frequencies": _FREQUENCIES,
    "divided frequencies and linear scaling": _FREQUENCIES | {"llama.rope.scaling.factor": 4.0},
    "divided frequencies and YaRN": _FREQUENCIES | _YARN,
    "biases of q, k and v": {"change": added("attn_q", "attn_k", "attn_v")},
    "a bias of k": {"change": added("attn_k")},
    "biases of the output of attention": {"change": added("attn_output")},
    "biases of the MLP": {"change": added("ffn_gate", "ffn_up", "ffn_down")},
    "a bias of the end of the MLP": {"change": added("ffn_down")},
    "q, k and v in one tensor": {"change": fused},
    "Qwen2 without biases": {"family": "qwen2", "change": without_biases},
    "Qwen2 with q, k and v in one tensor": {"family": "qwen2", "change": fused},
    "q, k and v in one tensor and biases apart": {
        "change": lambda tensors: added("attn_q", "attn_k", "attn_v")(fused(tensors))
    },
    "Qwen3 with biases": {"family": "qwen3", "change": added("attn_q", "attn_v")},
    "one size for all layers as a list": {
        "llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2],
        "llama.feed_forward_length": [96, 96],
    },
    "a wrong size of the vocabulary": {"llama.vocab_size": 77},
    "BOS asked for": {"tokenizer.ggml.add_bos_token": True},
    "no BOS": {"tokenizer.ggml.add_bos_token": False},
    "EOS asked for": {"tokenizer.ggml.add_eos_token": True},
    "BOS without an id": {"tokenizer.ggml.bos_token_id": None},
    "BOS outside of the vocabulary": {"tokenizer.ggml.bos_token_id": 5000},
    "no padding, as older converters write it": {"tokenizer.ggml.padding_token_id": 2**32 - 1},
    "EOS outside of the vocabulary": {"tokenizer.ggml.eos_token_id": 2**32 - 1},
    "EOS without an id": {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 259},
    "no splitting named": {"tokenizer.ggml.pre": None},
    "no types of tokens": {"tokenizer.ggml.token_type": None},
    "ends that are ordinary tokens": {"tokenizer.ggml.token_type": [1] * 300},
    "words that are merged": {"tokenizer.ggml.pre": "qwen2"},
    "suppressed tokens": {"tokenizer.ggml.suppress_tokens": [97, 98]},
}  # fmt: skip
"""Arguments of `write` by the name of the case."""
