"""When to stop drafting; the same options for every drafter.

    fixed       draft as many tokens as the budget allows
    confidence  stop when the probability of the chain falls below a threshold (as llama.cpp's p-min and transformers'
                assistant_confidence_threshold)
    gain        continue while one more draft token raises the expected tokens per second: its acceptance probability,
                divided by the cost of drafting and verifying it, must exceed the step's tokens per cost so far

All three use only the drafter's own probabilities in the current step, within the draft length that the engine chose.

The token that falls short is kept, and the draft ends *after* it: dropping a sampled draft token because its own
probability was low would bias the output.
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
    threshold   confidence only: continue while the product of the draft tokens' probabilities is at least this, in
                [0, 1).
    draft_cost  gain only: cost of drafting one more token, as a share of a decode step of the target.
    row_cost    gain only: cost of verifying one more token, likewise (see `CostCurve.relative`).
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

    def more(self, accepted: Seq[float]) -> bool:
        """Whether to draft another token.

        accepted  for each draft token so far, the estimated probability that it and all before it are accepted
                  (non-increasing).
        """
        if self.kind == "fixed" or not accepted:
            return True
        if self.kind == "confidence":
            return accepted[-1] >= self.threshold
        each = self.draft_cost + self.row_cost
        if each <= 0:
            return True
        n = len(accepted)
        # The next token's conditional probability is unknown before it is drawn; the mean of the chain is used instead.
        gain = accepted[-1] * accepted[-1] ** (1 / n)
        tokens, spent = 1 + sum(accepted), 1 + n * each
        return gain / each > tokens / spent
