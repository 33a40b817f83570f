"""Makes GGUF files without any package, for tests: random blocks, and models of each family."""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf.gguf_writer import rotate_rows
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.gguf_config import MODEL_TYPES
from slipstream.checkpoints.gguf_weights import names_in_file
from slipstream.checkpoints.weight_blocks import TYPES

_STRING, _ARRAY, _UINT32, _FLOAT32, _BOOL, _INT32, _INT64 = 8, 9, 4, 6, 7, 5, 11

SIZES = {each.name: (each.count, each.nbytes) for each in TYPES.values()}
_SCALES: dict[str, tuple[int, ...]] = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,),
    "MXFP4": (),
}  # fmt: skip
"""Offsets of the float16 numbers in a block. Blocks of other formats have one at offset 0."""

RECORDS = Path(__file__).with_name("gguf_families.json")
RECORDED: dict[str, Any] = json.loads(RECORDS.read_text(encoding="utf-8"))
"""Family -> what `python -m benchmarks.gguf.family_logits --record` keeps: metadata, and names and shapes of tensors
(`*`: every layer), as llama.cpp's own converter wrote them for our tiny checkpoint; values of tensors that are no
weights; and llama.cpp's logits on the file that `write_recorded` writes: the largest, and `recorded_logits`."""
RECORDED_TEXT = [3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7, 9, 3, 23, 8, 4, 6, 27, 19, 30, 2, 29, 13, 14]

VOCAB = 96
SPREAD = {
    "Q8_0": 0.0015, "Q4_K": 5e-4, "Q5_K": 2e-4, "Q6_K": 1e-4, "Q2_K": 0.005, "Q3_K": 0.002, "IQ4_NL": 0.0015,
    "IQ4_XS": 1e-4,
}  # fmt: skip
"""Standard deviation of the float16 numbers of a block, which gives weights of about 0.1."""


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], version: int = 3, alignment: int = 32,
    kinds: Mapping[str, str] | None = None,
) -> bytes:  # fmt: skip
    """Return the bytes of a file. Tensors are float32, or in the format that `kinds` gives: float16, or blocks as uint8
    [..., outs, blocks, bytes of a block]."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    offset, numbers = 0, {each.name: (number, each.count) for number, each in TYPES.items()}
    stored = []
    for name, tensor in tensors.items():
        kind, count = numbers[(kinds or {}).get(name, "F32")]
        plain = "<f2" if (kinds or {}).get(name) == "F16" else "<f4"
        data = tensor.tobytes() if count > 1 else tensor.astype(plain).tobytes()
        shape = (tensor.shape[-2] * count, *tensor.shape[-3::-1]) if count > 1 else tensor.shape[::-1]
        out += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        stored.append(data + bytes(-len(data) % alignment))
        offset += len(stored[-1])
    return out + bytes(-len(out) % alignment) + b"".join(stored)


def tiny_model(**changes: Any) -> bytes:
    """Return a Llama with one layer and no tokenizer. changes: changed metadata; None removes a key."""
    shape = {
        "vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    metadata = {"general.file_type": 0, "llama.vocab_size": 8, "tokenizer.ggml.eos_token_id": None}
    return model_bytes(family_config("llama", tied=True, **shape), **metadata | changes)[0]


def random_bytes(name: str, outs: int, blocks: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Return random blocks, uint8 [outs, blocks, bytes of a block]. scale: standard deviation of their float16
    numbers."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (outs, blocks, SIZES[name][1]), dtype=np.uint8)
    for at in _SCALES.get(name, (0,)):
        numbers = (scale * rng.standard_normal((outs, blocks, 1))).astype(np.float16)
        raw[..., at : at + 2] = numbers.view(np.uint8)
    if name == "MXFP4":
        powers = (104, 144) if scale == 1.0 else (122, 124)  # the range of float16, or weights of about 0.1
        raw[..., 0] = rng.integers(*powers, (outs, blocks))
    return raw


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, bytes):  # encoded already
        return value
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value) if 0 <= value < 2**32 else struct.pack("<Iq", _INT64, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if value and isinstance(value[0], float):
        return struct.pack(f"<IIQ{len(value)}f", _ARRAY, _FLOAT32, len(value), *value)
    if value and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", _ARRAY, _INT32, len(value), *value)
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))


def family_config(family: str, tied: bool = False, **shape: int) -> DecoderConfig:
    """Return a configuration of two layers. Their width is 256, which is divisible by the blocks of all formats, unless
    `shape` says otherwise."""
    common: dict[str, Any] = {
        "model_type": family, "vocab_size": VOCAB, "eos_token_id": [1], "tie_word_embeddings": tied,
    }  # fmt: skip
    if family == "gpt2":
        sizes = {"n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 512}
        return DecoderConfig.from_dict(common | sizes)
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
        | shape
    )  # fmt: skip


def gguf_model(
    folder: Path, config: DecoderConfig, kinds: tuple[str, ...] = ("F32",), **metadata: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a model in which matrices have these formats in turn. Returns (file, canonical weights that are stored as
    floating-point numbers)."""
    data, floats = model_bytes(config, kinds, **metadata)
    (folder / "model.gguf").write_bytes(data)
    return folder / "model.gguf", floats


