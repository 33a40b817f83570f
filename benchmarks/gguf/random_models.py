"""Writes GGUF files with the shapes of published models, and random weights in the formats of published files.

A file has the same content as a file of llama.cpp's converter: metadata, names of tensors, and a byte-level tokenizer
that is padded to the size of the vocabulary. Two choices make outputs predictable although kernels round differently:
the embedding of a token is as large as the outputs of all layers together, and the output matrix is the embedding,
moved by one row. So token i + 1 is by far the most likely token after token i, but logits still depend on all layers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.families import FAMILIES
from slipstream.checkpoints.gguf_header import ALIGNMENT, FILE_TYPES, NORMAL, UNUSED
from slipstream.checkpoints.gguf_keys import MAGIC
from slipstream.checkpoints.gguf_weights import names_in_file
from slipstream.checkpoints.recurrence import DELTA
from slipstream.checkpoints.weight_blocks import TYPES

FIRST = 257
"""The first id that is not a byte of text. Prompts of benchmarks consist of ids from here on."""
MIXTURE, MXFP4 = "Q4_K_M", "MXFP4_MOE"
_TYPES = {each.name: (number, each.count, each.nbytes) for number, each in TYPES.items()}
_OTHERWISE = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Formats that llama.cpp uses instead if rows do not divide into 256 columns."""
_SCALES: Mapping[str, tuple[float, ...]] = {
    "Q4_K": (1 / 258, 7.5 / 258), "Q5_K": (1 / 527, 15.5 / 527), "Q6_K": (1 / 1365,), "Q8_0": (1 / 73.9,),
    "Q5_0": (1 / 9.23,), "Q5_1": (1 / 9.23, -15.5 / 9.23),
}  # fmt: skip
"""The float16 numbers of a block of random integers, so that its weights have a mean of 0 and a standard deviation of
1."""
_PLAIN = ("conv1d", "conv.weight", "ffn_gate_inp", "ssm_alpha", "ssm_beta", "rope_factors")
"""Parts of the names of matrices that are float32 in published files."""


@dataclass(frozen=True)
class Shape:
    """The shape of a published model.

    config   its config.json.  keys: metadata of its architecture that `_metadata` does not derive.
    layers   number of layers of the published model, if the file has fewer.
    fused    names of tensors, without their layer, that contain several of our tensors.
    factors  names of the tensors with divisors of rotary frequencies, and the value of all divisors.
    """

    config: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)
    mixture: str = MIXTURE
    layers: int = 0
    fused: tuple[str, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)

    @property
    def decoder(self) -> DecoderConfig:
        return DecoderConfig.from_dict({"max_position_embeddings": 8192, "tie_word_embeddings": False, **self.config})


_QWEN35 = {
    "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "rope_theta": 1e7,
}  # fmt: skip
_SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0], "rope.dimension_count": 64, "full_attention_interval": 4}

SHAPES: dict[str, Shape] = {
    "Qwen3.5-0.8B": Shape(_QWEN35 | {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
    }, _SECTIONS),
    "LFM2-1.2B": Shape({
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 12288,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1e6,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    }),
    "Gemma-3-1B": Shape({
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 512, "rope_theta": 1e6,
    }, {"attention.sliding_window": 512}),
    "SmolLM3-3B": Shape({
        "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "rope_theta": 5e6,
    }, {"rope.dimension_count": 128}),
    "Phi-4-mini": Shape({
        "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096, "max_position_embeddings": 131072, "rope_theta": 1e4,
        "sliding_window": 262144,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    }, {"rope.dimension_count": 96, "rope.scaling.original_context_length": 4096, "context_length": 131072,
        "rope.scaling.attn_factor": 1.19, "attention.sliding_window": 262144}, fused=("attn_qkv",),
        factors={"rope_factors_short": 1.0, "rope_factors_long": 2.0}),
    "Qwen3.5-4B": Shape(_QWEN35 | {
        "model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32,
    }, _SECTIONS),
    "gpt-oss-20b": Shape({
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 1.5e5,
    }, {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
        "attention.sliding_window": 128}, MXFP4, 24),
    "Qwen3-30B-A3B": Shape({
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "rope_theta": 1e6,
    }, layers=48),
    "Qwen3.6-35B-A3B": Shape(_QWEN35 | {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }, _SECTIONS, layers=40),
}  # fmt: skip
"""Published models, smallest first. Mixtures of experts have a quarter of their layers or fewer."""
TINY = Shape({
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
})  # fmt: skip
"""A model for tests."""


