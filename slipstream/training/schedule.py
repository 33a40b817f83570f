"""The budget of a training run, the learning rate over it (warmup, stable, decay), and the display of its progress.

WSD (Hu et al. 2024, arXiv 2404.06395, section 4): the rate stays constant until the last share of the budget, so
a run can be extended, or its decay started early, at any time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from slipstream.core.sizes import duration

PAUSE = 10.0
"""Seconds between two lines, where there is no terminal."""


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


def counted(what: str, say: Callable[[str], None] = print) -> Callable[[int, int], None]:
    """A function of (tokens done, tokens in total) that says both with the rate and the time left, at most every
    `PAUSE` seconds. what: a sentence's beginning, e.g. "the target wrote".

    The rate begins at the first call: what came before may be of an earlier run, or the compilation of kernels."""
    begun, first, said = 0.0, -1, -PAUSE

    def show(done: int, total: int) -> None:
        nonlocal begun, first, said
        now = time.monotonic()
        if now - said < PAUSE and done < total:
            return
        said = now
        if first < 0:
            begun, first = now, done
            return say(f"{what} {done:,} of {total:,} tokens")
        rate = max(1.0, (done - first) / max(1e-3, now - begun))
        left = duration(max(0, total - done) / rate)
        say(f"{what} {done:,} of {total:,} tokens, {rate:,.0f} tokens/s, {left} left")

    return show


class Display:
    """with Display(schedule) as display: a progress bar on a terminal; elsewhere a line at the first step, and then one
    every `PAUSE` seconds.

    rate  estimated tokens per second, for the time that is left before a step was done.
    """

    def __init__(self, schedule: Schedule, rate: float | None = None) -> None:
        self.schedule, self.rate = schedule, rate
        self.shown = -PAUSE
        self.bar: Any = None

    def __enter__(self) -> Display:
        if sys.stdout.isatty():
            from rich import progress as rich

            columns = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TextColumn("{task.percentage:.1f}%")
            self.bar = rich.Progress(*columns)
            self.task = self.bar.add_task("", total=1.0)
            self.bar.start()
        self._update("training begins")
        return self

    def __exit__(self, kind: type | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, progress: Progress, loss: float, rate: float, norm: float) -> None:
        text = f"step {progress.step}  {progress.tokens / 1e6:.2f}M tokens  loss {loss:.3f}  {rate:,.0f} tok/s"
        if self.bar is not None or time.monotonic() - self.shown >= PAUSE:
            self.shown = time.monotonic()
            self._update(f"{text}  norm {norm:.2f}")

    def _update(self, text: str) -> None:
        share, left = self.schedule.share, self.schedule.seconds_left(self.rate)
        text += "" if left is None else f"  ETA {duration(left)}"
        if self.bar is not None:
            self.bar.update(self.task, completed=share, description=text)
        else:
            print(f"{text}  {100 * share:.1f} %", flush=True)

    def say(self, text: str) -> None:
        (self.bar.console.print if self.bar is not None else print)(text)
        sys.stdout.flush()
