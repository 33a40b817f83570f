"""Converts checkpoints of our families to GGUF, the format of llama.cpp, for comparisons and tests.

    python -m benchmarks.gguf.gguf_writer CHECKPOINT FILE [f32|f16|q8_0|q4_k_m|...]

Metadata and names of tensors are those of llama.cpp (gguf-py/gguf/constants.py). A model that llama.cpp would run as
another one is refused, for example one with sliding windows.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gguf.llamacpp import faults, llama_cpp
from slipstream.checkpoints import gguf_header
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.families import FAMILIES
from slipstream.checkpoints.gguf_header import FILE_TYPES, read_header
from slipstream.checkpoints.gguf_keys import ENDS, WHOLE
from slipstream.checkpoints.gguf_weights import names_in_file
from slipstream.checkpoints.head_rows import rows_of_halves
from slipstream.checkpoints.weights import Weights, load_weights
from slipstream.errors import CheckpointError, LoadError, ParameterError, UnsupportedModelError, did_you_mean
from slipstream.host.machine import available_cores
from slipstream.tokens.gguf_tokenizer import SPLITS, gguf_tokenizer
from slipstream.tokens.text import tokenizer_of
from slipstream.tokens.token_texts import flat_parts, is_byte_name

PLAIN = ("f32", "f16", "q8_0")
"""Quantisations that need no llama.cpp."""

QUANTISATIONS = (*PLAIN, "q4_0", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k")
_NUMBERS = {name.lower(): number for number, name in FILE_TYPES.items()}

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2"}

_TEXTS = (
    "def add(a, b):\n    return a + b\n\n\nclass Point:\n\tx: int = 1234567\n",
    "The café isn't open — “maybe” at 10:30, 第一章 🎈\n",
    '{"name": "x", "list": [1, 2.5, -3e10], "ok": true}',
)
"""Texts that are encoded by the tokenizer of the checkpoint, and by the one that the file's tokens make."""


@dataclass(frozen=True)
class Converted:
    """file: what was written. stored: bytes of its weights, by type. tokens: how many were compared.
    differing: how many of `_TEXTS` are encoded differently without tokenizer.json; None without a tokenizer."""

    file: Path
    stored: Mapping[str, int]
    tokens: int
    differing: int | None


def convert_to_gguf(checkpoint: str | Path, file: str | Path, quantize: str = "f16") -> Converted:
    """Write a checkpoint (folder or hub id) as a GGUF file, complete or not at all.

    quantize  one of `QUANTISATIONS`. Matrices whose rows do not divide into blocks are stored with more bits.

    Raises ParameterError for an unknown quantisation, UnsupportedModelError for a model that llama.cpp does not run as
    our decoder does, LoadError without the packages that are needed, and what reading the checkpoint raises.
    """
    if quantize not in QUANTISATIONS:
        raise ParameterError(f"the quantisation is {quantize!r}", fix=did_you_mean(quantize, QUANTISATIONS))
    config = DecoderConfig.load(checkpoint)
    _check_convertible(config)
    if quantize not in PLAIN:
        llama_cpp()  # before a long conversion
    path = Path(file).expanduser()
    if not path.parent.is_dir():
        raise ParameterError(f"there is no folder {str(path.parent)!r} to write {path.name!r} in", fix="make it first")
    tokenizer, weights = tokenizer_of(checkpoint), load_weights(checkpoint, config, torch.float32)
    config = weights.config  # it may have a head of its own
    part, whole = path.with_name(path.name + ".part"), path.with_name(path.name + ".f32")
    try:
        plain = quantize in PLAIN
        _write(part if plain else whole, config, weights, tokenizer, quantize if plain else "f32", checkpoint)
        if not plain:
            _quantised(whole, part, _NUMBERS[quantize])
        converted = _checked(part, path, tokenizer)
        part.replace(path)
    finally:
        weights.unmap()
        part.unlink(missing_ok=True)
        whole.unlink(missing_ok=True)
    return converted


def _check_convertible(config: DecoderConfig) -> None:
    rope = config.rope_parameters
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaled = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(key) is not None]
    why = None
    if config.experts or config.model_type not in _ARCHITECTURES:
        why = "mixtures of experts are not converted" if config.experts else "the family is not converted"
    elif any(window is not None and window < config.context for window in config.windows):
        why = "llama.cpp has no sliding windows for this family"
    elif config.activation != ("gelu_tanh" if config.model_type == "gpt2" else "silu"):
        why = f"llama.cpp has no {config.activation} for this family"
    elif kind == "yarn" and (scaled or not rope.get("truncate", True)):
        why = f"llama.cpp has no {', '.join(scaled) or 'truncate=false'} of YaRN"
    elif config.model_type == "qwen3" and (config.qkv_bias or config.o_bias):
        why = "llama.cpp has no biases for this family"
    if why is not None:
        raise UnsupportedModelError(
            f"a {config.model_type!r} checkpoint cannot be converted to GGUF: {why}",
            why="the file would be another model",
            fix="use the checkpoint itself, with quantize='int8'",
        )


