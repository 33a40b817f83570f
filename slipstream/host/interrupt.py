"""Ctrl-C during generation or training: the current step finishes, then the work ends and keeps its results.

Stopping between steps leaves caches, files and the terminal in a consistent state. A second Ctrl-C stops at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence as Seq
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """with Interrupt() as interrupt: ... if interrupt.asked: break

    signals  signals to catch. note: written to standard error at the first signal. at_once: whether the first signal
             raises, too.

    Raises KeyboardInterrupt with the number of the signal."""

    def __init__(self, signals: Seq[int] = (signal.SIGINT,), note: str = "", at_once: bool = False) -> None:
        self.signals, self.note, self.at_once = signals, note, at_once
        self.number = 0
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.number > 0

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in self.signals}
        return self

    def __exit__(self, kind: type | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked or self.at_once:
            raise KeyboardInterrupt(number)
        self.number = number
        os.write(2, self.note.encode())  # the signal may have interrupted `print`
