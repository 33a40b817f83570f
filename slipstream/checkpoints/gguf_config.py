"""Reads the tensors of a GGUF file, and translates its metadata to the keys of config.json."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.checkpoints.families import FAMILIES, hybrids, mamba2
from slipstream.checkpoints.gguf_header import GgufHeader, GgufTensor, gguf_shape
from slipstream.checkpoints.weight_blocks import FLOATS, READERS, TYPES
from slipstream.core.strict import JsonObject
from slipstream.errors import CheckpointError, UnsupportedModelError

MODEL_TYPES = {each: name for name, family in FAMILIES.items() for each in family.gguf.split()}
"""For each `general.architecture` that our decoder runs, the `model_type`. Files of Mistral and Mixtral have the
architecture "llama"; Mixtral is recognised by its experts."""

STRICT = ("llama", "qwen2", "qwen3", "qwen3moe", "gpt2", "gemma4")
"""Architectures for which llama.cpp rotates whole heads."""

HYBRIDS = [each for family in (*hybrids.FAMILIES.values(), *mamba2.FAMILIES.values()) for each in family.gguf.split()]
"""Architectures with recurrent layers, where sizes of attention or of the MLP may be 0 in some layers."""

DIVISORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""Names of tensors with divisors of the rotary frequencies: of Llama 3.1, and of LongRoPE by length of context."""
_SIZES = {each.name: (each.count, each.nbytes) for each in TYPES.values()}


def refusal(header: GgufHeader) -> str | None:
    """Return why our own decoder does not run a GGUF file; None if it runs the file."""
    if header.architecture not in MODEL_TYPES:
        return f"its architecture is {header.architecture!r}, not one of {', '.join(MODEL_TYPES)}"
    family = FAMILIES[MODEL_TYPES[header.architecture]]
    for tensor in header.tensors:
        if tensor.type not in READERS and tensor.type not in FLOATS:
            return f"tensor {tensor.name!r} is stored as {tensor.type}, not as one of {', '.join((*FLOATS, *READERS))}"
        part = tensor.name.split(".", 2)[-1]
        known = tensor.name.endswith((".weight", ".bias")) or part in family.gguf_names.values()
        if not known or tensor.name == "output.bias":
            return f"it has a tensor {tensor.name!r}"
    names = {tensor.name for tensor in header.tensors}
    for layer in (name.removesuffix(".attn_qkv.weight") for name in names if name.endswith(".attn_qkv.weight")):
        if 0 < sum(f"{layer}.attn_{part}.bias" in names for part in "qkv") < 3:
            return f"it has only some of the biases of {layer}.attn_qkv"  # llama.cpp would ignore the biases
    for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "expert_used_count"):
        value = header.setting(key, 0)
        none = {0} if header.architecture in HYBRIDS else set[int]()
        if isinstance(value, list) and len(set(value) - none) > 1 and key not in family.gguf_lists:
            return f"its {key} differs between layers"
    plain: dict[str, tuple[Any, ...]] = {
        "rope.scaling.type": ("linear", "yarn", "none"), "attention.causal": (True,), "nextn_predict_layers": (0,)
    }  # fmt: skip
    if header.architecture in STRICT:
        plain["expert_group_count"] = (0, 1)
    if family.further:
        del plain["nextn_predict_layers"]
    for key, values in plain.items():
        if key.startswith("rope") and any(tensor.name == SHORT for tensor in header.tensors):
            continue
        if (value := header.setting(key, values[0])) not in values:
            return f"its {key} is {value!r}"
    mixed = any("_exps." in tensor.name for tensor in header.tensors)  # dense files may have the keys of mixtures, too
    for part in ("expert", "expert_group") if mixed else ():
        if header.size(f"{part}_count") > 1 and not header.size(f"{part}_used_count"):
            return f"it has no {part}_used_count"
    if _epsilon(header) is None:
        rms = "" if header.architecture == "gpt2" else "rms_"
        return f"it has no attention.layer_norm_{rms}epsilon"
    return odd_heads(header)


def _epsilon(header: GgufHeader, of_rms: bool = False) -> float | None:
    """Return the epsilon of the model's norms. Some files have an epsilon of RMS norms and one of LayerNorm; `of_rms`
    prefers the epsilon of RMS norms."""
    plain: float | None = header.setting("attention.layer_norm_epsilon")
    rms: float | None = header.setting("attention.layer_norm_rms_epsilon")
    if header.architecture in STRICT:
        return plain if header.architecture == "gpt2" else rms
    return rms if plain is None or (of_rms and rms is not None) else plain


def odd_heads(header: GgufHeader) -> str | None:
    """Describe a head size with which llama.cpp would abort; None if the file has none."""
    heads = header.size("attention.head_count") or 1
    dim = header.size("attention.key_length") or header.size("embedding_length") // heads
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    for key in keys[:2] if header.architecture == "gpt2" else keys:
        if header.architecture in STRICT and (value := header.setting(key, dim)) != dim:
            return f"its {key} is {value}, but the size of its heads is {dim}"
    dim = header.size("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa") if dim else ():
        if (value := header.setting(key, dim)) != dim:
            return f"its {key} is {value}, but the size of its heads with a sliding window is {dim}"
    return None


