"""The budget of a training run, its learning rate (warmup, stable, decay: WSD), and progress lines.

WSD (Hu et al. 2024, arXiv 2404.06395, section 4): the learning rate is constant until the last part of the budget, so a
run can be extended, or ended earlier, by resuming it with another budget.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.templates.sizes import duration

PAUSE = 10.0
"""Seconds between two progress lines."""


@dataclass
class Progress:
    """The JSON state of a run: everything that a resume needs besides weights and optimiser state.

    budget   budget of the last resumed part of the run, in tokens or seconds.
    decayed  how much was spent when the decay over an earlier budget ended.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    budget: float | None = None
    decayed: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)


class Schedule:
    """Warmup-stable-decay over a budget of tokens or seconds. If a run continues with more budget after its decay, the
    learning rate decays over the complete additional budget."""

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
        if progress.budget is not None and self.spent >= progress.budget:
            progress.decayed = self.spent
        progress.budget = self.budget

    @property
    def spent(self) -> float:
        return float(self.progress.tokens) if self.by_tokens else self.progress.seconds

    @property
    def share(self) -> float:
        """Spent share of the budget."""
        return min(1.0, self.spent / self.budget)

    @property
    def done(self) -> bool:
        return self.share >= 1.0

    def seconds_left(self, rate: float | None = None) -> float | None:
        """Return the seconds until the budget is spent. rate: estimate of tokens per second, for the time before the
        first step; None: unknown."""
        left = max(0.0, self.budget - self.spent)
        if not self.by_tokens:
            return left
        if self.progress.seconds:
            rate = self.progress.tokens / self.progress.seconds
        return left / rate if rate else None

    def factor(self) -> float:
        """Return the factor on the learning rate for the next step."""
        begin = self.progress.decayed or (1 - self.decay_share) * self.budget
        warm = min(1.0, (self.progress.step + 1) / max(1, self.warmup_steps))
        if self.spent <= begin:
            return warm
        return warm * max(0.0, 1 - (self.spent - begin) / (self.budget - begin))


def make_counter(what: str, say: Callable[[str], None], unit: str = "tokens") -> Callable[[int, int], None]:
    """Return a function of (units done, units in total) that prints these numbers, the rate and the time left, at most
    every `PAUSE` seconds until all units are done. what: the beginning of the line, e.g. "the target wrote".

    The rate counts from the first call on: units before may be of an earlier run, or include compilation."""
    begun, first, said = 0.0, -1, -PAUSE

    def show(done: int, total: int) -> None:
        nonlocal begun, first, said
        now = time.monotonic()
        if now - said < PAUSE and done < total:
            return
        said = now
        if first < 0:
            begun, first = now, done
            return say(f"{what} {done:,} of {total:,} {unit}")
        rate = max(0.01, (done - first) / max(1e-3, now - begun))
        left = duration(max(0, total - done) / rate)
        say(f"{what} {done:,} of {total:,} {unit}, {rate:,.{rate < 10:d}f} {unit}/s, {left} left")

    return show


class Display:
    """Prints the progress of a run: before the first step, after it, and then every `PAUSE` seconds.

    rate  estimated tokens per second, with which the first line shows the time left.
    """

    def __init__(self, schedule: Schedule, rate: float | None = None) -> None:
        self.schedule, self.rate, self.shown = schedule, rate, -PAUSE
        self._print("training begins")

    def show(self, loss: float, rate: float, norm: float) -> None:
        progress = self.schedule.progress
        if time.monotonic() - self.shown >= PAUSE:
            self.shown = time.monotonic()
            done = f"step {progress.step}  {progress.tokens / 1e6:.2f}M tokens"
            self._print(f"{done}  loss {loss:.3f}  {rate:,.0f} tok/s  norm {norm:.2f}")

    def _print(self, text: str) -> None:
        left = self.schedule.seconds_left(self.rate)
        text += "" if left is None else f"  ETA {duration(left)}"
        print(f"{text}  {100 * self.schedule.share:.1f} %", flush=True)
