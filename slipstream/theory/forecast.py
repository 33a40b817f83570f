"""Expected speed-up of speculation from acceptance rates and costs, with the assumptions behind it: tokens per step
divided by the cost of a step (Leviathan et al. 2211.17192, theorem 3.8, with the cost of verification). It holds for
long texts; `closed_forms.predict` also counts prefill and the shorter drafts at the end.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from slipstream.core.params import Strict, check_integer, check_number, integer, number, option
from slipstream.core.strict import JsonObject
from slipstream.errors import ParameterError
from slipstream.theory import closed_forms
from slipstream.theory.cost_curve import CostCurve

ASSUMED_ACCEPTANCE = 0.7
"""Acceptance rate if no source gives one. It is always shown as assumed."""

LONGEST_DRAFT = 16
"""Longest draft that is considered, unless another limit is given."""

WEIGHTS_READ = "memory-bound: costs by the bytes of weights read"


@dataclass(frozen=True)
class Rates(Strict):
    """Acceptance of draft tokens.

    by_position  share of the steps that accept the draft token at position 1, 2, ..., up to the longest draft.
    origin       source of the rates: "published", "assumed", "given".
    alpha        the one acceptance rate from which `by_position` follows, or None: every draft token is accepted with
                 this probability, independently of the others.
    """

    by_position: Seq[float]
    origin: str = "given"
    alpha: float | None = None

    def __post_init__(self) -> None:
        closed_forms.check_rates(self.by_position)

    @staticmethod
    def constant(alpha: float, origin: str = "given", longest: int = LONGEST_DRAFT) -> Rates:
        """Make rates from one acceptance rate in [0, 1] for every draft token. Raises ParameterError."""
        check_number("acceptance", alpha, 0.0, 1.0)
        return Rates(tuple(closed_forms.geometric_rates(alpha, longest)), origin, alpha)

    def up_to(self, draft_tokens: int) -> Rates:
        """Return the same rates, cut to drafts of at most `draft_tokens` (>= 1)."""
        return replace(self, by_position=tuple(self.by_position)[:draft_tokens])

    def __str__(self) -> str:
        if self.alpha is not None:
            return f"acceptance {self.alpha:.0%} at every position ({self.origin})"
        return f"acceptance {', '.join(f'{rate:.0%}' for rate in self.by_position)} by position ({self.origin})"


@dataclass(frozen=True)
class ForecastCosts(Strict):
    """Costs of a speculative step. The unit is one decode step of the same batch without speculation.

    c       cost of a draft token.
    target  seconds of the target's forward pass by rows; None: verifying draft tokens costs no more than a decode step.
    batch   number of sequences in a step.
    host    fixed additional cost of a speculative step.
    basis   where the costs come from, in a phrase.
    """

    c: float = option(0.05, check=number(0.0, float("inf")))
    target: CostCurve | None = None
    batch: int = option(1, check=integer(1))
    host: float = option(0.0, check=number(0.0, float("inf")))
    basis: str = "costs as given"

    def verify(self, draft_tokens: int) -> float:
        """Return the cost of the target's forward pass that verifies `draft_tokens` for each sequence."""
        return closed_forms.step_cost(draft_tokens, 0.0, self.target, self.batch)

    def step(self, draft_tokens: int) -> float:
        return closed_forms.step_cost(draft_tokens, self.c, self.target, self.batch, self.host)

    def assumptions(self, draft_tokens: int = 4) -> str:
        """Describe the costs in one line; the cost of verification is for `draft_tokens`."""
        verified = f"verifying {draft_tokens} draft tokens {self.verify(draft_tokens):.2f}"
        parts = [
            f"a draft token costs {self.c:.3g} decode steps, {verified}",
            *([f"the host adds {self.host:.3g}"] if self.host else []),
            *([f"batch {self.batch}"] if self.batch > 1 else []),
            self.basis,
        ]
        return "; ".join(parts)


@dataclass(frozen=True)
class Forecast(Strict):
    """The expected gain of speculation in long texts.

    draft_tokens  draft length; 0 if no length is faster than plain decoding.
    chosen        whether the length is the best of all lengths; False if it was given.
    """

    rates: Rates
    costs: ForecastCosts
    draft_tokens: int
    chosen: bool = False

    @property
    def tau(self) -> float:
        """Tokens per step, including the bonus token."""
        return closed_forms.expect_length(list(self.rates.by_position)[: self.draft_tokens])

    @property
    def step_cost(self) -> float:
        """The cost of a speculative step, in decode steps."""
        return self.costs.step(self.draft_tokens)

    @property
    def speedup(self) -> float:
        """Speed-up over plain decoding; 1 if `draft_tokens` is 0."""
        return self.tau / self.step_cost

    @property
    def break_even(self) -> float | None:
        """Smallest acceptance rate at which this length or, if the length was chosen, some length is no slower than
        plain decoding; None if no rate is high enough."""
        costs = self.costs
        lengths = range(1, len(self.rates.by_position) + 1) if self.chosen else [self.draft_tokens]
        evens = [closed_forms.break_even(k, costs.c, costs.target, costs.batch, costs.host) for k in lengths]
        return min((even for even in evens if even is not None), default=None)

    @property
    def assumptions(self) -> str:
        return f"{self.rates}; {self.costs.assumptions(self.draft_tokens or 1)}"

    def as_dict(self) -> JsonObject:
        names = ("draft_tokens", "tau", "step_cost", "speedup", "break_even", "assumptions")
        return {
            "acceptance": self.rates.alpha,
            "position_rates": list(self.rates.by_position),
            "c": self.costs.c,
            **{name: getattr(self, name) for name in names},
        }


def forecast(rates: Rates, costs: ForecastCosts, draft_tokens: int | None = None) -> Forecast:
    """Return the expected speed-up at a draft length, or at the best length up to the number of rates.

    Raises ParameterError if `draft_tokens` is longer than the rates."""
    if draft_tokens is None:
        best = closed_forms.best_length(rates.by_position, costs.c, costs.target, costs.batch, costs.host)
        return Forecast(rates, costs, best, chosen=True)
    check_integer("draft_tokens", draft_tokens, 1)
    if draft_tokens > len(rates.by_position):
        raise ParameterError(
            f"draft_tokens is {draft_tokens}, but {len(rates.by_position)} rates were given",
            why="acceptance at deeper positions is unknown",
            fix=f"choose at most {len(rates.by_position)} draft tokens",
        )
    return Forecast(rates, costs, draft_tokens)
