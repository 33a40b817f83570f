"""`limited`: a call that does not return is ended, and nothing else is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from slipstream.drafters import time_limit
from slipstream.drafters.time_limit import DraftTimeoutError, limited

LIMIT = 0.02


@pytest.fixture(autouse=True)
def _many_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LOOK_EVERY", 0.005)


def loop() -> None:
    while True:
        pass


def catch_all() -> None:
    while True:
        with suppress(Exception):
            loop()


def catch_even_more() -> None:
    """Swallows the first interruption."""
    try:
        loop()
    except BaseException:
        loop()


def wait() -> None:
    while True:
        time.sleep(0.001)


@pytest.mark.parametrize("hanging", [loop, catch_all, catch_even_more, wait])
def test_a_call_that_hangs_is_ended(hanging: Callable[[], None]) -> None:
    with pytest.raises(DraftTimeoutError, match=r"did not return within 0\.02 seconds"):
        limited(LIMIT, hanging)


def test_a_call_that_returns_gives_its_result_and_its_exception() -> None:
    assert limited(LIMIT, lambda a, *, b: (a, b), 1, b=2) == (1, 2)
    with pytest.raises(ZeroDivisionError):
        limited(LIMIT, lambda: 1 // 0)


def test_nothing_is_raised_after_the_call() -> None:
    """The call returns at about the moment at which it is interrupted: it ends in one of the two ways, and the code
    after it is never interrupted."""
    ended = set()
    for n in range(40):
        until = time.perf_counter() + LIMIT * (0.5 + 0.1 * n)

        def busy(until: float = until) -> int:
            while time.perf_counter() < until:
                pass
            return 1

        try:
            ended.add(limited(LIMIT, busy))
        except DraftTimeoutError:
            ended.add(0)
        for _ in range(200):  # an interruption that was on its way would arrive here
            pass
    assert ended == {0, 1}
    assert not time_limit._calls


def test_only_the_thread_that_hangs_is_interrupted() -> None:
    found: list[object] = []

    def other() -> None:
        until = time.perf_counter() + 4 * LIMIT
        while time.perf_counter() < until:
            pass
        found.append("whole")

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(DraftTimeoutError):
        limited(LIMIT, loop)
    thread.join()
    assert found == ["whole"]


def test_a_process_that_was_suspended_has_not_used_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are counted, not the clock: with rare looks, a call may be longer than its limit."""
    monkeypatch.setattr(time_limit, "LOOK_EVERY", 60.0)
    assert limited(LIMIT, lambda: time.sleep(2 * LIMIT)) is None
