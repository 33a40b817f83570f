"""`Turns`: a lock for objects that several Python threads use in turn; a fork waits for it. `short_turns` shortens
turns.

A child process has none of its parent's other threads. If such a thread is in the middle of a step at the fork, its
lock is never released in the child, and the data of the step is only half written there. So a fork waits until no step
runs.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref


def short_turns() -> None:
    """Let a thread compute for only 0.5 ms while another waits for the interpreter. With Python's default of 5 ms, each
    token of a small request would be late while another thread reads a large request."""
    sys.setswitchinterval(5e-4)


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


class Turns:
    """A re-entrant lock, used as `with turns:`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> Turns:
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()


_taken: list[Turns] = []  # locks taken by the thread that forks


def _before_fork() -> None:
    for turns in list(_all):
        turns.__enter__()
        _taken.append(turns)


def _after_fork() -> None:
    while _taken:
        _taken.pop().__exit__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
