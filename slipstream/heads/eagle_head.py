"""EAGLE: a decoder layer that predicts the target's next *features* (hidden states), and from them tokens.

At position i the head reads a feature of the target's state after token i, and token i + 1; it predicts token i + 2.
Its output is then used in place of the next feature, which the target has not computed yet.

    EAGLE-1, -2   (Li et al. 2401.15077, section 4; 2406.16858 changes the tree, not the head)
                  feature: the target's last hidden state after its final norm; fc combines embedding and feature;
                  the output is the next feature and goes through the target's lm_head
    EAGLE-3       (Li et al. 2503.01840, section 3) feature: fc of three tapped layers; the attention reads
                  [norm(embedding), norm(feature)]; own norm and lm_head over a reduced vocabulary
    EAGLE-3.1     one RMS norm for each tap before fc, and the *normed* output as the next feature
    P-EAGLE       (2602.01469, section 3) an EAGLE-3 head that drafts K tokens in one pass: after the last true row come
                  K - 1 rows of a mask token, whose taps are a learned vector, `mask_hidden`

Attention is passed in as a function: with a KV cache and tree masks for drafting, with the masks of training-time test
for training. So training and inference share all other code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.checkpoints.config import DecoderConfig
from slipstream.core.params import Strict, check_integer
from slipstream.errors import ConfigError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [..., H, D], k [..., Hk, D], v [..., Hk, D]), rope applied -> [..., H, D]."""

Rotary = tuple[Tensor, Tensor]
"""cos and sin, [..., 1, D], in the half-split layout."""


@dataclass(frozen=True)
class EagleConfig(Strict):
    """Describes an EAGLE head.

    version           1 (EAGLE-1 and -2) or 3.
    decoder           sizes, rope and activation of the head's own layers; its `vocab_size` is the target's.
    taps              target layers that the features are read from (see `TargetOut.hidden`); (-1,) for version 1.
    target_hidden     width of the target's hidden states.
    draft_vocab       number of ids that the head can draft; for version 1 the target's whole vocabulary.
    fc_bias           version 1 only: whether fc has a bias.
    own_embedding     the checkpoint has an embedding; otherwise the target's is used.
    norm_before_residual  the residual stream starts from the normed feature, not the raw one.
    fc_norm, norm_output  the extra norms of EAGLE-3.1.
    norm_before_fc    one RMS norm over the joined taps before fc (the gpt-oss heads).
    mask_token        id that the mask rows of a parallel head (P-EAGLE) embed; None: the head is not parallel.
    depths            largest number of draft tokens that a parallel head was trained to predict in one pass; None: not
                      known.
    """

    version: int
    decoder: DecoderConfig
    taps: tuple[int, ...]
    target_hidden: int
    draft_vocab: int
    fc_bias: bool = False
    own_embedding: bool = False
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    mask_token: int | None = None
    depths: int | None = None

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise ConfigError(f"EAGLE version {self.version} is unknown", fix="use a head of EAGLE-1, -2 or -3")
        check_integer("draft_vocab", self.draft_vocab, 1)
        if self.draft_vocab > self.decoder.vocab_size:
            raise ConfigError(
                f"the draft vocabulary has {self.draft_vocab} ids, the target's {self.decoder.vocab_size}",
                fix="correct draft_vocab_size or vocab_size in config.json",
            )
        if self.mask_token is not None and not 0 <= self.mask_token < self.decoder.vocab_size:
            raise ConfigError(
                f"the mask token is {self.mask_token}, the vocabulary has the ids 0..{self.decoder.vocab_size - 1}",
                fix="correct mask_token_id, pard_token or ptd_token_id in config.json",
            )

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def reduced(self) -> bool:
        """True if draft ids may differ from target ids."""
        return self.version == 3 or self.draft_vocab < self.decoder.vocab_size


