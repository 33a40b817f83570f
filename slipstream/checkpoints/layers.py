"""`LayerDescription`: which parts a layer of a decoder has. Families differ in these descriptions only: executors read
them as data. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.checkpoints.recurrence import Recurrence


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Describes multi-head latent attention (MLA, arXiv 2405.04434): keys and values of all heads are products of one
    latent vector, which the KV cache holds in their place, beside a key of its own that the rotary embedding turns.

    rank        width of the latent vector.
    query_rank  width of the vector that queries are computed from; 0: they are computed from the input.
    plain, rotated  dimensions of each head's queries and keys that the rotary embedding leaves, and turns.
    value       size of each head's values.
    eps         of the norms of both vectors.
    """

    rank: int
    query_rank: int
    plain: int
    rotated: int
    value: int
    eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class LayerDescription:
    """A layer of a decoder: x += attention(norm(x)), then x += mlp(norm(x)). The defaults are Llama's.

    mixes          whether it mixes tokens; else it has an MLP only.
    recurrence     what mixes the tokens in place of attention; None: attention does.
    beside         attention reads the same input beside the recurrence, and both outputs are added.
    heads, kv_heads, head_dim  of its attention.
    latent         None: attention has keys and values of its own. Else the cache has one head, [rotated, rank], whose
                   values are its keys.
    window         None: full attention; W: a token sees itself and the W - 1 positions before it.
    chunked        of these, a token sees only those since the last multiple of W.
    rotary         which of the model's rotary embeddings turns queries and keys; None: none does.
    scale          of the scores; None: 1 / sqrt(head_dim).
    cap            c: scores become c * tanh(score / c); 0: they stay.
    sinks          a learned score for each head joins the softmax, without a value.
    qk_norm        "head": RMS norm of each query and key head, "plain": the same without a weight, "width": of all
                   heads together, "": none; late_norm: after the rotary embedding.
    query_scale    multiplies queries after a norm without a weight.
    value_norm     RMS norm of each value head, without a weight.
    key_is_value   values are the keys before their norm and rotary embedding.
    shared         the layer whose keys and values it reads; None: it has its own.
    growing        queries are scaled by their position, as `DecoderConfig.growth` says.
    gate           the output of attention is multiplied by the sigmoid of another projection of its input, which has
                   a number for each "output" or each "head"; "": it is not.
    norm_before, norm_after  whether the inputs, and the outputs, of attention and MLP are normalised.
    parallel       attention and MLP read the same x; one_norm: and the same norm of it.
    intermediate_size  of its MLP; 0: it has experts instead, or none at all.
    sparse         the MLP is a mixture of experts (`ModelShape.experts`).
    scaled         the layer's output is multiplied by a learned number.
    factors        canonical part, such as "self_attn.k_proj" -> what multiplies its outputs. out_scale: the same of the
                   output product of a recurrence.
    """

    mixes: bool = True
    recurrence: Recurrence | None = None
    beside: bool = False
    heads: int
    kv_heads: int
    head_dim: int
    latent: Latent | None = None
    window: int | None = None
    chunked: bool = False
    rotary: int | None = 0
    scale: float | None = None
    cap: float = 0.0
    sinks: bool = False
    qk_norm: str = ""
    late_norm: bool = False
    query_scale: float = 1.0
    value_norm: bool = False
    key_is_value: bool = False
    shared: int | None = None
    growing: bool = False
    gate: str = ""
    norm_before: bool = True
    norm_after: bool = False
    parallel: bool = False
    one_norm: bool = False
    intermediate_size: int = 0
    sparse: bool = False
    scaled: bool = False
    factors: Mapping[str, float] = field(default_factory=dict)
    out_scale: float = 1.0

    @property
    def has_kv(self) -> bool:
        """Return whether it has keys and values of its own in the KV cache."""
        return self.attends and self.shared is None

    @property
    def attends(self) -> bool:
        return self.mixes and (self.recurrence is None or self.beside)

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale
