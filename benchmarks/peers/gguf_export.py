"""A Llama checkpoint in Hugging Face layout as a GGUF file of float32, for llama.cpp.

Only what decoding of token ids needs: the vocabulary has a size and no texts (tokenizer model "none"), because ids go
in and come out; or, for a server, the texts and merges of a byte-level BPE too. llama.cpp splits texts into words by
GPT-2's rule then, not by the checkpoint's, so a prompt may have other tokens. Metadata and tensor names follow
`conversion/llama.py` of llama.cpp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

PLAIN = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
"""Settings that a checkpoint must have for this export."""


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotary embedding.

    Hugging Face rotates element i of a head with i + d/2, llama.cpp's Llama 2i with 2i + 1.  # [heads * d, hidden]
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])  # [heads, 2, d / 2, hidden]
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def convert(checkpoint: str | Path, file: str | Path, texts: bool = False) -> None:
    """Write the checkpoint's weights, unchanged in value, to `file`. texts: with its tokenizer.

    Raises:
        ValueError: for a checkpoint that is no plain Llama: another type, biases, scaled rotary embeddings.
    """
    folder = Path(checkpoint)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    unlike = [f"{k}={config[k]!r}" for k, v in PLAIN.items() if config.get(k, v) != v]
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default" or unlike:
        raise ValueError(f"{folder.name} is no plain Llama: {config['model_type']}, rope {rope}, {unlike}")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    groups = config.get("num_key_value_heads", heads)
    width = config.get("head_dim") or config["hidden_size"] // heads

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if texts:
        _add_tokenizer(writer, folder, config["eos_token_id"])
    else:
        writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, weight in _weights(folder).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        known = names.get_name(name, try_suffixes=(".weight",))
        if known is None:
            raise ValueError(f"{folder.name} has a tensor that no Llama has: {name}")
        if name.endswith("q_proj.weight"):
            weight = paired(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = paired(weight, groups)
        writer.add_tensor(known, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, end: int) -> None:
    """The byte-level BPE of tokenizer.json. end: id of the end-of-text token."""
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    special = {each["id"] for each in tokenizer["added_tokens"]}
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=lambda text: vocabulary[text]))
    writer.add_token_types([kinds[i in special] for i in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def _weights(folder: Path) -> dict[str, np.ndarray]:
    weights = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights |= {name: weight.astype(np.float32) for name, weight in load_file(shard).items()}
    return weights


def census(file: str | Path) -> str:
    """Which formats the matrices of a file are stored in, by their share of its weights: "69 % Q5_0, 31 % Q8_0"."""
    sizes: dict[str, int] = {}
    for tensor in gguf.GGUFReader(str(file)).tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    whole = sum(sizes.values())
    return ", ".join(f"{n / whole:.0%} {kind}" for kind, n in sorted(sizes.items(), key=lambda kv: -kv[1]))