def model_bytes(
    config: DecoderConfig, kinds: tuple[str, ...] = ("F32",), **metadata: Any
) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return the content of the file of `gguf_model`, and the canonical weights."""
    whole, tensors, stored, floats = model_parts(config, kinds, **metadata)
    return gguf_bytes(whole, tensors, kinds=stored), floats


def byte_characters() -> list[str]:
    """Return the characters that stand for the bytes 0..255 in tokens of byte-level BPE."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in shown else next(rest)) for byte in range(256)]


def byte_level_keys(
    pre: str | None, words: Seq[str] = (), merges: Seq[str] = (), special: Seq[str] = (), rows: int = 300, **ids: str
) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer. ids: text of the token of each role, such as bos="<s>"."""
    tokens = [*byte_characters(), *words, *special]
    types = [1] * (256 + len(words)) + [3] * len(special) + [5] * (rows - len(tokens))
    keys = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(len(tokens), rows)],
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": None,
    }  # fmt: skip
    return keys | {f"tokenizer.ggml.{role}_token_id": tokens.index(text) for role, text in ids.items()}


def model_parts(
    config: DecoderConfig, kinds: tuple[str, ...] = ("F32",), **metadata: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str], dict[str, np.ndarray]]:
    """Return the arguments of `gguf_bytes` for a model (metadata, tensors, formats), and its canonical weights."""
    known = {architecture: model_type for model_type, architecture in MODEL_TYPES.items()} | {"mixtral": "llama"}
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
    whole = {key: value for key, value in whole.items() if value is not None}
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
        tensors[tensor] = join([rotate_rows(config, part, floats[part]) for part in parts])
    return whole, tensors, stored, floats


def recorded_shapes(stored: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a recorded file."""
    layers = range(stored["metadata"][f"{stored['metadata']['general.architecture']}.block_count"])
    return {name.replace("*", str(i)): tuple(shape) for name, shape in stored["tensors"].items() for i in layers}


def write_recorded(stored: Mapping[str, Any], file: Path) -> Path:
    """Write a recorded file, with seeded weights."""
    tensors = {name: seeded_weights(name, shape) for name, shape in recorded_shapes(stored).items()}
    tensors |= {name: np.array(values) for name, values in stored["values"].items()}
    file.write_bytes(gguf_bytes(stored["metadata"] | {"tokenizer.ggml.model": "none"}, tensors))
    return file


def recorded_logits(logits: Any) -> Any:
    """Return the logits [2, 8] that are recorded of all [n, V]."""
    return logits[[11, 23], :: logits.shape[1] // 8]


def seeded_weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random weights that depend on the name of a tensor only, the same with every version of numpy."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("ssm_a"):
        return -np.exp(noise)
    if name.endswith(("norm.weight", "ssm_d", "output_scale.weight")):
        return 1 + 0.2 * noise
    is_vector = sum(size > 1 for size in shape) < 2
    return noise * (0.2 if is_vector else 2 * shape[-1] ** -0.5)
