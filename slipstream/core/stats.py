"""Counts tokens and steps while decoding. Each figure is defined once, here.

steps             steps in which the target ran for this sequence, prefill included. Of several plain steps in one call
                  (see `plain`), each step that gave a token counts.
proposed          draft tokens that were verified. Draft tokens after a stop do not count.
accepted          draft tokens that were accepted.
acceptance rate   accepted / proposed.
mean acceptance length (tau)   output tokens / steps, the bonus or resampled token included.
histogram         histogram[i] = steps in which exactly i draft tokens were accepted.
by position       for each depth j: of the steps that drafted at least j deep, how many accepted a token at depth j.
undrafted         steps with an empty draft (no n-gram matched, prefill, speculation off).

Invariants: sum(histogram) == steps; sum(i * histogram[i]) == accepted; tokens == accepted + steps, less one if the
sequence ended on a draft token (then the target added no token of its own).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("draft", "target", "verify", "host")
NUMBERS = ("steps", "tokens", "proposed", "accepted", "undrafted", "drafter_faults")
COUNTERS = (*NUMBERS, "histogram", "drafted_at", "accepted_at")


@dataclass
class SpecStats:
    """Counters of one sequence, or the sums over several sequences.

    seconds  wall time by phase: draft (proposing and observing), target (forward and commit), verify (warping,
             rule and stops), host (the rest of the step). The time of a step is divided equally among its sequences.
    first_token_seconds  duration of the first step of the sequence.
    """

    steps: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    undrafted: int = 0
    drafter_faults: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    first_token_seconds: float | None = None

    def count(self, depths: Iterable[int], accepted: int, tokens: int) -> None:
        """Record one step. depths: of every verified draft token; accepted, tokens: how many were accepted and
        emitted."""
        depths = list(depths)
        self.steps += 1
        self.tokens += tokens
        self.proposed += len(depths)
        self.accepted += accepted
        self.undrafted += not depths
        self.histogram[accepted] += 1
        for depth in range(1, max(depths, default=0) + 1):
            self.drafted_at[depth] += 1
            self.accepted_at[depth] += depth <= accepted

    def count_plain(self, steps: int) -> None:
        """Record `steps` steps in which nothing was drafted: `count([], 0, 1)` for each."""
        self.steps += steps
        self.tokens += steps
        self.undrafted += steps
        self.histogram[0] += steps

    def add_seconds(self, seconds: Mapping[str, float], sharers: int) -> None:
        """Add the seconds of a step, by phase, divided equally among `sharers` sequences."""
        if self.first_token_seconds is None:
            self.first_token_seconds = sum(seconds.values())
        for phase, spent in seconds.items():
            self.seconds[phase] += spent / sharers

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """tokens / steps, bonus included; None before the first step."""
        return self.tokens / self.steps if self.steps else None

    @property
    def position_rates(self) -> list[float]:
        """For j = 1, 2, ...: of the steps that drafted at least j deep, the fraction that accepted one at depth j."""
        return [self.accepted_at[d] / self.drafted_at[d] for d in sorted(self.drafted_at)]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens divided by the time of the steps, prefill included."""
        return self.tokens / self.total_seconds if self.total_seconds else None

    def __add__(self, other: SpecStats) -> SpecStats:
        total = SpecStats(**{name: getattr(self, name) + getattr(other, name) for name in COUNTERS})
        total.seconds = {p: self.seconds[p] + other.seconds[p] for p in PHASES}
        return total

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived figures as plain JSON values."""
        return {
            **{name: getattr(self, name) for name in NUMBERS},
            "histogram": [self.histogram[i] for i in range(max(self.histogram, default=-1) + 1)],
            "position_rates": self.position_rates,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "seconds": dict(self.seconds),
            "first_token_seconds": self.first_token_seconds,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one emitted token under the target's own logits, before any warping. top: the most
    likely tokens, most likely first, each with its log-probability."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
