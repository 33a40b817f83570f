"""The tensors of a GGUF file for our decoder.

Blocks of integers keep their stored format (`Blocks`). Other tensors are read as float32 or in their stored dtype. The
file is mapped into memory, and a tensor is read when it is accessed.
"""

import math
import re
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.checkpoints.checkpoint import few
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.families import FAMILIES
from slipstream.checkpoints.gguf_config import DIVISORS, LONG, SHORT, in_blocks, read_tensor
from slipstream.checkpoints.gguf_header import GgufHeader, GgufTensor
from slipstream.checkpoints.head_rows import groups_of, rows_in_gguf
from slipstream.checkpoints.weight_blocks import FLOATS, READERS, Blocks
from slipstream.errors import CheckpointError, reading

_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks", "self_attn.gate_proj": "attn_gate", "attention_out_norm": "post_attention_norm",
    "mlp_out_norm": "post_ffw_norm", "mlp.gate_correction": "exp_probs_b",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "embed_tokens": "token_embd", "embed_positions": "position_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(gate|up|down)_proj")
"""Parts of single experts. In GGUF files, all experts of a layer are one tensor [experts, out, in]."""

_OF_HEADS = ("self_attn.k_up_proj.weight", "self_attn.v_up_proj.weight")
"""Tensors that contain the matrices of all heads, [heads, out, in]."""

_MTP = {
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "norm": "nextn.shared_head_norm",
}  # fmt: skip
_COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")
"""Tensors of an MTP layer that are copies of the decoder's embedding and output head. They are not read."""

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, each) for name, each in FLOATS.items()}


