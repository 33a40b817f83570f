"""`Draws` and `Drawn`: how a call that decodes several steps at once picks its tokens, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

COLD = 1e30
"""inv_temperature of a greedy sequence among sampled ones: its law is then a point mass at the first maximum, which a
uniform of 0 finds."""


@dataclass(frozen=True, eq=False)
class Draws:
    """For K steps of B sequences. With neither uniforms nor noise every pick is the first maximum.

    inv_temperature  [B], float64; None is 1 for all.
    uniforms  [K, B] in [0, 1): the first token whose cumulated softmax(logits * inv_temperature) exceeds it.
    noise     [K, B, V'], or what broadcasts to that: the first maximum of logits * inv_temperature + noise. Gumbel
              noise makes it a sample of the softmax.
    vocab     ids from here on are never picked; None: all V' may be.
    """

    inv_temperature: Tensor | None = None
    uniforms: Tensor | None = None
    noise: Tensor | None = None
    vocab: int | None = None

    @property
    def kind(self) -> str:
        """What a graph has to be made for: "maximum", "uniforms" or "noise"."""
        return "uniforms" if self.uniforms is not None else "maximum" if self.noise is None else "noise"

    def pick(self, logits: Tensor, j: int) -> Tensor:
        """Tokens [B] of step j from logits [B, V'], in the logits' own precision."""
        x = logits[:, : self.vocab]
        if self.inv_temperature is not None:
            x = x * self.inv_temperature.to(x)[:, None]
        if self.uniforms is not None:
            total = torch.softmax(x, -1).cumsum(-1)
            u = self.uniforms[j].to(x)[:, None]
            return (total <= u).sum(-1).clamp(max=x.shape[-1] - 1)
        return (x if self.noise is None else x + self.noise[j].to(x)[..., : self.vocab]).argmax(-1)


GREEDY = Draws()


class Drawn(NamedTuple):
    """K tokens of each of B sequences.

    tokens, logits  int64 [K, B] and [K, B, V'], raw; valid until the next run.
    laws            float64 [K, B, V'] that each was drawn from, if they were drawn in float64, the first maximum aside;
                    None if they were drawn in the logits' own precision. The caller's to keep.
    """

    tokens: Tensor
    logits: Tensor
    laws: Tensor | None = None
