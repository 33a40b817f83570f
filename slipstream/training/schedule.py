"""The budget of a training run and the learning rate over it: warmup, stable, decay.

WSD (Hu et al. 2024, arXiv 2404.06395, section 4): the rate stays constant until the last share of the budget, so
a run can be extended, or its decay started early, at any time.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """The JSON state of a run: all that a resume needs in addition to weights and optimiser state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decay_from: float | None = None  # in units of the budget (tokens or seconds)
    decay_span: float | None = None
    counters: dict[str, int] = field(default_factory=dict)


class Schedule:
    """Warmup-stable-decay over a budget of tokens or of seconds."""

    def __init__(
        self,
        progress: Progress,
        budget_tokens: int | None,
        budget_minutes: float | None,
        decay_share: float,
        warmup_steps: int,
    ) -> None:
        self.progress, self.decay_share, self.warmup_steps = progress, decay_share, warmup_steps
        self.by_tokens = budget_tokens is not None
        self.budget = float(budget_tokens) if budget_tokens is not None else 60.0 * (budget_minutes or 0.0)

    @property
    def spent(self) -> float:
        return float(self.progress.tokens) if self.by_tokens else self.progress.seconds

    @property
    def end(self) -> float:
        """Where the budget ends, in its unit: earlier after an early decay."""
        if self.progress.decay_from is not None and self.progress.decay_span is not None:
            return self.progress.decay_from + self.progress.decay_span
        return self.budget

    @property
    def share(self) -> float:
        """Spent share of the budget."""
        return min(1.0, self.spent / self.end)

    def seconds_left(self, rate: float | None = None) -> float | None:
        """Seconds until the budget is spent. rate: tokens per second while no step was done; None: unknown."""
        left = max(0.0, self.end - self.spent)
        if not self.by_tokens:
            return left
        if self.progress.seconds:
            rate = self.progress.tokens / self.progress.seconds
        return left / rate if rate else None

    def start_decay(self, at: float | None = None) -> None:
        """Start the decay at a point of the budget (default: now). Later calls do nothing."""
        if self.progress.decay_from is None:
            self.progress.decay_from = self.spent if at is None else at
            self.progress.decay_span = self.decay_share * self.budget

    def extend(self) -> None:
        """Called on resume: if the decay is over but budget is left, decay again over the rest."""
        progress = self.progress
        if progress.decay_from is not None and self.share >= 1.0 and self.budget > self.spent:
            progress.decay_from, progress.decay_span = self.spent, self.budget - self.spent

    def factor(self) -> float:
        """Multiplier of the learning rate for the next step; starts the decay when it is time."""
        progress = self.progress
        planned = (1 - self.decay_share) * self.budget
        if self.spent >= planned:
            self.start_decay(planned)
        warm = min(1.0, (progress.step + 1) / max(1, self.warmup_steps))
        if progress.decay_from is None or not progress.decay_span:
            return warm
        return warm * max(0.0, 1 - (self.spent - progress.decay_from) / progress.decay_span)

    @property
    def done(self) -> bool:
        return self.share >= 1.0
