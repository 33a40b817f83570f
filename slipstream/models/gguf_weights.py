"""GGUF files for our decoder: `gguf_config` reads the architecture from the header, `GgufWeights` the weights.

Blocks of integers stay what they are in the file (`Blocks`); everything else is read as float32 or as its dtype. The
file is mapped, and each tensor is read when it is asked for.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.models.checkpoint import few
from slipstream.models.config import DecoderConfig
from slipstream.models.gguf_header import GgufHeader, GgufTensor, gguf_shape
from slipstream.models.weight_blocks import FLOATS, READERS, TYPES, Blocks
from slipstream.models.weights import Progress, Weights

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gpt2": "gpt2"}
"""`general.architecture` of the families that our decoder runs -> `model_type`. Mistral is "llama", and so is Mixtral,
which has experts."""

_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(gate|up|down)_proj")
"""All experts of a layer are one tensor [experts, out, in]."""
_TOP = {"embed_tokens": "token_embd", "embed_positions": "position_embd", "norm": "output_norm", "lm_head": "output"}

_SIZES = {each.name: (each.count, each.nbytes) for each in TYPES.values()}
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, each) for name, each in FLOATS.items()}


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


def gguf_config(header: GgufHeader) -> DecoderConfig:
    """The architecture of a GGUF file. Raises UnsupportedModelError for one that `refusal` refuses, and what
    `gguf_shape` and `DecoderConfig.from_dict` raise."""
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
        return DecoderConfig.from_dict(
            config | {
                "n_embd": shape.hidden_size, "n_head": shape.heads, "n_layer": shape.layers,
                "n_positions": shape.context, "n_inner": header.setting("feed_forward_length"),
                "layer_norm_epsilon": header.setting("attention.layer_norm_epsilon", 1e-5),
            }
        )  # fmt: skip
    if shape.experts:
        config |= {"model_type": "mixtral" if family == "llama" else family, "norm_topk_prob": True}
        config |= {"num_local_experts": shape.experts.count, "num_experts_per_tok": shape.experts.per_token}
        config["moe_intermediate_size"] = header.setting("expert_feed_forward_length")
    rope, tensors = dict(shape.rope_parameters), {tensor.name: tensor for tensor in header.tensors}
    if divisors := tensors.get("rope_freqs.weight"):  # what divides each frequency (Llama 3.1)
        rope |= {"rope_type": "divided", "divisors": _read(header, divisors).view(np.float32).ravel().tolist()}
    return DecoderConfig.from_dict(
        config | {
            "hidden_size": shape.hidden_size, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
            "num_hidden_layers": shape.layers, "head_dim": shape.head_dim, "max_position_embeddings": shape.context,
            "intermediate_size": header.setting("feed_forward_length"),
            "rms_norm_eps": header.setting("attention.layer_norm_rms_epsilon", 1e-5),
            "attention_bias": "blk.0.attn_q.bias" in tensors, "rope_parameters": rope, "sliding_window": None,
            "pard_token": header.setting("pard_token"),
        }
    )  # fmt: skip


def _read(header: GgufHeader, tensor: GgufTensor) -> np.ndarray:
    """The bytes of a tensor [outs, blocks, bytes of a block], mapped from the file."""
    count, size = _SIZES[tensor.type]
    outs, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]  # all experts are one matrix
    if columns % count:
        raise CheckpointError(
            f"tensor {tensor.name!r} has rows of {columns} numbers, which do not divide into blocks of {count}",
            why=f"{tensor.type} stores {count} numbers in a block",
            fix="convert the model again",
        )
    shape = (outs, columns // count, size)
    return np.memmap(header.path, np.uint8, "r", header.weights_at + tensor.offset, shape)


class GgufWeights(Weights):
    """The weights of a GGUF file under canonical names. Raises CheckpointError for tensors that are missing, unknown or
    of the wrong shape."""

    def __init__(
        self,
        header: GgufHeader,
        config: DecoderConfig,
        dtype: torch.dtype = torch.float32,
        progress: Progress | None = None,
    ):
        self._header = header
        self._stored: dict[str, tuple[GgufTensor, Callable[[np.ndarray], np.ndarray]]] = {}
        by_name = {tensor.name: tensor for tensor in header.tensors if tensor.name != "rope_freqs.weight"}
        shapes, lost = config.shapes(), []
        for name, parts in names_in_file(config).items():
            tensor = by_name.pop(name, None)
            if tensor is None:
                lost.append(name)
                continue
            first = 0
            for part in parts:
                self._stored[part] = tensor, _rows(config, part, first, shapes[part])
                first += shapes[part][0]
            expected: tuple[int, ...] = (first, *shapes[parts[0]][1:])
            if ".experts." in parts[0]:
                expected = (len(parts), *shapes[parts[0]])
            if tensor.shape != expected:
                raise CheckpointError(
                    f"tensor {name!r} of {header.path.name} has the shape {tensor.shape}, expected is {expected}",
                    why="weights and metadata belong to different models",
                    fix="convert the model again",
                )
        if lost or by_name:
            unknown = f"holds {few(sorted(by_name))}, which its metadata do not account for"
            raise CheckpointError(
                f"{header.path.name} {f'lacks {few(lost)}' if lost else unknown}",
                why="another model would run than the one that was converted",
                fix="convert the model again",
            )
        readers = {
            name: (f"{tensor.name} in {header.path.name}", partial(self._rows, name))
            for name, (tensor, _) in self._stored.items()
        }
        super().__init__(readers, config, dtype, progress)

    @property
    def quantised(self) -> str | None:
        return self._header.file_type if in_blocks(self._header) else None

    def blocks(self, name: str, rows: slice = slice(None)) -> Blocks | None:
        """Rows of a matrix as they are stored; None if it is stored as floating-point numbers."""
        tensor, rows_of = self._stored[name]
        if tensor.type not in READERS:
            return None
        return READERS[tensor.type](rows_of(_read(self._header, tensor))[rows])

    def stored_dtype(self, name: str) -> torch.dtype:
        return _DTYPES.get(self._stored[name][0].type, torch.float32)

    def _rows(self, name: str, rows: slice) -> Tensor:
        blocks = self.blocks(name, rows)
        if blocks is not None:
            return torch.from_numpy(blocks.floats())
        tensor, rows_of = self._stored[name]
        shape = self.shapes[name]
        raw = rows_of(_read(self._header, tensor)).reshape(*shape, -1)[rows]
        kind = np.float32 if tensor.type == "F32" else np.int16
        return torch.from_numpy(np.ascontiguousarray(raw).view(kind)[..., 0].copy()).view(_DTYPES[tensor.type])


def names_in_file(config: DecoderConfig) -> dict[str, list[str]]:
    """Name in the file -> canonical names of the tensors in it, one after another."""
    names: dict[str, list[str]] = {}
    for name in config.shapes():
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("layers."):
            names[f"{_TOP[stem]}.{kind}"] = [name]
            continue
        _, layer, part = stem.split(".", 2)
        expert = _EXPERT.fullmatch(part)
        stored = f"ffn_{expert[1]}_exps" if expert else _PARTS[part]
        if config.model_type == "gpt2" and stored in ("attn_q", "attn_k", "attn_v"):
            stored = "attn_qkv"
        names.setdefault(f"blk.{layer}.{stored}.{kind}", []).append(name)
    return names


def rotated(config: DecoderConfig, name: str, values: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection in the order of llama.cpp's rotary embedding for Llama: it rotates element 2i
    of a head with 2i + 1, the checkpoint has i and i + D/2."""
    heads = config.heads if ".q_proj." in name else config.kv_heads if ".k_proj." in name else 0
    if config.model_type not in ("llama", "mistral", "mixtral") or not heads:
        return values
    halves = values.reshape(heads, 2, config.head_dim // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def _rows(config: DecoderConfig, name: str, first: int, shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """How the rows of a canonical tensor are taken from one of the file, where they begin at row `first`."""
    rows = np.arange(shape[0])
    stored = rotated(config, name, rows)
    chosen = slice(first, first + shape[0]) if stored is rows else np.argsort(stored) + first
    if len(shape) == 1:
        return lambda raw: raw[:, chosen]
    return lambda raw: raw[chosen]
