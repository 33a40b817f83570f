"""Rules of thumb that go around, beside what the closed form says.

A speed-up follows from three numbers: the acceptance rate, the draft length and the cost of a draft step. A rule that
names only one or two of them holds for some values of the others, at best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.core.params import Strict
from slipstream.core.theory import best_gamma, speedup
from slipstream.lab.known_pairs import CHAPTER, NOTEBOOK

SHOWN_COSTS = (0.02, 0.05, 0.1)
"""Draft costs for which each rule is worked out: a head or a draft fifty times smaller, a twentieth, a tenth."""

LONGEST = 64


@dataclass(frozen=True)
class RuleOfThumb(Strict):
    """At this acceptance rate (and draft length, if the rule names one), this speed-up."""

    text: str
    source: str
    alpha: float
    speedup: float
    gamma: int | None = None

    def at(self, c: float) -> tuple[int, float]:
        """(draft length, speed-up by the closed form) at this draft cost: the rule's length or the best one."""
        gamma = best_gamma(self.alpha, c, LONGEST) if self.gamma is None else self.gamma
        return gamma, speedup(self.alpha, gamma, c)

    @property
    def limit(self) -> float:
        """The speed-up at no draft cost; 1 / (1 - alpha) where the draft may be as long as one likes."""
        return 1 / (1 - self.alpha) if self.gamma is None else speedup(self.alpha, self.gamma, 0)

    @property
    def largest_cost(self) -> float | None:
        """The dearest draft at which the rule holds; None if it holds not even for free ones."""
        if self.at(0.0)[1] < self.speedup:
            return None
        low, high = 0.0, 1.0  # the speed-up falls with c
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if self.at(middle)[1] >= self.speedup else (low, middle)
        return low

    @property
    def holds(self) -> str:
        """When it does, in a phrase."""
        c = self.largest_cost
        if c is None:
            return f"never: {self.limit:.2f}x at c = 0"
        return f"c <= {c:.3f}, gamma {self.at(c)[0]}"

    def as_dict(self) -> dict[str, Any]:
        c = self.largest_cost
        worked = {str(cost): dict(zip(("gamma", "speedup"), self.at(cost), strict=True)) for cost in SHOWN_COSTS}
        return vars(self) | {
            "limit": self.limit,
            "holds_up_to_c": c,
            "holds_with_gamma": None if c is None else self.at(c)[0],
            "closed_form": worked,
        }


RULES_OF_THUMB = (
    RuleOfThumb("80%: about 3x", NOTEBOOK, 0.8, 3.0),
    RuleOfThumb("60%: about 2x", NOTEBOOK, 0.6, 2.0),
    RuleOfThumb("40%: about 1.5x", NOTEBOOK, 0.4, 1.5),
    RuleOfThumb("70%, 4 tokens: about 3x", CHAPTER, 0.7, 3.0, 4),
    *(RuleOfThumb(f"exact draft, {k} tokens: {k}x", CHAPTER, 1.0, float(k), k) for k in (2, 4, 8)),
)
"""An exact draft gives (k + 1) / (k c + 1): k at c = 1 / k^2, less where it is dearer, up to k + 1 where it is free."""
