"""`LayerDescription`: the parts of a decoder layer. Executors read these descriptions and do not depend on the family.
Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.checkpoints.recurrence import Recurrence


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Describes multi-head latent attention (MLA, arXiv 2405.04434): keys and values of all heads are products of one
    latent vector. The KV cache contains this vector and one rotated key for all heads.

    rank        width of the latent vector of keys and values.
    query_rank  width of the latent vector of queries; 0: queries are computed from the input.
    plain, rotated  numbers of dimensions of a head's queries and keys without and with rotary embedding.
    value       size of each head's values.
    eps         epsilon of the norms of both latent vectors.
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

    mixes          whether the layer mixes tokens; otherwise it only has an MLP.
    recurrence     the recurrent mixer that replaces attention; None: attention mixes.
    beside         whether attention reads the same input as the recurrence, and both outputs are added.
    heads, kv_heads, head_dim  sizes of attention.
    latent         None: attention with separate keys and values. Otherwise the KV cache has one key head of the size
                   rotated + rank, which is also the value head.
    window         None: full attention; W: a token sees itself and the W - 1 positions before it.
    chunked        whether a token sees, within the window, only tokens since the last multiple of W.
    rotary         index of the rotary embedding that rotates queries and keys; None: no rotation.
    scale          factor of the scores; None: 1 / sqrt(head_dim).
    cap            c: scores become c * tanh(score / c); 0: no cap.
    sinks          whether each head has a learned score in the softmax, without a value.
    qk_norm        "head": RMS norm of each query and key head; "plain": like "head" without a weight; "width": RMS norm
                   over all heads together; "": no norm.
    late_norm      whether this norm comes after the rotary embedding.
    query_scale    factor of queries after a norm without a weight.
    value_norm     whether each value head has an RMS norm, without a weight.
    key_is_value   whether values are the keys before norm and rotary embedding.
    shared         index of the layer whose keys and values this layer reads; None: it has its own keys and values.
    growing        whether queries are scaled by their position, see `DecoderConfig.growth`.
    gate           "output" or "head": the output of attention is multiplied by sigmoids of another projection of the
                   input, one for each number or for each head; "": no gate.
    norm_before, norm_after  whether the inputs, and the outputs, of attention and MLP are normalised.
    parallel       whether attention and MLP read the same x.
    one_norm       whether attention and MLP read the same norm of x.
    intermediate_size  width of the MLP; 0: the layer has experts instead, or no MLP.
    sparse         whether the MLP is a mixture of experts (`ModelShape.experts`).
    scaled         whether the layer's output is multiplied by a learned number.
    factors        factor of the outputs of a linear layer, by canonical part, such as "self_attn.k_proj".
    out_scale      factor of a recurrence's output projection.
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
        """Return whether the layer has its own keys and values in the KV cache."""
        return self.attends and self.shared is None

    @property
    def attends(self) -> bool:
        return self.mixes and (self.recurrence is None or self.beside)

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale
