"""DFlash (2602.06036): a few decoder layers that read the target's states as keys and values, and predict all tokens of
a block in one pass.

    context   hidden_norm(fc(tapped states of a token)) is the input of every layer's keys and values for that token, so
              each token of the text has one entry in the head's KV cache, and no query
    block     [last token, mask, mask, ...] from the last token's position on; each row sees the whole context and the
              whole block; a mask's output predicts the token at its own position
    DSpark    (2607.05147) each row, also the last token's, predicts the token after it; a Markov head adds
              markov_w2(markov_w1(token before)) to its logits, so a draft token depends on the one before it

The layers are like Qwen3's. Embedding and output head are the target's. Attention is passed in, as in `eagle_head`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.checkpoints.config import DecoderConfig
from slipstream.core.params import Strict
from slipstream.heads.eagle_head import Attend, Norm, PlainLayer, Rotary, scatter


@dataclass(frozen=True)
class DFlashConfig(Strict):
    """Describes a DFlash head.

    decoder        sizes and rope of the head's layers; its `vocab_size` is the target's.
    taps           target layers that the context is made of (see `TargetOut.hidden`).
    target_hidden  width of the target's hidden states.
    block          number of rows of a block, including the row of the last token.
    mask_token     id whose embedding stands for a token that is not known yet.
    target_layers  number of the target's layers; None: not known.
    causal         True: in every layer, a row of a block sees only the rows before it. causal_windows: the same, but
                   only in layers with a window.
    from_anchor    each row predicts the token after it, so the last token's row predicts the first draft token.
    markov_rank    width of the Markov head; 0: there is none.
    draft_vocab    number of ids that the head can draft, with its own output head; None: all.
    own_embedding, own_lm_head  whether the checkpoint has this table; otherwise the target's is used.
    """

    decoder: DecoderConfig
    taps: tuple[int, ...]
    target_hidden: int
    block: int
    mask_token: int
    target_layers: int | None = None
    causal: bool = False
    causal_windows: bool = False
    from_anchor: bool = False
    markov_rank: int = 0
    draft_vocab: int | None = None
    own_embedding: bool = False
    own_lm_head: bool = False

    @property
    def depth(self) -> int:
        """K, the number of draft tokens that a block gives."""
        return self.block - 1 + self.from_anchor

    @property
    def attention(self) -> tuple[tuple[int | None, bool], ...]:
        """(window, is causal) of each layer. A row of a block sees the window on both sides, unless it is causal."""
        return tuple((w, self.causal or (self.causal_windows and w is not None)) for w in self.decoder.windows)


class DFlashHead(nn.Module):
    """A DFlash head. Its `state_dict` has the tensor names of published checkpoints; d2t and t2d as in `EagleHead`.

    embedding [V, d] and lm_head [V, d] belong to the target and are not parameters of the head; `borrow` sets them.
    """

    d2t: Tensor
    in_8_bits = False
    """See `EagleHead.in_8_bits`."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config = config
        c, ids = config.decoder, config.draft_vocab or config.decoder.vocab_size
        self.fc = nn.Linear(len(config.taps) * config.target_hidden, c.hidden_size, bias=False)
        self.hidden_norm = Norm(c.hidden_size, c.norm_eps)
        self.layers = nn.ModuleList(PlainLayer(c) for _ in range(c.layers))
        self.norm = Norm(c.hidden_size, c.norm_eps)
        if config.markov_rank:
            rank, vocab = config.markov_rank, c.vocab_size
            parts = {"markov_w1": nn.Embedding(vocab, rank), "markov_w2": nn.Linear(rank, ids, bias=False)}
            self.markov_head = nn.ModuleDict(parts)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if config.own_lm_head:
            self.lm_head = nn.Linear(c.hidden_size, ids, bias=False)
        if config.draft_vocab is not None:
            self.register_buffer("d2t", torch.zeros(ids, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(c.vocab_size, device="cpu") < ids)
        self._borrowed: tuple[Tensor | None, Tensor | None] = (None, None)

    def borrow(self, embedding: Tensor | None, lm_head: Tensor | None) -> DFlashHead:
        """Use the target's embedding and output head, [V, d] each (None: the head has its own); returns self."""
        self._borrowed = (embedding, lm_head)
        return self

    @property
    def embedding(self) -> Tensor:
        return self.embed_tokens.weight if self._borrowed[0] is None else self._borrowed[0]

    @property
    def output_head(self) -> Tensor:
        return self.lm_head.weight if self._borrowed[1] is None else self._borrowed[1]

    @property
    def width(self) -> int:
        """V, the number of ids that `after` gives logits for."""
        return len(self.output_head) if self.config.draft_vocab is None else self.config.decoder.vocab_size

    @property
    def target_ids(self) -> Tensor | None:
        """Target id of each draft id, int64 [draft_vocab]; None if draft ids are target ids."""
        return None if self.config.draft_vocab is None else self.d2t + torch.arange(len(self.d2t)).to(self.d2t)

    def context(self, taps: Tensor, rotary: Rotary) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer, [..., Hk, D] each, for rows of context. taps: the target's hidden
        states at the tapped layers, joined [..., taps * target_hidden]; rotary: tables at the rows' positions."""
        x = self.hidden_norm(self.fc(taps))
        return [layer.self_attn.keys(x, rotary) for layer in self.layers]  # type: ignore[union-attr, operator]

    def forward(self, tokens: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Run the rows of blocks, tokens [...] -> [..., d], the inputs of `logits`. `attend` adds the context."""
        x = F.embedding(tokens, self.embedding).to(rotary[0].dtype)
        for i, layer in enumerate(self.layers):
            x = layer(i, x, rotary, attend)
        return self.norm(x)  # type: ignore[no-any-return]

    def block_tokens(self, last: Tensor) -> Tensor:
        """Return the tokens of each text's block, [..., block], from its last token [...]."""
        masks = last.new_full((*last.shape, self.config.block - 1), self.config.mask_token)
        return torch.cat((last[..., None], masks), -1)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [..., draft_vocab] of the outputs of `forward`, [..., d], without the Markov head."""
        return F.linear(x, self.output_head)

    def after(self, logits: Tensor, before: Tensor) -> Tensor:
        """Return logits over target ids, [..., V]: `logits` of draft tokens, plus the Markov head's logits for the
        token before each draft token, `before` [...]."""
        if self.config.markov_rank:
            markov = self.markov_head
            logits = logits + markov["markov_w2"](markov["markov_w1"](before))[..., : logits.shape[-1]]  # type: ignore
        return scatter(logits, self.target_ids, self.width)
