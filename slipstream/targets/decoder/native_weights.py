"""The weights of a decoder as our own kernels read them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.int8 import quantise_rows
from slipstream.targets.decoder.weights import Weights

if TYPE_CHECKING:
    from slipstream.kernels.decoder import Model
    from slipstream.kernels.linear import Matrix

LONGEST_ROW = 8192
"""Columns of a matrix up to which 12 bits or more are left for a row that meets int8."""


def suits(config: DecoderConfig, quantize: str | None = None) -> bool:
    """Whether the kernels compute such a decoder, and Numba is there to compile them."""
    columns = (config.hidden_size, config.heads * config.head_dim, config.intermediate_size)
    return (
        (config.norm, config.activation, config.position) == ("rms", "silu", "rope")
        and config.gated
        and config.experts is None
        and config.head_dim % 16 == 0
        and (quantize is None or all(n % 32 == 0 and n <= LONGEST_ROW for n in columns))
        and importlib.util.find_spec("numba") is not None
    )


def matrix_values(config: DecoderConfig) -> int:
    """How many weights a pass reads."""
    unread = set() if config.tie_embeddings else {"embed_tokens.weight"}  # of which only rows are
    return sum(math.prod(shape) for name, shape in config.shapes().items() if len(shape) == 2 and name not in unread)


def _bits(dtype: torch.dtype) -> Callable[[Tensor], np.ndarray]:
    """From float32 weights to what the kernels take: 16 bits for what the checkpoint keeps in 16, which is exact."""
    if dtype == torch.float16:
        return lambda t: t.half().view(torch.int16).numpy()
    if dtype == torch.bfloat16:
        return lambda t: t.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return lambda t: t.numpy()


def model_of(config: DecoderConfig, weights: Weights, quantize: str | None) -> Model:
    """Read every tensor once, and keep it as narrow as it came, or matrices in int8."""
    from slipstream.kernels import linear
    from slipstream.kernels.decoder import Model

    parts = {
        "qkv": [f"self_attn.{p}_proj" for p in "qkv"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    names = [f"layers.{i}.{part}.weight" for i in range(config.layers) for group in parts.values() for part in group]
    kinds = {weights.stored_dtype(name) for name in (*names, weights.head, "embed_tokens.weight")}
    bits = _bits(kinds.pop() if len(kinds) == 1 else torch.float32)

    def joined(group: list[str]) -> Tensor:
        """The tensors of these names, one below the other."""
        tensors = [weights[name].float() for name in group]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def bias(groups: list[list[str]]) -> np.ndarray:
        names = [[name.removesuffix("weight") + "bias" for name in group] for group in groups]
        if names[0][0] not in weights:
            return linear.NONE
        values = np.stack([joined(group).numpy() for group in names])
        return np.pad(values, ((0, 0), (0, linear.padded(values.shape[1]) - values.shape[1])))

    def matrix(groups: list[list[str]]) -> Matrix:
        """groups: of each layer, what is one matrix there."""
        if quantize:
            made = [quantise_rows(joined(group)) for group in groups]
            scales = np.stack([s.numpy()[:, 0] for _, s in made])
            return linear.whole(np.stack([v.numpy() for v, _ in made]), scales, bias(groups))
        first = linear.panels(bits(joined(groups[0])))
        values = np.empty((len(groups), *first.shape), first.dtype)  # filled layer by layer: never in memory twice
        values[0] = first
        for i, group in enumerate(groups[1:], start=1):
            values[i] = linear.panels(bits(joined(group)))
        return linear.Matrix(values, linear.NONE, 0, bias(groups))

    def layered(group: str) -> Matrix:
        return matrix([[f"layers.{i}.{part}.weight" for part in parts[group]] for i in range(config.layers)])

    def vector(name: str) -> np.ndarray:
        return weights[name].float().numpy()

    norms = [
        f"layers.{i}.{n}.weight" for i in range(config.layers) for n in ("input_layernorm", "post_attention_layernorm")
    ]
    head_norms = [
        f"layers.{i}.self_attn.{n}_norm.weight" for i in range(config.layers if config.qk_norm else 0) for n in "qk"
    ]
    inv_freq, turn_scale = config.rope()
    head = matrix([[weights.head]])
    tied = weights.head == "embed_tokens.weight" and not quantize
    return Model(
        embed=head.values[0] if tied else linear.panels(bits(weights["embed_tokens.weight"].float())),
        norms=np.stack([vector(name) for name in (*norms, "norm.weight")]),
        inv_freq=inv_freq.numpy().astype(np.float64),
        turn_scale=float(turn_scale),
        eps=np.float32(config.norm_eps),
        heads=config.heads,
        windows=np.array([window or 0 for window in config.windows]),
        head_norms=np.stack([vector(name) for name in head_norms]) if head_norms else linear.NONE,
        qkv=layered("qkv"),
        o=layered("o"),
        gate_up=layered("gate_up"),
        down=layered("down"),
        head=head,
    )


def nbytes(model: Model) -> int:
    """Of everything that a pass reads."""
    matrices = (model.qkv, model.o, model.gate_up, model.down, model.head)
    return model.norms.nbytes + sum(each.values.nbytes + each.scale.nbytes for each in matrices)
