"""The architecture of a GGUF file for our decoder, in the terms of config.json; and how a tensor of it is read."""

import math
from typing import Any

import numpy as np

from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.models.gguf_header import GgufHeader, GgufTensor, gguf_shape
from slipstream.models.weight_blocks import FLOATS, READERS, TYPES

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gpt2": "gpt2"}
"""`general.architecture` of the families that our decoder runs -> `model_type`. Mistral is "llama", and so is Mixtral,
which has experts."""

_SIZES = {each.name: (each.count, each.nbytes) for each in TYPES.values()}


def refusal(header: GgufHeader) -> str | None:
    """Why our decoder does not run a GGUF file; None if it does."""
    if header.architecture not in FAMILIES:
        return f"its architecture is {header.architecture!r}, not one of {', '.join(FAMILIES)}"
    for tensor in header.tensors:
        if tensor.type not in READERS and tensor.type not in FLOATS:
            return f"tensor {tensor.name!r} is stored as {tensor.type}, not as one of {', '.join((*FLOATS, *READERS))}"
    scaling = header.setting("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        return f"its rotary scaling is {scaling!r}"
    return None


def in_blocks(header: GgufHeader) -> bool:
    """Whether a file holds quantised weights."""
    return any(tensor.type in READERS for tensor in header.tensors)


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """The architecture of a GGUF file, as config.json would say it. Raises UnsupportedModelError for one that `refusal`
    refuses, and what `gguf_shape` raises."""
    why = refusal(header)
    if why is not None:
        raise UnsupportedModelError(
            f"our own decoder does not run {header.path.name}",
            why=why,
            fix="leave executor at 'auto', or choose executor='llamacpp'",
        )
    shape, family = gguf_shape(header), FAMILIES[header.architecture]
    config: dict[str, Any] = {
        "model_type": family, "vocab_size": shape.vocab_size, "eos_token_id": [*shape.eos_ids],
        "tie_word_embeddings": shape.tie_embeddings,
    }  # fmt: skip
    if family == "gpt2":
        return config | {
            "n_embd": shape.hidden_size, "n_head": shape.heads, "n_layer": shape.layers, "n_positions": shape.context,
            "n_inner": header.setting("feed_forward_length"),
            "layer_norm_epsilon": header.setting("attention.layer_norm_epsilon", 1e-5),
        }  # fmt: skip
    if shape.experts:
        config |= {"model_type": "mixtral" if family == "llama" else family, "norm_topk_prob": True}
        config |= {"num_local_experts": shape.experts.count, "num_experts_per_tok": shape.experts.per_token}
        config["moe_intermediate_size"] = header.setting("expert_feed_forward_length")
    rope, tensors = dict(shape.rope_parameters), {tensor.name: tensor for tensor in header.tensors}
    if divisors := tensors.get("rope_freqs.weight"):  # what divides each frequency (Llama 3.1)
        rope |= {"rope_type": "divided", "divisors": read_tensor(header, divisors).view(np.float32).ravel().tolist()}
    return config | {
        "hidden_size": shape.hidden_size, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers, "head_dim": shape.head_dim, "max_position_embeddings": shape.context,
        "intermediate_size": header.setting("feed_forward_length"),
        "rms_norm_eps": header.setting("attention.layer_norm_rms_epsilon", 1e-5),
        "attention_bias": "blk.0.attn_q.bias" in tensors, "rope_parameters": rope, "sliding_window": None,
        "pard_token": header.setting("pard_token"),
    }  # fmt: skip


def read_tensor(header: GgufHeader, tensor: GgufTensor) -> np.ndarray:
    """The bytes of a tensor [outs, blocks, bytes of a block], mapped from the file."""
    count, size = _SIZES[tensor.type]
    outs, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]  # all experts are one matrix
    if columns % count:
        raise CheckpointError(
            f"tensor {tensor.name!r} has rows of {columns} numbers, which do not divide into blocks of {count}",
            why=f"{tensor.type} stores {count} numbers in a block",
            fix="convert the model again",
        )
    return np.memmap(header.path, np.uint8, "r", header.weights_at + tensor.offset, (outs, columns // count, size))
