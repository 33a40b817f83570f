"""`StepSampling` says how a call that decodes several steps picks its tokens; `DecodedSteps` is what the call returns.

In targets, executors, EAGLE heads and drafters, this call is the method `decode_steps`.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ARGMAX_INV_TEMPERATURE = 1e30
"""inv_temperature of a greedy sequence in a batch with sampled sequences. Its softmax is then a point mass at the first
maximum, which a uniform number of 0 selects."""


TYPICAL_TOKENS = 128
"""Output length that `best_steps_per_call` assumes."""

CALL_BYTES = 18_000_000
"""Bytes of weights that can be read in the time that Python needs for a call (0.55 ms at 33 GB/s, measured)."""


def best_steps_per_call(weight_bytes: int, call_bytes: int = CALL_BYTES) -> int:
    """Number of plain decoding steps to run in one call. n steps save 1 - 1 / n of Python's overhead, but on average
    (n - 1) / 2 steps are wasted after the end of the text. Returns the best n for outputs of TYPICAL_TOKENS tokens: 1
    for large models, at most 12."""
    return max(1, min(12, round(math.sqrt(2 * TYPICAL_TOKENS * call_bytes / weight_bytes))))


@dataclass(frozen=True, eq=False)
class Worth:
    """Decides after which draft token drawing ends, by the tokens' confidence: the highest probability of the softmax
    at the sequence's temperature (at temperature 1 if it is greedy). Looking at the drawn token instead would bias the
    output.

    rates  float64 [B, C]: rates[b, c] is the acceptance rate of sequence b's draft tokens whose confidence is in
           [c / C, (c + 1) / C).
    least  float64 [B, K]: after token j the call continues if, for any sequence, the product of the rates of its tokens
           0..j reaches this bound. The bound is infinite from the last token that a sequence may draft.
    """

    rates: np.ndarray
    least: np.ndarray


@dataclass(frozen=True, eq=False)
class StepSampling:
    """How K tokens are picked for each of B sequences. Without uniforms and noise, each is the first maximum of its
    logits.

    inv_temperature  float64 [B]; None: 1 for every sequence.
    uniforms  [K, B] in [0, 1): picks the first token whose cumulative softmax(logits * inv_temperature) exceeds the
              number.
    noise     [K, B, V'], or a shape that broadcasts to it: picks the first maximum of logits * inv_temperature + noise.
              With Gumbel noise this is a sample of the softmax.
    vocab     ids from `vocab` on are never picked; None: all V' ids may be picked.
    worth     may end the call before K tokens; None: all K are picked. Some implementations ignore it.
    """

    inv_temperature: Tensor | None = None
    uniforms: Tensor | None = None
    noise: Tensor | None = None
    vocab: int | None = None
    worth: Worth | None = None

    @cached_property
    def kind(self) -> str:
        """The way tokens are picked: "maximum", "uniforms" or "noise"."""
        return "uniforms" if self.uniforms is not None else "maximum" if self.noise is None else "noise"

    def pick(self, logits: Tensor, j: int) -> Tensor:
        """Pick tokens [B] of step j from logits [B, V'], computing in the dtype of the logits."""
        x = logits[:, : self.vocab]
        if self.inv_temperature is not None:
            x = x * self.inv_temperature.to(x)[:, None]
        if self.uniforms is not None:
            total = torch.softmax(x, -1).cumsum(-1)
            return (total <= self.uniforms[j].to(x)[:, None]).sum(-1).clamp(max=x.shape[-1] - 1)
        return (x if self.noise is None else x + self.noise[j].to(x)[..., : self.vocab]).argmax(-1)


ARGMAX = StepSampling()


class DecodedSteps(NamedTuple):
    """K tokens of each of B sequences; fewer than asked for if `StepSampling.worth` ended the call.

    tokens  int64 [K, B]. logits: [K, B, V'], unchanged. Both valid until the next call.
    probs   float64 [K, B, V']: the distribution from which each token was drawn. None if the call took the first
            maximum, or drew in the dtype of the logits. The caller may keep this tensor.
    hidden  if the call ended at an early exit: the residual stream there, [M, d], of the tokens that were pending.
    later   the same for the new tokens, [K, B, d]. `hidden` and `later` are valid until the next call.
    confidence  float64 [K, B] (see `Worth`), if the call computed it.
    states  tap -> [K, B, d]: hidden states of the tokens that the call processed; the state at k belongs to the token
            before new token k. The caller may keep these tensors.
    """

    tokens: Tensor
    logits: Tensor
    probs: Tensor | None = None
    hidden: Tensor | None = None
    later: Tensor | None = None
    confidence: Tensor | None = None
    states: dict[int, Tensor] | None = None
