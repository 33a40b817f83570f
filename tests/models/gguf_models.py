"""Models of each family as GGUF files, with random weights."""

from pathlib import Path
from typing import Any

import numpy as np

from slipstream.models.config import DecoderConfig
from slipstream.models.gguf_weights import FAMILIES, names_in_file, rotated
from tests.models.gguf_bytes import SIZES, gguf_bytes, random_bytes

VOCAB = 96
SPREAD = {"Q8_0": 0.0015, "Q4_K": 5e-4, "Q5_K": 2e-4, "Q6_K": 1e-4}
"""Standard deviation of the numbers of a block: weights of about 0.1."""


def family_config(family: str, tied: bool = False) -> DecoderConfig:
    """Two layers of width 256, which all kinds of blocks divide."""
    common: dict[str, Any] = {
        "model_type": family, "vocab_size": VOCAB, "eos_token_id": [1], "tie_word_embeddings": tied,
    }  # fmt: skip
    if family == "gpt2":
        return DecoderConfig.from_dict(
            common | {"n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 512}
        )
    if family in ("mixtral", "qwen3_moe"):
        common |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        common["norm_topk_prob"] = True
    return DecoderConfig.from_dict(
        common
        | {
            "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
            "head_dim": 64,
        }
        | {"intermediate_size": 512, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
        | {"sliding_window": None}
    )  # fmt: skip


def gguf_model(
    folder: Path, config: DecoderConfig, kinds: tuple[str, ...] = ("F32",), **metadata: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """(file, its canonical weights where they are floating-point). Matrices are stored in these kinds in turn."""
    known = {architecture: model_type for model_type, architecture in FAMILIES.items()} | {"mixtral": "llama"}
    name = known[config.model_type]
    keys: dict[str, Any] = {
        "block_count": config.layers, "context_length": config.context, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps, "attention.layer_norm_epsilon": config.norm_eps,
    }  # fmt: skip
    if config.experts:
        keys |= {"expert_count": config.experts.count, "expert_used_count": config.experts.per_token}
        keys["expert_feed_forward_length"] = config.experts.intermediate_size
    whole = {"general.architecture": name, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.model": "none"}
    whole |= {f"{name}.{key}": value for key, value in keys.items()} | metadata
    rng, shapes = np.random.default_rng(0), config.shapes()
    tensors, floats, stored = dict[str, np.ndarray](), dict[str, np.ndarray](), dict[str, str]()
    for number, (tensor, parts) in enumerate(names_in_file(config).items()):
        outs, columns = sum(shapes[part][0] for part in parts), shapes[parts[0]][-1]
        kind = kinds[number % len(kinds)]
        if len(shapes[parts[0]]) == 2 and kind != "F32" and "position" not in tensor:
            stored[tensor] = kind
            each = random_bytes(kind, outs, columns // SIZES[kind][0], number, SPREAD.get(kind, 0.01))
            tensors[tensor] = each.reshape(len(parts), -1, *each.shape[1:]) if "_exps" in tensor else each
            continue
        for part in parts:
            floats[part] = (rng.standard_normal(shapes[part]) * 0.1 + ("norm" in part)).astype(np.float32)
        join = np.stack if "_exps" in tensor else np.concatenate
        tensors[tensor] = join([rotated(config, part, floats[part]) for part in parts])
    file = folder / "model.gguf"
    file.write_bytes(gguf_bytes(whole, tensors, kinds=stored))
    return file, floats