def same_token(header: GgufHeader) -> str | None:
    """Describe a token that occurs twice in the vocabulary, with which llama.cpp would abort; None if there is none."""
    counts = Counter(text.partition("\0")[0] for text in header.tokens).items()  # C strings end at a zero byte
    return next((f"{count} of its tokens are {text!r:.40}" for text, count in counts if text and count > 1), None)


def in_blocks(header: GgufHeader) -> bool:
    """Return whether a file contains quantised weights."""
    return any(tensor.type in READERS for tensor in header.tensors)


def gguf_config(header: GgufHeader) -> JsonObject:
    """Translate the metadata of a GGUF file to a config.json. Raises UnsupportedModelError if `refusal` returns a
    reason, and the errors of `gguf_shape`."""
    why = refusal(header)
    if why is not None:
        raise UnsupportedModelError(
            f"our own decoder does not run {header.path.name}",
            why=why,
            fix="give the folder of the checkpoint that the file was made from, which transformers can run, or let "
            "llama-server run the file, and measure that server: slipstream verify or tune with --base-url",
        )
    shape, family = gguf_shape(header), MODEL_TYPES[header.architecture]
    config: JsonObject = {
        "model_type": family, "vocab_size": shape.vocab_size, "eos_token_id": [*shape.eos_ids],
        "tie_word_embeddings": shape.tie_embeddings,
    }  # fmt: skip
    if family == "gpt2":
        return config | {
            "n_embd": shape.hidden_size, "n_head": shape.heads, "n_layer": shape.layers, "n_positions": shape.context,
            "n_inner": header.size("feed_forward_length") or None,
            "layer_norm_epsilon": header.setting("attention.layer_norm_epsilon", 1e-5),
        }  # fmt: skip
    if shape.experts:
        config |= {"model_type": "mixtral" if family == "llama" else family, "norm_topk_prob": True}
        config |= {
            **dict.fromkeys(("num_local_experts", "num_experts"), shape.experts.count),
            "num_experts_per_tok": shape.experts.per_token,
        }
        width = header.size("feed_forward_length") // shape.experts.per_token  # llama.cpp's default
        config["moe_intermediate_size"] = header.size("expert_feed_forward_length") or width
    rope, names = dict(header.rope), {tensor.name for tensor in header.tensors}
    dimensions = header.size("rope.dimension_count") or shape.head_dim
    for tensor in header.tensors:
        if tensor.name == DIVISORS and header.architecture != "qwen2":
            rope["divisors"] = _divisors(header, tensor, shape.head_dim // 2)
        elif tensor.name == SHORT:
            trained = header.size("rope.scaling.original_context_length")
            rope |= {"rope_type": "longrope", "short_factor": _divisors(header, tensor, dimensions // 2)}
            rope |= {"attention_factor": rope.pop("cos_sin_factor", None), "original_max_position_embeddings": trained}
    config |= {
        "hidden_size": shape.hidden_size, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers, "head_dim": shape.head_dim, "max_position_embeddings": shape.context,
        "intermediate_size": header.size("feed_forward_length") or None,
        **dict.fromkeys(("layer_norm_eps", "norm_eps", "norm_epsilon"), _epsilon(header)),
        "rms_norm_eps": _epsilon(header, of_rms=True),
        "attention_bias": any(name.endswith(".bias") and ".attn_" in name for name in names),
        "mlp_bias": any(name.endswith(".bias") and ".ffn_" in name for name in names),
        "use_bias": any(name.endswith(".bias") for name in names), "rope_parameters": rope, "sliding_window": None,
        "pard_token": header.setting("pard_token"),
    }  # fmt: skip
    if dimensions != shape.head_dim:
        config["partial_rotary_factor"] = dimensions / shape.head_dim
    further = FAMILIES[family].keys
    return config if further is None else {**config, **further(header)}


def keys_read(header: GgufHeader) -> set[str]:
    """Return the metadata keys of the architecture that our decoder reads."""
    fresh = replace(header, read=set())
    gguf_config(fresh)
    return fresh.read


def _divisors(header: GgufHeader, tensor: GgufTensor, count: int) -> list[float]:
    """Return the divisors of the rotary frequencies (Llama 3.1). Raises CheckpointError."""
    if tensor.shape == (count,) and tensor.type in FLOATS:
        raw = read_tensor(header, tensor).ravel()
        bits = raw.view("<u2").astype("<u4") << 16 if tensor.type == "BF16" else raw
        values = bits.view("<f2" if tensor.type == "F16" else "<f4").astype(float)
        if values.min() > 0 and values.max() < math.inf:
            return values.tolist()
    raise CheckpointError(
        f"tensor {tensor.name!r} of {header.path.name} does not contain {count} positive numbers",
        why="the rotary embedding divides by these numbers",
        fix="convert the model again",
    )


def read_tensor(header: GgufHeader, tensor: GgufTensor) -> np.ndarray:
    """Return the bytes of a tensor [outs, blocks, bytes of a block], mapped from the file."""
    count, size = _SIZES[tensor.type]
    outs, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]  # the experts of a layer form one matrix
    if columns % count:
        raise CheckpointError(
            f"tensor {tensor.name!r} has rows of {columns} numbers, which is not a multiple of the block size {count}",
            why=f"the GGUF type {tensor.type} stores {count} numbers in a block",
            fix="convert the model again",
        )
    nbytes = outs * columns // count * size
    mapped = tensor.file.mapping(nbytes)
    return np.frombuffer(mapped, np.uint8, nbytes, tensor.begin).reshape(outs, columns // count, size)
