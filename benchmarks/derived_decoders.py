"""Makes decoders of other kinds that write the same text as the embedded target: a mixture of experts and a hybrid.

Their weights are derived while they are packed, so nothing is stored in files. They write the embedded target's text,
so acceptance rates are realistic. A pass reads and computes as much as a pass of a real model of this kind.

mixture  128 experts per layer, 8 of them per token, as in Qwen3-30B-A3B. Every expert is a copy of the MLP in memory of
         its own, and the weights of the chosen experts add up to 1. The router is random, so tokens choose experts
         independently.
hybrid   three layers of Mamba-2 before each layer, as in Granite 4; their outputs are zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.derived_models import wider
from slipstream import zoo
from slipstream.backends.native.native_executor import NativeExecutor
from slipstream.backends.native.quantise import quantise_blocks
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.checkpoints.weight_blocks import Blocks
from slipstream.checkpoints.weights import Weights
from slipstream.targets.decoder import Decoder

TIMES = 2
"""Factor by which the decoders are wider than the embedded target."""
EXPERTS, CHOSEN, BETWEEN = 128, 8, 3
CONTEXT = 8192
"""Context of the decoders. Positions are rotary, so prompts may be longer than in training."""
SHARED = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "tie_word_embeddings", "rope_theta", "rope_parameters", "eos_token_id",
)  # fmt: skip


def derived_decoder(kind: str, bits: int, threads: int, files: Path) -> Decoder:
    """Make a decoder of this kind, "mixture" or "hybrid". files: folder in which the widened target is stored."""
    source = files / f"embedded-{TIMES}x"
    if not source.exists():
        wider(source, zoo.target_dir(), TIMES)
    tensors = {name.removeprefix("model."): each for name, each in load_file(source / "model.safetensors").items()}
    given = json.loads((source / "config.json").read_text())
    width = int(given["intermediate_size"]) // TIMES  # the rest of the widened MLP is zeros
    common = {name: given[name] for name in SHARED} | {"max_position_embeddings": CONTEXT, "intermediate_size": width}
    keys, find = (_mixture if kind == "mixture" else _hybrid)(given["num_hidden_layers"], given["hidden_size"], width)
    weights = DerivedWeights(DecoderConfig.from_dict(common | keys), tensors, find, bits)
    settings = LoadSettings(quantize="w8a8" if bits == 8 else None, threads=threads)
    return Decoder(NativeExecutor(weights.config, weights, settings))


class DerivedWeights(Weights):
    """Weights that are parts of other tensors, zeros, ones, or random numbers. A matrix that is used several times is
    made, and rounded to 4 bits, only once.

    find  function from the name of a tensor to the tensor of `tensors` out of which it is cut, or to "zeros ..",
          "ones ..", "random ..".
    """

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor], find: Callable[[str], str], bits: int):
        @cache
        def make(source: str, dims: tuple[int, ...]) -> Tensor:
            if source in tensors:
                return tensors[source][tuple(map(slice, dims))].to(torch.float16)
            if not source.startswith("random"):
                return torch.full(dims, float(source.startswith("ones")), dtype=torch.float16)
            return torch.randn(dims, generator=torch.Generator().manual_seed(len(source))).mul_(0.02).to(torch.float16)

        def read(name: str, dims: tuple[int, ...]) -> Callable[[slice], Tensor]:
            return lambda rows: make(find(name), dims)[rows]

        super().__init__({n: (n, read(n, dims)) for n, dims in config.shapes().items()}, config, torch.float16)
        self._find, self._bits = find, bits
        self._in_4_bits = cache(lambda source, dims: quantise_blocks(make(source, dims), 4))

    def blocks(self, name: str, rows: slice = slice(None)) -> Blocks | None:
        dims = self.shapes[name]
        if self._bits != 4 or len(dims) != 2 or "embed" in name or name.endswith("mlp.gate.weight"):
            return None
        return self._in_4_bits(self._find(name), dims)[rows]


def _mixture(layers: int, hidden: int, width: int) -> tuple[dict[str, Any], Callable[[str], str]]:
    """Return keys of the configuration, and the function `find` of `DerivedWeights`."""

    def find(name: str) -> str:
        if name.endswith("mlp.gate.weight"):
            return "random" + "." * int(name.split(".")[1])
        before, _, expert = name.partition("experts.")
        return before + expert.partition(".")[2] if expert else name

    keys = {"model_type": "mixtral", "num_hidden_layers": layers}
    return keys | {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}, find


def _hybrid(layers: int, hidden: int, width: int) -> tuple[dict[str, Any], Callable[[str], str]]:
    """See `_mixture`."""
    group = BETWEEN + 1

    def find(name: str) -> str:
        if not name.startswith("layers."):
            return name
        _, number, part = name.split(".", 2)
        layer, place = divmod(int(number), group)
        if place == BETWEEN:
            return f"layers.{layer}.{part}"
        if part.endswith(("out_proj.weight", "down_proj.weight")):
            return f"zeros {part}"
        return f"random {part}" if part.endswith("proj.weight") or "recurrent.conv" not in part else f"ones {part}"

    keys = {
        "model_type": "granitemoehybrid", "num_hidden_layers": group * layers, "num_local_experts": 0,
        "layer_types": (["mamba"] * BETWEEN + ["attention"]) * layers, "shared_intermediate_size": width,
        "position_embedding_type": "rope", "attention_multiplier": 0.125, "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0, "logits_scaling": 1.0, "mamba_n_heads": 2 * hidden // 64, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": 4,
    }  # fmt: skip
    return keys, find
