"""Are two greedy texts the same, and if not, could rounding alone have parted them?

In float32 a row of logits that is computed among others rounds differently from one computed alone. Where the
target's two likeliest tokens are closer than that, either may win. Such a near-tie is reported, never hidden; any
other difference is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.targets.base import Target


@dataclass(frozen=True)
class Divergence:
    """Where two outputs part.

    position  index of the first differing output token.
    margin    the target's logit of its likeliest token there, less that of the second.
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


def divergence(target: Target, prompt: Seq[int], plain: Seq[int], other: Seq[int], rows: int = 5) -> Divergence | None:
    """Compare the outputs of plain decoding and of another method; None if they are equal.

    rows: how many tokens one pass of the other method checked.
    """
    if list(plain) == list(other):
        return None
    shared = (i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b)
    position = next(shared, min(len(plain), len(other)))
    before = [*prompt, *plain[:position]]
    alone, among, prefilled = (_logits(target, before, n) for n in (0, rows - 1, None))
    best = alone.topk(2).values
    noise = max(float((alone - other).abs().max()) for other in (among, prefilled))
    return Divergence(position, float(best[0] - best[1]), noise)


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
