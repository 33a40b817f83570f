"""Are two greedy texts the same, and if not, could rounding alone have parted them?

In float32 a row of logits that is computed among others rounds differently from one computed alone. Where the
target's two likeliest tokens are closer than that, either may win. Such a near-tie is reported, never hidden; any
other difference is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target


@dataclass(frozen=True)
class Divergence:
    """Where two outputs part.

    position  index of the first differing output token.
    margin    the target's logit of its likeliest token there, less that of the token that the other text took instead
              (in a near-tie the second likeliest; also taken where one text merely ended earlier).
    noise     how far the logits of that position move with the rows that are computed beside it (largest |difference|).
    """

    position: int
    margin: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Both logits may be off by the noise, so up to twice of it is rounding."""
        return self.margin <= 2 * self.noise

    def __str__(self) -> str:
        verdict = "a near-tie that rounding decides" if self.near_tie else "too far apart for rounding: this is a bug"
        return (
            f"token {self.position}: the target's two best logits are {self.margin:.2g} apart, rounding moves them by "
            f"{self.noise:.2g}: {verdict}"
        )


Scores = Callable[[Tensor, Seq[int]], Tensor]
"""(logits [V], output before them) -> [V], of which the first maximum is the token that is said."""


def divergence(
    target: Target,
    prompt: Seq[int],
    plain: Seq[int],
    other: Seq[int],
    rows: int = 5,
    scores: Scores = lambda logits, output: logits,
) -> Divergence | None:
    """Compare the outputs of plain decoding and of another method; None if they are equal.

    rows    how many tokens one pass of the other method checked.
    scores  for texts that follow something else than the bare logits.
    """
    if list(plain) == list(other):
        return None
    shared = (i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b)
    position = next(shared, min(len(plain), len(other)))
    before = [*prompt, *plain[:position]]
    alone, among, prefilled = (
        scores(_logits(target, before, n), plain[:position]) for n in (0, rows - 1, None)
    )  # [V] each
    noise = max(distance(alone, row) for row in (among, prefilled))
    taken = alone[other[position]] if position < min(len(plain), len(other)) else alone.topk(2).values[1]
    return Divergence(position, float(alone.max() - taken), noise)


def distance(a: Tensor, b: Tensor) -> float:
    """Largest |a - b| of two rows of scores; what both forbid (-inf) does not count, what one forbids is infinite."""
    return float(torch.where(a == b, 0.0, (a - b).abs()).max())


def _logits(target: Target, tokens: Seq[int], beside: int | None) -> Any:
    """Logits [V] behind `tokens`, the last one run with `beside` guesses, or (None) with all others, as a prompt."""
    seq = Sequence(list(tokens), context=target.context)
    try:
        if beside is not None and len(tokens) > 1:
            seq.tokens = list(tokens[:-1])
            target.run([seq], Draft.empty(1, target.device))
            target.commit([seq], [[]])
            seq.kv_len = len(seq.tokens)
            seq.tokens = list(tokens)
        room = max(0, min(beside or 0, target.context - len(tokens)))
        out = target.run([seq], Draft.chains([[int(tokens[-1])] * room], device=target.device))
        return out.logits[0].to(torch.float64).clone()
    finally:
        target.release(seq.id)
