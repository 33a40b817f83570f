"""Tiny random checkpoints of every family, and transformers as the oracle to compare with.

Weights are drawn wide (std 0.2-0.3), so that logits differ by several units and attention is far from uniform:
with the usual 0.02 a wrong mask would hide in the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

VOCAB = 96

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_MOE = _LLAMA | {"num_experts_per_tok": 2, "head_dim": 16}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "llama-tied-mha": lambda: transformers.LlamaConfig(**_LLAMA | {"num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama-bias": lambda: transformers.LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True),
    "llama3.1": lambda: transformers.LlamaConfig(**_LLAMA, rope_parameters=dict(_LLAMA3)),
    "codellama-linear": lambda: transformers.LlamaConfig(
        **_LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    ),
    "mistral-window": lambda: transformers.MistralConfig(**_LLAMA, sliding_window=7, head_dim=16),
    "mixtral": lambda: transformers.MixtralConfig(**_MOE, num_local_experts=4),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA, rope_parameters=dict(_YARN)),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **_LLAMA, use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA, head_dim=32, tie_word_embeddings=True),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_MOE, num_experts=5, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=128,
        n_embd=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def make(family: str, folder: Path, shard_bytes: int | None = None) -> Path:
    """Write the tiny checkpoint of `family` into `folder`, in shards of `shard_bytes` if given."""
    torch.manual_seed(sorted(FAMILIES).index(family))
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # biases start at 0 and norms at 1: a swapped or forgotten one would not show
                p.add_(torch.randn_like(p) * 0.2)
    model.save_pretrained(folder, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    return folder


class Reference:
    """transformers' own model, without a cache: one causal forward over the whole text."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        self.model.config._experts_implementation = "eager"  # the grouped kernel knows no float64
        self.dtype = dtype

    def _run(self, ids: list[int]) -> Any:
        with torch.no_grad(), _Wide(self.dtype == torch.float64):
            return self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)

    def __call__(self, ids: list[int]) -> Tensor:
        """Logits [T, V]."""
        return self._run(ids).logits[0]

    def hidden(self, ids: list[int]) -> list[Tensor]:
        """hidden_states: [T, d] before each layer, then after the final norm."""
        return [h[0] for h in self._run(ids).hidden_states]


class _Wide(TorchFunctionMode):
    """transformers computes norms, angles, softmax and routing in float32 even for a float64 model; with this mode
    they stay in float64, so that two independent implementations can be compared to 1e-9."""

    def __init__(self, on: bool):
        super().__init__()
        self.on = on

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if self.on:
            if func is Tensor.float:
                return args[0].double()
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)
