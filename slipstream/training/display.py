"""Progress display of a training run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from slipstream.core.sizes import duration
from slipstream.training.schedule import Progress, Schedule

PAUSE = 10.0
"""Seconds between two lines, where there is no terminal."""


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
