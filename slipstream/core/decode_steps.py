"""`StepSampling` and `DecodedSteps`: how a call that decodes several steps picks its tokens, and what it returns.

Targets, executors, EAGLE heads and drafters all name such a call `decode_steps`.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ARGMAX_INV_TEMPERATURE = 1e30
"""inv_temperature of a greedy sequence among sampled ones: its distribution is then a point mass at the first maximum,
which a uniform of 0 finds."""


TYPICAL_TOKENS = 128
"""Output length that `best_steps_per_call` assumes."""

CALL_BYTES = 18_000_000
"""Bytes of weights that are read in the time of Python's overhead per call (0.55 ms at 33 GB/s, measured)."""


def best_steps_per_call(weight_bytes: int, call_bytes: int = CALL_BYTES) -> int:
    """Number of plain decoding steps to run in one call. n steps save 1 - 1 / n of Python's overhead, but on average
    (n - 1) / 2 steps are wasted after the end of the text. Returns the best n for TYPICAL_TOKENS tokens: 1 for large
    models, at most 12."""
    return max(1, min(12, round(math.sqrt(2 * TYPICAL_TOKENS * call_bytes / weight_bytes))))


@dataclass(frozen=True, eq=False)
class Worth:
    """Decides how far draft tokens are worth drawing, by their confidence: the highest probability of the softmax at
    the sequence's temperature (1 if it is greedy). To look at the drawn token instead would bias the output.

    rates  float64 [B, C]: acceptance rates of tokens with a confidence in [c / C, (c + 1) / C).
    least  float64 [B, K]: after token j the call goes on if the product of the rates up to it reaches this bound for
           any sequence. It is infinite from the last token that a sequence may have.
    """

    rates: np.ndarray
    least: np.ndarray


@dataclass(frozen=True, eq=False)
class StepSampling:
    """How K tokens of each of B sequences are picked. With neither uniforms nor noise: the first maximum.

    inv_temperature  [B], float64; None is 1 for all.
    uniforms  [K, B] in [0, 1): the first token whose cumulated softmax(logits * inv_temperature) exceeds it.
    noise     [K, B, V'], or what broadcasts to that: the first maximum of logits * inv_temperature + noise. Gumbel
              noise makes it a sample of the softmax.
    vocab     ids from here on are never picked; None: all V' may be.
    worth     when the call may end before K tokens; None: never. Not every call does.
    """

    inv_temperature: Tensor | None = None
    uniforms: Tensor | None = None
    noise: Tensor | None = None
    vocab: int | None = None
    worth: Worth | None = None

    @cached_property
    def kind(self) -> str:
        """How tokens are picked: "maximum", "uniforms" or "noise"."""
        return "uniforms" if self.uniforms is not None else "maximum" if self.noise is None else "noise"

    def pick(self, logits: Tensor, j: int) -> Tensor:
        """Tokens [B] of step j from logits [B, V'], in the logits' own precision."""
        x = logits[:, : self.vocab]
        if self.inv_temperature is not None:
            x = x * self.inv_temperature.to(x)[:, None]
        if self.uniforms is not None:
            total = torch.softmax(x, -1).cumsum(-1)
            return (total <= self.uniforms[j].to(x)[:, None]).sum(-1).clamp(max=x.shape[-1] - 1)
        return (x if self.noise is None else x + self.noise[j].to(x)[..., : self.vocab]).argmax(-1)


ARGMAX = StepSampling()


class DecodedSteps(NamedTuple):
    """K tokens of each of B sequences; fewer where they were not worth drawing.

    tokens  int64 [K, B]. logits: [K, B, V'], raw. Both valid until the next call.
    probs   float64 [K, B, V'] that each token was drawn from, if the call drew in float64; None if it took the first
            maximum, or drew in the logits' own precision. The caller's to keep.
    hidden  where the layers were left early, the residual stream there, [M, d] of the rows that were pending ...
    later   ... and [K, B, d] of the new tokens. Both valid until the next call.
    confidence  float64 [K, B] (see `Worth`), if the call computed it.
    states  tap -> [K, B, d]: hidden states of the tokens that were read, each the one before a new token. The caller's
            to keep.
    """

    tokens: Tensor
    logits: Tensor
    probs: Tensor | None = None
    hidden: Tensor | None = None
    later: Tensor | None = None
    confidence: Tensor | None = None
    states: dict[int, Tensor] | None = None
