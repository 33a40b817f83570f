"""How far to draft: one answer for every drafter.

    fixed       as far as the budget allows
    confidence  until the chain's own probability has fallen below a threshold (as in llama.cpp's p-min and
                transformers' assistant_confidence_threshold)
    gain        as long as one more guess raises the expected tokens a second: its chance to stand, over what drafting
                and verifying it costs, must beat the round so far

All three look at the laws of one round, by which the drafter judges itself. What its guesses came to in earlier rounds
is the business of `bandit`, which sets the budget of any drafter by it, down to none; the two go together.

What fell short ends the draft *behind* it and is kept: dropping a sampled guess because its own probability was low
would bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.params import Strict, check_number
from slipstream.errors import ParameterError, did_you_mean

KINDS = ("fixed", "confidence", "gain")


@dataclass(frozen=True)
class Control(Strict):
    """kind        one of `KINDS`.
    threshold   confidence only: go on while the product of the guesses' probabilities is at least this, in [0, 1).
    draft_cost  gain only: what drafting one more guess costs, as a share of a plain step of the target.
    row_cost    gain only: what verifying one more guess costs, likewise (see `CostCurve.relative`).
    """

    kind: str = "fixed"
    threshold: float = 0.3
    draft_cost: float = 0.1
    row_cost: float = 0.05

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ParameterError(f"control is {self.kind!r}", fix=did_you_mean(self.kind, KINDS))
        if not 0 <= self.threshold < 1:
            raise ParameterError(f"threshold is {self.threshold!r}, must be in [0, 1)")
        check_number("draft_cost", self.draft_cost, 0.0, float("inf"))
        check_number("row_cost", self.row_cost, 0.0, float("inf"))

    def more(self, stands: Seq[float]) -> bool:
        """Whether to draft another guess behind those drafted so far.

        stands  for each guess so far, the estimated chance that it and all before it stand (non-increasing).
        """
        if self.kind == "fixed" or not stands:
            return True
        if self.kind == "confidence":
            return stands[-1] >= self.threshold
        each = self.draft_cost + self.row_cost
        if each <= 0:
            return True
        n = len(stands)
        # The next guess's conditional chance is not known before it is drawn: the chain's mean so far stands in.
        gain = stands[-1] * stands[-1] ** (1 / n)
        tokens, spent = 1 + sum(stands), 1 + n * each
        return gain / each > tokens / spent
