"""GGUF files made by hand, for tests that need no package, and random blocks for them."""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.models.gguf_header import TYPES

_STRING, _ARRAY, _UINT32, _FLOAT32, _BOOL, _INT32 = 8, 9, 4, 6, 7, 5

SIZES = {name: (count, size) for name, count, size in TYPES.values()}
_SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Bytes at which a block has a float16; 0 in other kinds."""


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    version: int = 3,
    alignment: int = 32,
    kinds: Mapping[str, str] | None = None,
) -> bytes:
    """A file with tensors of float32, or in blocks of `kinds`: uint8 [..., outs, blocks, bytes of a block]."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    offset, numbers = 0, {name: (number, count) for number, (name, count, _) in TYPES.items()}
    stored = []
    for name, tensor in tensors.items():
        kind, count = numbers[(kinds or {}).get(name, "F32")]
        data = tensor.tobytes() if count > 1 else tensor.astype("<f4").tobytes()
        shape = (tensor.shape[-2] * count, *tensor.shape[-3::-1]) if count > 1 else tensor.shape[::-1]
        out += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        stored.append(data + bytes(-len(data) % alignment))
        offset += len(stored[-1])
    return out + bytes(-len(out) % alignment) + b"".join(stored)


def tiny_model(**changes: Any) -> bytes:
    """A Llama of one layer, without a tokenizer. changes: metadata, None to leave one out."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama", "general.file_type": 0, "llama.block_count": 1, "llama.context_length": 64,
        "llama.embedding_length": 32, "llama.feed_forward_length": 32, "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 8,
        "tokenizer.ggml.model": "none",
    }  # fmt: skip
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    shapes = {
        "token_embd.weight": (8, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (16, 32), "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32), "blk.0.ffn_norm.weight": (32,), "blk.0.ffn_gate.weight": (32, 32),
        "blk.0.ffn_up.weight": (32, 32), "blk.0.ffn_down.weight": (32, 32),
    }  # fmt: skip
    drawn = np.random.default_rng(0)
    return gguf_bytes(metadata, {name: drawn.normal(size=shape) * 0.2 for name, shape in shapes.items()})


def random_bytes(name: str, outs: int, blocks: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """uint8 [outs, blocks, bytes of a block]. scale: standard deviation of the float16 numbers in them."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (outs, blocks, SIZES[name][1]), dtype=np.uint8)
    for at in _SCALES.get(name, (0,)):
        numbers = (scale * rng.standard_normal((outs, blocks, 1))).astype(np.float16)
        raw[..., at : at + 2] = numbers.view(np.uint8)
    return raw


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if value and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", _ARRAY, _INT32, len(value), *value)
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