def default_taps(layers: int) -> tuple[int, int, int]:
    """Return the low, middle and high target layer that EAGLE-3 reads by default, as in vLLM and SGLang."""
    return 2, layers // 2, layers - 3


class Norm(nn.RMSNorm):
    """An RMS norm in the dtype of its weight: training has states in bfloat16 and weights in float32, for which PyTorch
    has no fused norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, c: DecoderConfig, width: int):
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.heads, c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(width, c.heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(width, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        self.q_norm = Norm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = Norm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def keys(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values of rows x [..., width], [..., Hk, D] each."""
        k, v = (p(x).unflatten(-1, (-1, self.dim)) for p in (self.k_proj, self.v_proj))
        return _rotate(self.k_norm(k), rotary), v

    def forward(self, layer: int, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        q = _rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), rotary)
        return self.o_proj(attend(layer, q, *self.keys(x, rotary)).flatten(-2))  # type: ignore[no-any-return]


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate pairs (j, j + D/2) of x [..., heads, D]."""
    cos, sin = rotary
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


class _HeadMLP(nn.Module):
    def __init__(self, c: DecoderConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class PlainLayer(nn.Module):
    """An ordinary decoder layer. first: True for the first layer of EAGLE-1, after fc, which has no input norm."""

    def __init__(self, c: DecoderConfig, first: bool = False):
        super().__init__()
        self.input_layernorm = None if first else Norm(c.hidden_size, c.norm_eps)
        self.self_attn = _Attention(c, c.hidden_size)
        self.post_attention_layernorm = Norm(c.hidden_size, c.norm_eps)
        self.mlp = _HeadMLP(c)

    def forward(self, layer: int, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(layer, normed, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class _MidLayer(nn.Module):
    """The layer of EAGLE-3: attention over [norm(embedding), norm(feature)], the feature as residual stream."""

    def __init__(self, c: DecoderConfig, norm_before_residual: bool):
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = Norm(c.hidden_size, c.norm_eps)
        self.hidden_norm = Norm(c.hidden_size, c.norm_eps)
        self.self_attn = _Attention(c, 2 * c.hidden_size)
        self.post_attention_layernorm = Norm(c.hidden_size, c.norm_eps)
        self.mlp = _HeadMLP(c)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embedded), normed), -1)  # [..., 2 d]
        x = (normed if self.norm_before_residual else hidden) + self.self_attn(0, x, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class EagleHead(nn.Module):
    """An EAGLE head. Its `state_dict` has the tensor names of published checkpoints.

    embedding [V, d] and, for version 1, lm_head [V, d] belong to the target and are not parameters of the head;
    `borrow` sets them, `borrowed` returns them. d2t is an *offset*: draft id i is target id i + d2t[i].
    """

    d2t: Tensor  # int64 [draft_vocab]
    t2d: Tensor  # bool [V]
    in_8_bits = False
    """True if matrices are 8-bit integers with a scale for each row, as `slipstream convert --to int8` stores them."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        c, taps = config.decoder, len(config.taps)
        if config.version == 1:
            self.fc = nn.Linear(c.hidden_size + config.target_hidden, c.hidden_size, bias=config.fc_bias)
        else:
            self.fc = nn.Linear(taps * config.target_hidden, c.hidden_size, bias=False)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(Norm(config.target_hidden, c.norm_eps) for _ in range(taps))
            if config.norm_before_fc:
                self.input_norm = Norm(taps * config.target_hidden, c.norm_eps)
            self.midlayer = _MidLayer(c, config.norm_before_residual)
            self.norm = Norm(c.hidden_size, c.norm_eps)
            self.lm_head = nn.Linear(c.hidden_size, config.draft_vocab, bias=False)
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(c.vocab_size, device="cpu") < config.draft_vocab)
            if config.mask_token is not None:  # as in `speculators`
                self.mask_hidden = nn.Parameter(torch.zeros(1, 1, taps * config.target_hidden))
        plain = range(0 if config.version == 1 else 1, c.layers)
        self.layers = nn.ModuleDict({str(i): PlainLayer(c, i == 0) for i in plain})
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self._borrowed: dict[str, Tensor | Callable[[], Tensor]] = {}

    def borrow(self, embedding: Tensor | Callable[[], Tensor] | None, lm_head: Tensor | None = None) -> EagleHead:
        """Use the target's embedding [V, d] (None for a head that has its own) and, version 1, its lm_head [V, d];
        returns self. A function is called when its embedding is first needed: kernels may have a table of their own."""
        lent = {"embedding": embedding, "lm_head": lm_head}
        self._borrowed = {name: table for name, table in lent.items() if table is not None}
        return self

    def borrowed(self, name: str) -> Tensor:
        """Return the target's "embedding" or "lm_head"."""
        table = self._borrowed[name]
        if not isinstance(table, Tensor):
            table = self._borrowed[name] = table()
        return table

    def select_vocabulary(self, ids: Tensor) -> None:
        """Let the head draft only the target ids `ids` (int64 [draft_vocab], increasing)."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def target_ids(self) -> Tensor:
        """Target id of each draft id, int64 [draft_vocab]."""
        ids = torch.arange(self.config.draft_vocab, device=self.fc.weight.device)
        return ids if self.config.version == 1 else ids + self.d2t

    @property
    def mask_taps(self) -> Tensor | None:
        """Learned taps of the mask rows of a parallel head, [taps * target_hidden]; None for other heads."""
        return None if self.config.mask_token is None else self.mask_hidden.detach().flatten()

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of tokens [...]."""
        table = self.embed_tokens.weight if self.config.own_embedding else self.borrowed("embedding")
        return F.embedding(tokens, table)

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """Return the feature from which drafting starts, [..., d]. taps: target states, [..., target_hidden] each."""
        if self.config.version == 1:
            return taps[0]
        if self.config.fc_norm:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        joined = torch.cat(taps, -1)  # [..., taps * target_hidden]
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, hidden: Tensor, rotary: Rotary, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run one step of every row.

        tokens [...]: the token *after* each row's feature; hidden [..., d]: features, from `fuse` or an earlier step.
        Returns (the feature for the next step, the input of `logits`), [..., d] each.
        """
        embedded = self.embed(tokens).to(hidden.dtype)
        if self.config.version == 1:
            x = self.fc(torch.cat((embedded, hidden), -1))
        else:
            x = self.midlayer(embedded, hidden, rotary, attend)
        for i, layer in self.layers.items():
            x = layer(int(i), x, rotary, attend)
        if self.config.version == 1:
            return x, x
        normed = self.norm(x)
        return (normed if self.config.norm_output else x), normed

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [..., draft_vocab] of the second result of `forward`, [..., d]."""
        if self.config.version == 1:
            return F.linear(x, self.borrowed("lm_head"))
        return self.lm_head(x)  # type: ignore[no-any-return]


def scatter(values: Tensor, ids: Tensor | None, vocab: int, elsewhere: float = -torch.inf) -> Tensor:
    """Spread logits or probabilities [..., draft_vocab] over draft ids to [..., V] over target ids; ids that the head
    cannot draft get `elsewhere`. ids: target id of each draft id; None: draft ids are target ids."""
    if ids is None:
        return values
    return values.new_full((*values.shape[:-1], vocab), elsewhere).index_copy_(-1, ids, values)


def rotary_tables(config: DecoderConfig, length: int, device: torch.device | str = "cpu") -> Rotary:
    """Return cos and sin of positions 0..length-1, float32 [length, 1, D] each, with the head's rope scaling."""
    inv_freq, scale = config.rope()  # [D/2] float64
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inv_freq)  # [T, D/2]
    angles = torch.cat((angles, angles), -1).unsqueeze(1)  # [T, 1, D]
    return (angles.cos() * scale).float().to(device), (angles.sin() * scale).float().to(device)
