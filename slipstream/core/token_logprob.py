"""`TokenLogprob`: how probable the target found a token. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of one emitted token under the target's own logits, before any warping, and the
    `top` most likely tokens with theirs, most likely first."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
