"""Weights as our own kernels read them: of decoders, and of the heads that draft for them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import UnsupportedModelError
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.executor import ONE_THREAD_BYTES
from slipstream.targets.decoder.int8 import quantise_rows
from slipstream.targets.decoder.weights import Weights

if TYPE_CHECKING:
    from slipstream.kernels.layer import Model
    from slipstream.kernels.linear import Matrix

LONGEST_ROW = 8192
"""Columns of a matrix up to which 12 bits or more are left for a row that meets int8."""

Bits = Callable[[Tensor], np.ndarray]
"""From float32 weights to what the kernels take."""

INPUTS = {
    "qkv": [f"self_attn.{p}_proj" for p in "qkv"],
    "o": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}
"""What is one matrix to the kernels, by the names of a layer's own."""


def suits(config: DecoderConfig, quantize: str | None = None) -> bool:
    """Whether the kernels compute such a decoder, and Numba is there to compile them."""
    columns = (config.hidden_size, config.heads * config.head_dim, config.intermediate_size)
    return (
        (config.norm, config.activation, config.position) == ("rms", "silu", "rope")
        and config.gated
        and config.experts is None
        and config.head_dim % 16 == 0
        and (quantize is None or all(roundable(n) for n in columns))
        and importlib.util.find_spec("numba") is not None
    )


def check_suits(config: DecoderConfig, quantize: str | None = None) -> None:
    """Raise UnsupportedModelError for decoders that the kernels do not compute, or where Numba is missing."""
    if not suits(config, quantize):
        raise UnsupportedModelError(
            f"the native executor does not run {config.model_type} models of this kind",
            why="it knows RMS norms, rotary positions and gated MLPs with silu, no experts, and needs Numba",
            fix="leave executor at 'auto'",
        )


def leads_in_int8(values: int) -> bool:
    """Whether our kernels are the quickest for so many int8 weights: everywhere in small models, which are made of
    operators more than of arithmetic, and in all where the processor has no sums of 8-bit products, which OpenVINO's
    kernels live by (measured: 0.5 to 0.9 of its time without, 0.9 to 1.6 with)."""
    return values < ONE_THREAD_BYTES or not sums_of_bytes()


def sums_of_bytes() -> bool:
    """Whether this processor has one instruction for them (VNNI, or what ARM calls dot products)."""
    from llvmlite.binding import get_host_cpu_features

    return any(get_host_cpu_features().get(name) for name in ("avx512vnni", "avxvnni", "dotprod"))


def roundable(columns: int) -> bool:
    """Whether a matrix of so many columns can be int8."""
    return columns % 32 == 0 and columns <= LONGEST_ROW


def matrix_values(config: DecoderConfig) -> int:
    """How many weights a pass reads."""
    unread = set() if config.tie_embeddings else {"embed_tokens.weight"}  # of which only rows are
    return sum(math.prod(shape) for name, shape in config.shapes().items() if len(shape) == 2 and name not in unread)


def bits_of(dtype: torch.dtype) -> Bits:
    """16 bits for what has no more, which is exact; of any other dtype float32."""
    if dtype == torch.float16:
        return lambda t: t.half().view(torch.int16).numpy()
    if dtype == torch.bfloat16:
        return lambda t: t.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return lambda t: t.float().numpy()


def narrowest(tensors: Iterable[Tensor]) -> Bits:
    """What keeps all of these exactly, in as few bits as it takes."""
    left = [torch.float16, torch.bfloat16]
    for tensor in tensors:
        left = [dtype for dtype in left if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)]
    return bits_of(left[0] if left else torch.float32)


def matrix(layers: Iterable[Tensor], count: int, bits: Bits | None, biases: Seq[Tensor] = ()) -> Matrix:
    """layers: [out, in] of each, `count` in all; biases: [out] of each, if there are any. bits None: int8."""
    from slipstream.kernels import linear

    bias = torch.stack(list(biases)).float().numpy() if biases else linear.NONE
    if bits is not None:
        return linear.exact((bits(each) for each in layers), count, bias)
    made = [quantise_rows(each.float()) for each in layers]
    scale = np.stack([s.numpy()[:, 0] for _, s in made])
    return linear.rounded(np.stack([v.numpy() for v, _ in made]), scale, bias)


def model_of(config: DecoderConfig, weights: Weights, quantize: str | None) -> Model:
    """Read every tensor once, and keep it as narrow as it came, or matrices in int8."""
    from slipstream.kernels import linear
    from slipstream.kernels.layer import Model

    names = [f"layers.{i}.{n}.weight" for i in range(config.layers) for group in INPUTS.values() for n in group]
    kinds = {weights.stored_dtype(name) for name in (*names, weights.head, "embed_tokens.weight")}
    floats = bits_of(kinds.pop() if len(kinds) == 1 else torch.float32)
    bits = None if quantize else floats

    def joined(group: str, layer: int, kind: str) -> Tensor:
        """What is one matrix, or its bias, in a layer."""
        return torch.cat([weights[f"layers.{layer}.{name}.{kind}"].float() for name in INPUTS[group]])

    def layered(group: str) -> Matrix:
        every = range(config.layers)
        biased = f"layers.0.{INPUTS[group][0]}.bias" in weights
        biases = [joined(group, i, "bias") for i in every] if biased else []
        return matrix((joined(group, i, "weight") for i in every), config.layers, bits, biases)

    def vector(name: str) -> np.ndarray:
        return weights[name].float().numpy()

    norms = [
        f"layers.{i}.{n}.weight" for i in range(config.layers) for n in ("input_layernorm", "post_attention_layernorm")
    ]
    head_norms = [
        f"layers.{i}.self_attn.{n}_norm.weight" for i in range(config.layers if config.qk_norm else 0) for n in "qk"
    ]
    inv_freq, turn_scale = config.rope()
    head = matrix([weights[weights.head]], 1, bits)
    tied = weights.head == "embed_tokens.weight" and not quantize
    return Model(
        embed=head.values[0] if tied else linear.panels(floats(weights["embed_tokens.weight"])),
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
