"""Medusa: K heads on one hidden state of the target; each predicts one position further (Cai et al. 2401.10774, section
2.1).

Head k reads h, the target's last hidden state after its final norm, through its own `layers` residual blocks,

    x = x + SiLU(W x + b)

and an lm_head, its own or the target's. The target's lm_head predicts the next token from h; head 0 predicts the second
token after h, head 1 the third, and so on, each independently of the other heads.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.core.params import Strict, check_number, integer, option
from slipstream.errors import ConfigError, PairError

Accuracies = tuple[tuple[float, ...], ...]
"""[head][rank]: how often the head's candidate of that rank (0: its first choice) is the actual token."""


@dataclass(frozen=True)
class MedusaConfig(Strict):
    """Describes Medusa heads.

    heads, layers  number of heads (K), and of residual blocks in each.
    hidden_size    d, width of the target's hidden states.
    vocab_size     V, the target's vocabulary.
    draft_vocab    number of ids that the heads can draft; None: all V.
    own_lm_head    each head has its own lm_head; otherwise the target's is used.
    bias           whether the residual blocks have biases.
    accuracies     held-out accuracies of the heads [K][top]; None: not measured. Each is the share of positions at
                   which the candidate of exactly that rank is right, so a row sums to at most 1.
    """

    heads: int = option(check=integer(1))
    layers: int = option(check=integer(1))
    hidden_size: int = option(check=integer(1))
    vocab_size: int = option(check=integer(1))
    draft_vocab: int | None = option(None, check=integer(1))
    own_lm_head: bool = True
    bias: bool = True
    accuracies: Accuracies | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > self.vocab_size:
            raise ConfigError(
                f"the heads can draft {self.draft_vocab} ids, the target has {self.vocab_size}",
                fix="correct truncated_vocab_size or vocab_size in config.json",
            )
        if self.accuracies is not None:
            if len(self.accuracies) < self.heads:
                raise ConfigError(
                    f"there are accuracies of {len(self.accuracies)} heads for {self.heads}",
                    fix="give medusa_head_accuracies one row per head, or leave it out",
                )
            for h, row in enumerate(self.accuracies):
                check_accuracies(f"medusa_head_accuracies[{h}]", row)

    @property
    def width(self) -> int:
        """Number of ids that the heads can draft."""
        return self.draft_vocab or self.vocab_size


def check_accuracies(name: str, row: Seq[float]) -> None:
    """Raise unless `row` can be shares of positions, one per rank: each is at least 0, and their sum is at most 1."""
    for value in row:
        check_number(name, value, 0.0, 1.0)
    if sum(row) > 1 + 1e-6:
        raise ConfigError(
            f"{name} sums to {sum(row):g}",
            why="only one candidate can be right, so the shares of the ranks sum to at most 1",
            fix="give each rank its own share, not the share of all ranks up to it",
        )


class MedusaRuntime(Protocol):
    """How a drafter calls the heads: `MedusaHeads` itself, or a backend's implementation."""

    config: MedusaConfig
    token_map: Tensor
    """Target id of each draft id, int64 [draft_vocab]."""

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [R, K, draft_vocab] for hidden states [R, d], valid until the next call."""
        ...


class MedusaHeads(nn.Module):
    """All heads as one module: forward(hidden [..., d]) -> logits [..., K, draft_vocab].

    Parameters, stacked so that all heads are one matrix product:

        blocks    [layers, K, d, d]     residual blocks, as in nn.Linear [out, in]
        biases    [layers, K, d]        None if config.bias is False
        lm_heads  [K, draft_vocab, d]   None if config.own_lm_head is False: use `borrow`

    token_map int64 [draft_vocab]: target id of each id that the heads can draft (0..V-1 unless truncated).

    Blocks and biases of a new module are zero, as at the start of training in the reference implementation.
    """

    token_map: Tensor  # int64 [draft_vocab]
    _borrowed: Tensor | None  # [draft_vocab, d]

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = c = config
        self.blocks = nn.Parameter(torch.zeros(c.layers, c.heads, c.hidden_size, c.hidden_size))
        self.biases = nn.Parameter(torch.zeros(c.layers, c.heads, c.hidden_size)) if c.bias else None
        self.lm_heads = nn.Parameter(torch.zeros(c.heads, c.width, c.hidden_size)) if c.own_lm_head else None
        self.register_buffer("token_map", torch.arange(c.width, device="cpu"))
        self.register_buffer("_borrowed", None, persistent=False)

    def borrow(self, lm_head: Tensor) -> MedusaHeads:
        """Use the target's lm_head [V, d], or its rows [draft_vocab, d], in every head; returns self."""
        if len(lm_head) != self.config.width:
            lm_head = lm_head[self.token_map.to(lm_head.device)]
        self._borrowed = lm_head.detach().to(self.blocks)
        return self

    def start_from(self, lm_head: Tensor) -> MedusaHeads:
        """Initialise each head with a copy of the target's lm_head [V, d], or borrow it; returns self."""
        if self.lm_heads is None:
            return self.borrow(lm_head)
        with torch.no_grad():
            self.lm_heads.copy_(lm_head[self.token_map.to(lm_head.device)].expand_as(self.lm_heads))
        return self

    def select_vocabulary(self, ids: Tensor) -> None:
        """Make `ids`, int64 [draft_vocab], the target ids that the heads can draft. Call it before `borrow` and
        `start_from`."""
        self.token_map.copy_(ids)

    @property
    def has_lm_head(self) -> bool:
        return self.lm_heads is not None or self._borrowed is not None

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def lm_head(self) -> Tensor:
        """The lm_heads in use: [K, draft_vocab, d], or [draft_vocab, d] if borrowed."""
        head = self._borrowed if self.lm_heads is None else self.lm_heads
        if head is None:
            raise PairError("these Medusa heads have no lm_head of their own", fix="borrow the target's first")
        return head

    def states(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of the heads, [..., K, d], for the target's hidden states [..., d]."""
        c = self.config
        x = hidden.unsqueeze(-2).expand(*hidden.shape[:-1], c.heads, c.hidden_size)  # [..., K, d]
        for layer in range(c.layers):
            if layer == 0:  # every head reads the same state: one product with the stacked matrices
                y = F.linear(hidden, self.blocks[0].flatten(0, 1)).unflatten(-1, (c.heads, c.hidden_size))
            else:
                y = _each(x, self.blocks[layer])
            if self.biases is not None:
                y = y + self.biases[layer]
            x = x + F.silu(y)
        return x

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., K, draft_vocab] for the result of `states`, [..., K, d]."""
        return F.linear(states, self.lm_head) if self.lm_heads is None else _each(states, self.lm_heads)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., K, draft_vocab] for hidden states [..., d]. Draft id j is target id token_map[j]."""
        return self.logits(self.states(hidden))


def _each(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply by each head's matrix: x [..., K, d], weights [K, out, d] -> [..., K, out]."""
    rows = x.reshape(-1, *x.shape[-2:]).transpose(0, 1)  # [K, M, d]
    y = torch.bmm(rows, weights.transpose(1, 2))  # [K, M, out]
    return y.transpose(0, 1).reshape(*x.shape[:-1], weights.shape[1])