def _write(
    path: Path, config: DecoderConfig, weights: Weights, tokenizer: Any, quantize: str, checkpoint: str | Path
) -> None:
    try:
        import gguf
    except ImportError as fault:
        raise LoadError(
            f"the package gguf cannot be imported ({fault})",
            why="it writes GGUF files",
            fix="pip install gguf; other types than f32, f16 and q8_0 need llama-cpp-python, too",
        ) from fault
    writer = gguf.GGUFWriter(str(path), _ARCHITECTURES[config.model_type])
    try:
        writer.add_name(Path(checkpoint).name)
        writer.add_file_type(_NUMBERS[quantize])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_shape(writer, config, gguf)
        if config.mask_token is not None:
            writer.add_uint32(f"{_ARCHITECTURES[config.model_type]}.pard_token", config.mask_token)
        if tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            add_tokenizer(writer, tokenizer, checkpoint, config.vocab_size, config.eos_ids)
        for tensor, shape in _shapes(config).items():
            qtype = _qtype(shape, quantize, gguf)
            size = gguf.quants.quant_shape_to_byte_shape(shape, qtype) if qtype.name == "Q8_0" else shape
            kind = {"F32": np.float32, "F16": np.float16}.get(qtype.name, np.uint8)
            writer.add_tensor_info(tensor, size, np.dtype(kind), int(np.prod(size)) * np.dtype(kind).itemsize, qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, values in _tensors(config, weights):  # one after another: never the whole model in memory
            writer.write_tensor_data(gguf.quants.quantize(values, _qtype(values.shape, quantize, gguf)))
    finally:
        writer.close()


def _qtype(shape: tuple[int, ...], quantize: str, gguf: Any) -> Any:
    types = gguf.GGMLQuantizationType
    if len(shape) == 1 or quantize == "f32":
        return types.F32
    return types.Q8_0 if quantize == "q8_0" and shape[-1] % 32 == 0 else types.F16


def _add_shape(writer: Any, config: DecoderConfig, gguf: Any) -> None:
    rope, dim = config.rope_parameters, config.head_dim
    kind = rope.get("rope_type", rope.get("type", "default"))
    values = {
        "block_count": config.layers, "context_length": config.context, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "head_count": config.heads, "head_count_kv": config.kv_heads,
        "vocab_size": config.vocab_size,
        "layer_norm_eps" if config.norm == "layer" else "layer_norm_rms_eps": config.norm_eps,
    }  # fmt: skip
    if config.norm != "layer":
        values |= {"key_length": dim, "value_length": dim, "rope_dimension_count": dim}
        values["rope_freq_base"] = float(rope["rope_theta"])
        if kind in ("linear", "yarn"):
            values |= {"rope_scaling_type": gguf.RopeScalingType(kind), "rope_scaling_factor": float(rope["factor"])}
        if kind == "yarn":
            values["rope_scaling_orig_ctx_len"] = int(rope.get("original_max_position_embeddings") or config.context)
            values["rope_scaling_yarn_beta_fast"] = float(rope.get("beta_fast") or 32)
            values["rope_scaling_yarn_beta_slow"] = float(rope.get("beta_slow") or 1)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)


def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of the file, in their order; shapes as in a checkpoint."""
    shapes = config.shapes()
    stored = {
        name: (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
        for name, parts in names_in_file(config).items()
    }
    return stored if _slowed(config) is None else stored | {"rope_freqs.weight": (config.head_dim // 2,)}


def rotate_rows(config: DecoderConfig, name: str, values: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection in the order of a file: see `Family.gguf_pairs`."""
    order = rows_of_halves(config, name) if FAMILIES[config.model_type].gguf_pairs else None
    return values if order is None else values[np.argsort(order)]