def write_random_model(shape: Shape, file: Path, seed: int = 0) -> None:
    """Write a file of this shape. An interrupted call leaves no file."""
    config, part = shape.decoder, file.with_name(file.name + ".part")
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(shape, config))
    rng, kept = np.random.default_rng(seed), np.empty(0, np.uint8)
    with part.open("wb") as out:
        metadata = _metadata(shape, config)
        out.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            out.write(_text(key) + _value(value))
        offset = 0
        for name, (kind, dims) in tensors.items():
            number, count, nbytes = _TYPES[kind]
            out.write(_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims[::-1], number, offset))
            offset += _padded(math.prod(dims) // count * nbytes)
        _pad(out)
        for name, (kind, dims) in tensors.items():
            if name == "output.weight":
                data = np.roll(kept, 1, axis=0)
            else:
                data = _random_values(shape, config, name, kind, dims, rng)
            if name == "token_embd.weight":
                kept = data
            out.write(data)
            _pad(out)
    part.replace(file)


def _metadata(shape: Shape, config: DecoderConfig) -> dict[str, Any]:
    name = FAMILIES[config.model_type].gguf
    keys: dict[str, Any] = {
        "block_count": config.layers, "context_length": config.context, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": float(shape.config.get("rope_theta", 1e4)), "vocab_size": config.vocab_size,
    }  # fmt: skip
    if config.experts is not None:
        keys |= {"expert_count": config.experts.count, "expert_used_count": config.experts.per_token}
        keys["expert_feed_forward_length"] = config.experts.intermediate_size
        if config.experts.shared:
            keys["expert_shared_feed_forward_length"] = config.experts.shared
    parts = [layer.recurrence for layer in config.described]
    recurrent = next((part for part in parts if part is not None), None)
    if recurrent is not None and recurrent.kind == DELTA:
        keys |= {
            "ssm.conv_kernel": recurrent.taps, "ssm.state_size": recurrent.key, "ssm.group_count": recurrent.groups,
            "ssm.time_step_rank": recurrent.heads, "ssm.inner_size": recurrent.heads * recurrent.value,
        }  # fmt: skip
    elif recurrent is not None:
        keys["shortconv.l_cache"] = recurrent.taps
        keys["attention.head_count_kv"] = [0 if part is not None else config.kv_heads for part in parts]
    numbers = {each: number for number, each in FILE_TYPES.items()}
    whole = {"general.architecture": name, "general.type": "model", "general.name": "random weights"}
    whole |= {"general.file_type": numbers[shape.mixture], "general.quantization_version": 2}
    whole |= {f"{name}.{key}": value for key, value in (keys | dict(shape.keys)).items()}
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    tokens = [chr(byte if byte in visible else next(rest)) for byte in range(256)]
    tokens += ["ab", *(f"[PAD{i}]" for i in range(FIRST, config.vocab_size))]
    return whole | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * FIRST + [UNUSED] * (config.vocab_size - FIRST),
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


def _tensors(shape: Shape, config: DecoderConfig) -> Iterable[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Return the names of the file's tensors, with their formats and dimensions."""
    shapes = config.shapes()
    for name in shape.factors:
        yield f"{name}.weight", ("F32", (len(shape.config["rope_scaling"]["short_factor"]),))
    fused = {f"blk.{i}.{name}.weight" for name in shape.fused for i in range(config.layers)}
    for name, parts in names_in_file(config, fused).items():
        outs, columns = sum(shapes[part][0] for part in parts), shapes[parts[0]][1:]
        dims = (outs, *(size for size in columns if size > 1))
        if "_exps" in name and config.experts is not None:
            dims = (config.experts.count, outs // config.experts.count, *dims[1:])
        yield name, (kind_of(name, dims, config.layers, shape.mixture), dims)


def kind_of(name: str, dims: tuple[int, ...], layers: int, mixture: str) -> str:
    """Return the format in which llama.cpp stores a tensor, in a mixture of formats such as Q4_K_M."""
    if len(dims) == 1 or name.endswith(".bias") or any(part in name for part in _PLAIN):
        return "F32"
    if mixture == MXFP4:
        return "MXFP4" if "_exps" in name else "Q8_0"
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    first, last = layers // 8, 7 * layers // 8
    more = layer < first or layer >= last or (layer - first) % 3 == 2
    kind = "Q4_K"
    if "attn_qkv" in name:
        kind = "Q5_K"
    elif name in ("token_embd.weight", "output.weight") or (more and ("attn_v" in name or "ffn_down" in name)):
        kind = "Q6_K"
    return kind if dims[-1] % 256 == 0 else _OTHERWISE[kind]


def _random_values(
    shape: Shape, config: DecoderConfig, name: str, kind: str, dims: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Return the random bytes of a tensor. Outputs of a matrix are as large as its inputs."""
    stem = name.removesuffix(".weight")
    if name == "token_embd.weight":
        size = math.sqrt(2 * config.layers) / config.embedding_scale
    else:
        size = dims[-1] ** -0.5
    if kind != "F32":
        return random_blocks(kind, math.prod(dims[:-1]), dims[-1], rng, size)
    if stem in shape.factors:
        values = np.full(dims, shape.factors[stem])
    elif name.endswith("ssm_a"):
        values = -rng.uniform(0.05, 1.0, dims)
    elif "norm" in name:
        values = rng.normal(2.0 if stem.endswith(("q_norm", "k_norm")) else 1.0, 0.1, dims)
    else:
        values = rng.normal(0.0, size if len(dims) > 1 else 0.1, dims)
    return values.astype("<f4")


def random_blocks(kind: str, outs: int, columns: int, rng: np.random.Generator, size: float) -> np.ndarray:
    """Return random weights [outs, blocks, bytes of a block] with a mean of about 0. size: standard deviation of the
    weights."""
    _, count, nbytes = _TYPES[kind]
    raw = np.frombuffer(rng.bytes(outs * columns // count * nbytes), np.uint8).reshape(outs, columns // count, nbytes)
    raw = raw.copy()
    if kind == "MXFP4":
        raw[..., 0] = 127 + round(math.log2(size / 2.93))
    elif kind == "Q6_K":
        raw[..., 208:210] = np.array([size * _SCALES[kind][0]], np.float16).view(np.uint8)
    else:
        halves = (size * np.array(_SCALES[kind])).astype(np.float16)
        raw[..., : 2 * len(halves)] = halves.view(np.uint8)
    return raw


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(out: BinaryIO) -> None:
    out.write(bytes(_padded(out.tell()) - out.tell()))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Encode a metadata value with its type. Lists contain integers or strings."""
    if isinstance(value, list):
        if isinstance(value[0], int):  # llama.cpp reads no other lists of numbers
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    number, layout = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}[type(value)]
    return struct.pack(f"<I{layout}", number, value)
