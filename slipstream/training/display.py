"""Progress display of a training run, and stopping it by signal."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from slipstream.training.schedule import Progress, Schedule


class StopSignal:
    """Turns Ctrl-C and SIGTERM into a flag, so that the loop can save and exit between two steps."""

    def __init__(self) -> None:
        self.raised = False
        self._old: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.raised = True

    def __enter__(self) -> StopSignal:
        try:
            self._old = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals are handled elsewhere
            self._old = {}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


class Display:
    """A rich progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, schedule: Schedule, every: int = 20) -> None:
        self.schedule, self.every = schedule, every
        self.bar: Any = None
        if sys.stdout.isatty():
            from rich import progress as rich

            columns = (
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.TextColumn("{task.percentage:.1f}%"),
            )
            self.bar = rich.Progress(*columns, rich.TimeRemainingColumn())
            self.task = self.bar.add_task("training", total=1.0)
            self.bar.start()

    def show(self, progress: Progress, loss: float, rate: float, norm: float) -> None:
        share = self.schedule.share
        eta = progress.seconds * (1 - share) / max(share, 1e-9) / 60
        text = f"step {progress.step}  {progress.tokens / 1e6:.2f}M tokens  loss {loss:.3f}  {rate:,.0f} tok/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=share, description=text)
        elif progress.step % self.every == 0:
            print(f"{text}  norm {norm:.2f}  {100 * share:.1f} %  ETA {eta:.0f} min", flush=True)

    def say(self, text: str) -> None:
        (self.bar.console.print if self.bar is not None else print)(text)
        sys.stdout.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