def _tensors(config: DecoderConfig, weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of `_shapes`, in float32."""
    for name, parts in names_in_file(config).items():
        each = [rotate_rows(config, part, weights[part].numpy()) for part in parts]
        yield name, np.ascontiguousarray(each[0] if len(each) == 1 else np.concatenate(each))
    slowed = _slowed(config)
    if slowed is not None:
        yield "rope_freqs.weight", slowed


def _slowed(config: DecoderConfig) -> np.ndarray | None:
    """[D/2]: by what llama.cpp divides each frequency, for Llama 3.1; None for other models."""
    rope = config.rope_parameters
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    frequencies, _ = config.rope()
    powers = float(rope["rope_theta"]) ** (torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    return (1 / powers / frequencies).float().numpy()


def _quantised(checkpoint: Path, file: Path, kind: int) -> None:
    library = llama_cpp()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread = kind, available_cores()
    faults()
    if library.llama_model_quantize(str(checkpoint).encode(), str(file).encode(), params):
        raise LoadError(
            f"llama.cpp could not quantise the model: {faults() or 'it gave no reason'}", fix="choose f16 or q8_0"
        )


def _checked(part: Path, file: Path, reference: Any) -> Converted:
    """Compare the texts of the file's tokens, read without the tokenizer.json in it, with those of the checkpoint, one
    by one. Raises CheckpointError where one differs."""
    header = read_header(part)
    if reference is None:
        return Converted(file, header.stored, 0, None)
    bare = {key: value for key, value in header.metadata.items() if key != WHOLE}
    tokenizer = gguf_tokenizer(replace(header, metadata=bare))
    assert tokenizer is not None
    for i in header.token_texts:
        text, wanted = tokenizer.decode([i]), reference.decode([i])
        # Incomplete characters may be another number of U+FFFD; some tokenizers drop a space at the beginning.
        if text.replace("\ufffd", "") != wanted.replace("\ufffd", "") and text.strip(" ") != wanted.strip(" "):
            raise CheckpointError(
                f"token {i} is {wanted!r} in the checkpoint and {text!r} in the GGUF file",
                why="the model would read and write other texts",
                fix="convert the model with llama.cpp's own script",
            )
    differing = sum(tokenizer.encode(text) != reference.encode(text) for text in _TEXTS)
    return Converted(file, header.stored, len(header.token_texts), differing)


def add_tokenizer(writer: Any, tokenizer: Any, checkpoint: str | Path, rows: int, eos_ids: Seq[int]) -> None:
    """Write the tokenizer of a checkpoint as metadata.

    writer     of the package gguf.
    tokenizer  as `tokenizer_of` gives it for `checkpoint`. rows: of the model's embedding.
    eos_ids    that end a text; the first three have a place.

    Raises UnsupportedModelError for a kind of tokenizer that llama.cpp does not have.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = "{}" if backend is None else backend.to_str()
    described = json.loads(text)
    model: dict[str, Any] = described.get("model") or {}
    parts = [part.get("type") for key in ("pre_tokenizer", "decoder") for part in flat_parts(described.get(key))]
    if model.get("type") != "BPE" or not ("ByteLevel" in parts or model.get("byte_fallback")):
        raise UnsupportedModelError(
            f"the tokenizer of {str(checkpoint)!r} is of the kind {model.get('type')!r}",
            why="llama.cpp's kinds that are written here are byte-level BPE, and BPE that falls back to bytes",
            fix="convert the model with llama.cpp's own script",
        )
    texts, types = [f"[PAD{i}]" for i in range(rows)], [gguf_header.UNUSED] * rows
    for token, i in model["vocab"].items():
        if i < rows:
            texts[i], types[i] = token, gguf_header.NORMAL
    for added in described.get("added_tokens") or []:
        if added["id"] < rows:
            texts[added["id"]] = added["content"]
            types[added["id"]] = gguf_header.CONTROL if added["special"] else gguf_header.USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    ids = tokenizer.encode("a")
    if "ByteLevel" in parts:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(described.get("pre_tokenizer")))
        if merges:
            writer.add_token_merges(merges)
    else:
        ranks = {"".join(pair.split(" ")): -float(rank) for rank, pair in reversed(list(enumerate(merges)))}
        for i, token in enumerate(texts):
            if is_byte_name(token) and types[i] == gguf_header.NORMAL:
                types[i] = gguf_header.BYTE
        if (unknown := model.get("unk_token")) in texts:
            types[texts.index(unknown)] = gguf_header.UNKNOWN
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([ranks.get(token, -1e6 if len(token) > 1 else 0.0) for token in texts])
        first = next((i for i in ids if i != tokenizer.bos_token_id), ids[0])
        writer.add_add_space_prefix(texts[first].startswith("▁"))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    named = {"bos": tokenizer.bos_token_id, "pad": tokenizer.pad_token_id, "unk": tokenizer.unk_token_id}
    named |= dict(zip(("eos", "eot", "eom"), eos_ids, strict=False))
    for role, i in named.items():
        if i is not None and i < rows:
            getattr(writer, f"add_{role}_token_id")(i)
    if templates := tokenizer.chat_template:
        listed = templates.items() if isinstance(templates, dict) else ()
        writer.add_chat_template([{"name": name, "template": each} for name, each in listed] or templates)
    writer.add_string(WHOLE, text)
    writer.add_string(ENDS, " ".join(map(str, eos_ids)) or "none")


def _split(described: dict[str, Any] | None) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits texts into words; that of GPT-2 if it has none."""
    parts = list(flat_parts(described))
    if [part["type"] for part in parts] == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        pattern = [parts[0]["pattern"].get("Regex")]
        return next((name for name, each in SPLITS.items() if each == pattern), "gpt-2")
    return "gpt-2"


if __name__ == "__main__":
    convert_to_gguf(*sys.argv[1:])