class GgufTensors:
    """The tensors of a GGUF file under canonical names. Raises CheckpointError for missing or unknown tensors and wrong
    shapes.

    quantised  format of the weights in a quantised file, such as "Q4_K_M".
    readers    the functions that read tensors, in the form that `Weights` needs.
    """

    def __init__(self, header: GgufHeader, config: DecoderConfig):
        self._header = header
        self.quantised = header.file_type if in_blocks(header) else None
        self._stored: dict[str, tuple[GgufTensor, Callable[[np.ndarray], np.ndarray]]] = {}
        by_name = {tensor.name: tensor for tensor in header.tensors}
        if FAMILIES[config.model_type].further:
            mtp = [f"blk.{i}." for i in range(config.after or config.layers, header.size("block_count"))]
            mtp = [at for at in mtp if any(name.startswith(f"{at}nextn.") for name in by_name)]
            copies = tuple(f"{at}{part}.weight" for at in mtp for part in _COPIES)
            by_name = {
                name: tensor
                for name, tensor in by_name.items()
                if name.startswith(tuple(mtp)) == bool(config.after) and name not in copies
            }
        for name in (DIVISORS, SHORT, LONG) if header.architecture != "qwen2" else ():
            by_name.pop(name, None)  # already in the configuration
        for number, layer in enumerate(config.described):
            for part in ("attn_k", "attn_v", "attn_k_norm") if layer.shared is not None else ():
                by_name.pop(f"blk.{number}.{part}.weight", None)  # unused: the layer reads another layer's KV
        self._shapes, lost = config.shapes(), []
        self.readers: dict[str, tuple[str, Callable[[slice], Tensor]]] = {}
        for name, parts in names_in_file(config, by_name.keys()).items():
            tensor = by_name.pop(name, None)
            if tensor is None:
                if name.endswith(".bias") and config.model_type != "gpt2":  # a missing bias is zero, as in llama.cpp
                    for part in parts:
                        none = torch.zeros(self._shapes[part])
                        self.readers[part] = (f"no {name} in {header.path.name}", none.__getitem__)
                else:
                    lost.append(name)
                continue
            first, outs = 0, sum(self._shapes[part][0] for part in parts)
            for part in parts:
                self._stored[part] = tensor, _rows(config, part, first, self._shapes[part], outs)
                first += self._shapes[part][0]
            expected: tuple[int, ...] = (first, *self._shapes[parts[0]][1:])
            if ".experts." in parts[0] and config.experts is not None:
                expected = (config.experts.count, first // config.experts.count, *expected[1:])
            if parts[0].endswith(_OF_HEADS):
                expected = (config.heads, first // config.heads, *expected[1:])
            if _plain(tensor.shape, expected) != _plain(expected, expected):
                raise CheckpointError(
                    f"tensor {name!r} of {header.path.name} has the shape {tensor.shape}, but {expected} is expected",
                    why="weights and metadata belong to different models",
                    fix="convert the model again",
                )
        if lost or by_name:
            unknown = f"holds {few(sorted(by_name))}, which its metadata do not describe"
            raise CheckpointError(
                f"{header.path.name} {f'lacks {few(lost)}' if lost else unknown}",
                why="the file and the model that its metadata describe do not match",
                fix="convert the model again",
            )
        self.readers |= {
            name: (f"{tensor.name} in {header.path.name}", partial(self._rows, name))
            for name, (tensor, _) in self._stored.items()
        }

    def blocks(self, name: str, rows: slice = slice(None)) -> Blocks | None:
        """Return rows of a matrix as stored blocks; None if the matrix is stored as floating-point numbers."""
        tensor, rows_of = self._stored[name]
        if tensor.type not in READERS:
            return None
        raw = rows_of(read_tensor(self._header, tensor))[rows]
        what = f"tensor {tensor.name!r} of {self._header.path.name} cannot be read as {tensor.type}"
        with reading(what, "convert the model again, or give the folder of the checkpoint", CheckpointError):
            return READERS[tensor.type](raw)

    def _rows(self, name: str, rows: slice) -> Tensor:
        blocks = self.blocks(name, rows)
        if blocks is not None:
            return torch.from_numpy(blocks.floats())
        tensor, rows_of = self._stored[name]
        raw = rows_of(read_tensor(self._header, tensor)).reshape(*self._shapes[name], -1)[rows]
        kind = np.float32 if tensor.type == "F32" else np.int16
        values = torch.from_numpy(np.ascontiguousarray(raw).view(kind)[..., 0].copy()).view(_DTYPES[tensor.type])
        return values.double().neg().log() if name.endswith(".A_log") else values


def names_in_file(config: DecoderConfig, held: Container[str] = ()) -> dict[str, list[str]]:
    """Return for each tensor name in the file the canonical names in it, in order. held: names that the file has."""
    names: dict[str, list[str]] = {}
    family, shapes = FAMILIES[config.model_type], config.shapes()
    parts = _PARTS | dict(family.gguf_names)
    if config.after:
        parts |= {part: f"blk.{config.after}.{stored}" for part, stored in _MTP.items()}
    for name in shapes:
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("layers."):
            names[f"{parts[stem]}.{kind}"] = [name]
            continue
        _, number, part = stem.split(".", 2)
        layer = config.after + int(number)
        if (whole := _find_fused(config, part)) is not None:
            each = [f"layers.{number}.{one}.{kind}" for one in family.fused[whole]]
            names[f"blk.{layer}.{parts[whole]}.{kind}"] = [one for one in each if one in shapes]
            continue
        if f"{part}.{kind}" in parts:  # a tensor that belongs to no linear layer, such as ssm_a
            names[f"blk.{layer}.{parts[f'{part}.{kind}']}"] = [name]
            continue
        expert = _EXPERT.fullmatch(part)
        stored = f"ffn_{expert[1]}_exps" if expert else parts[part]
        if stored in ("ffn_gate_exps", "ffn_up_exps") and f"blk.{layer}.ffn_gate_up_exps.{kind}" in held:
            stored = "ffn_gate_up_exps"
        fused = config.model_type == "gpt2" or f"blk.{layer}.attn_qkv.{kind}" in held
        if stored in ("attn_q", "attn_k", "attn_v") and fused:
            stored = "attn_qkv"
        if stored == "ffn_gate" and held and f"blk.{layer}.ffn_gate.weight" not in held:
            stored = "ffn_up"  # one tensor with gate rows, then up rows
        names.setdefault(f"blk.{layer}.{stored}.{kind}", []).append(name)
    return names


def _find_fused(config: DecoderConfig, part: str) -> str | None:
    """Return the fused tensor (a key of `Family.fused`) that contains this part in GGUF files, or None."""
    family = FAMILIES[config.model_type]
    return next((name for name, parts in family.fused.items() if part in parts and name in family.gguf_names), None)


def _plain(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without dimensions of 1. If a vector is wanted, return its length as the only dimension, because
    llama.cpp stores some vectors as matrices."""
    return (math.prod(shape),) if len(wanted) == 1 else tuple(size for size in shape if size > 1)


def _rows(
    config: DecoderConfig, name: str, first: int, shape: tuple[int, ...], outs: int
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that cuts a canonical tensor, from row `first` on, out of a stored tensor with `outs` rows."""
    order = rows_in_gguf(config, name)
    chosen: Any = slice(first, first + shape[0]) if order is None else order + first
    fused = _find_fused(config, name.rpartition(".")[0].split(".", 2)[-1])
    if fused is not None and (groups := groups_of(config, fused)) > 1:
        order = np.arange(outs).reshape(groups, -1)
        chosen = order[:, first // groups : (first + shape[0]) // groups].ravel()
    if len(shape) == 1 and ".experts." in name:
        return lambda raw: raw[first // shape[0] :][:1]  # a stored bias has one row for each expert
    if len(shape) == 1:
        return lambda raw: raw.reshape(1, -1, raw.shape[-1])[:, chosen]
    return lambda raw: raw[chosen]
