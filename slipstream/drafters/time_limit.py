"""`limited`: ends a call that does not return by itself.

A thread looks once a second at the calls that are limited, and interrupts the thread of a call that it has seen too
often. Looks are counted, not the clock: a process that was suspended has not used its time.

The interruption arrives between two Python instructions, so a loop inside a compiled function is not ended. The server
has another limit for that: `--engine-timeout`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from slipstream.errors import DraftError

P = ParamSpec("P")
R = TypeVar("R")

LOOK_EVERY = 1.0
"""Seconds between two looks."""


class DraftTimeoutError(DraftError):
    """A drafter took longer than it may."""


class _Interrupted(BaseException):
    """Raised in the thread of a call. No Exception, so that a drafter that catches all of those is ended, too."""


@dataclass(eq=False)
class _Call:
    """looks: how many are left; interrupted: whether it has been."""

    thread: int
    looks: int
    interrupted: bool = False


_guard = threading.Lock()
_calls: set[_Call] = set()
_watcher: threading.Thread | None = None


def limited(seconds: float, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """function(*args, **kwargs). Raises DraftTimeoutError if it has not returned after `seconds`, or soon after."""
    call = _Call(threading.get_ident(), max(1, round(seconds / LOOK_EVERY)))
    _begin(call)
    try:
        result = function(*args, **kwargs)
        _end(call)
    except _Interrupted:
        _end(call)
        raise DraftTimeoutError(f"the call did not return within {seconds:g} seconds") from None
    except BaseException:
        _end(call)
        raise
    return result


def _begin(call: _Call) -> None:
    global _watcher
    with _guard:
        _calls.add(call)
        if _watcher is None or not _watcher.is_alive():  # a process that was forked has none
            _watcher = threading.Thread(target=_watch, name="slipstream-time-limit", daemon=True)
            _watcher.start()


def _end(call: _Call) -> None:
    """After this, nothing is raised in the call's thread."""
    while True:
        try:
            with _guard:
                _calls.discard(call)
                if call.interrupted:
                    _raise_in(call.thread, None)
                return
        except _Interrupted:  # it was on its way
            continue


def _watch() -> None:
    while True:
        time.sleep(LOOK_EVERY)
        with _guard:
            for call in _calls:
                call.looks -= 1
                if call.looks < 0:  # again and again, in case it is caught
                    call.interrupted = True
                    _raise_in(call.thread, _Interrupted)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in another thread; None: take back one that has not arrived."""
    what = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
