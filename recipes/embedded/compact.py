"""The compact Llama of the embedded models, with the parameter names of transformers' `LlamaForCausalLM` with tied
embeddings, so that its `state_dict()` is exported as it is. It compiles one layer at a time, so skipping a layer costs
nothing and recompiles nothing, and returns the hidden states after any layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.errors import ParameterError
from slipstream.training.eagle3_objective import attend_in_blocks
from slipstream.training.methods import DraftOptions
from slipstream.training.objective import initialise


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama model with tied embeddings. Defaults: the embedded target (14.2M parameters)."""

    vocab_size: int = 4096
    hidden_size: int = 384
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 1024
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ParameterError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}",
                why="each key head serves a whole group of query heads",
                fix="change one of them",
            )

    def hf_config(self, eos_token_ids: list[int], pad_token_id: int, dtype: str = "float16") -> dict[str, Any]:
        """The `config.json` that transformers loads as `LlamaForCausalLM`."""
        shape = asdict(self)
        theta = shape.pop("rope_theta")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **shape,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            # Both spellings: transformers 5 reads rope_parameters, most other programs read rope_theta.
            "rope_theta": theta,
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            "bos_token_id": None,
            "eos_token_id": eos_token_ids[0],
            "pad_token_id": pad_token_id,
            "initializer_range": 0.02,
            "dtype": dtype,
        }


DRAFT = ModelShape(
    hidden_size=DraftOptions.hidden_size,
    num_hidden_layers=DraftOptions.layers,
    num_attention_heads=DraftOptions.heads,
    num_key_value_heads=DraftOptions.kv_heads,
    intermediate_size=DraftOptions.intermediate,
)
"""The embedded draft model (2.4M parameters)."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rope_tables(length: int, head_dim: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, `[length, head_dim]` each, in the half-split layout."""
    freqs = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)  # [D/2]
    angles = torch.arange(length, device=device).float()[:, None] * freqs  # [T, D/2]
    angles = torch.cat((angles, angles), -1)  # [T, D]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to `x` `[B, H, T, D]`."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, c: ModelShape) -> None:
        super().__init__()
        self.heads, self.groups, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # One matrix product instead of three: the operands are so small that call overhead matters.
        fused = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        heads = F.linear(x, fused).view(batch, length, -1, self.dim).transpose(1, 2)  # [B, H+2KV, T, D]
        q, k, v = heads.split((self.heads, self.groups, self.groups), 1)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        if x.device.type == "cpu":
            out = attend_in_blocks(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, c: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat((self.gate_proj.weight, self.up_proj.weight))).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, c: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    def __init__(self, c: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


def run_layer(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return layer(x, cos, sin)  # type: ignore[no-any-return]


def head_logits(norm: RMSNorm, weight: Tensor, x: Tensor) -> Tensor:
    """Final norm and tied head: x `[B, T, H]` -> logits `[B, T, V]`, in the compute dtype."""
    return F.linear(norm(x), weight)


class CompactLlama(nn.Module):
    """The training model. Weights are float32; run it under autocast for bfloat16 matrix products."""

    def __init__(self, shape: ModelShape, compile: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)
        self.run_layer: Callable[..., Tensor] = run_layer
        if compile:
            self.run_layer = torch.compile(run_layer, dynamic=False)
        self._tables: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights, standard deviation 0.02; matrices that write to the residual stream: 0.02 / sqrt(2 L)."""
        initialise(self, generator, residual=0.02 * (2 * self.shape.num_hidden_layers) ** -0.5)

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (length, str(device))
        if key not in self._tables:
            self._tables[key] = rope_tables(length, self.shape.head_dim, self.shape.rope_theta, device)
        return self._tables[key]

    def hidden(self, tokens: Tensor, keep: Iterable[bool] | None = None, taps: Iterable[int] = ()) -> list[Tensor]:
        """Hidden states before the final norm.

        tokens `[B, T]`; `keep[l]` false skips layer `l` (stochastic depth); `taps` are layers whose output is
        returned too. Returns the tapped states in layer order, then the last one, `[B, T, H]` each.
        """
        cos, sin = self.tables(tokens.shape[1], tokens.device)
        wanted = set(taps)
        kept = list(keep) if keep is not None else [True] * len(self.model.layers)
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled(tokens.device.type):
            x = x.to(torch.get_autocast_dtype(tokens.device.type))
        states = []
        for index, layer in enumerate(self.model.layers):
            if kept[index]:
                x = self.run_layer(layer, x, cos, sin)
            if index in wanted:
                states.append(x)
        return [*states, x]

    @property
    def table(self) -> Tensor:
        """The output head [V, d], which is the embedding."""
        return self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens `[B, T]` -> logits `[B, T, V]` in float32."""
        return head_logits(self.model.norm, self.model.embed_tokens.weight, self.hidden(tokens)[-1]).float()
