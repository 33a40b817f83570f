"""A clock for tests of what is made of measured times: the same on a busy machine, and nothing has to wait."""

import pytest

READERS = ("slipstream.core.step", "slipstream.measure.arms", "slipstream.targets.target_costs")
"""Modules that measure."""


class Clock:
    """Only `sleep` lets time pass, and each reading, a microsecond: no duration is 0."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        """Let the modules that measure read this clock."""
        for module in READERS:
            patch.setattr(f"{module}.perf_counter", self.read)


class Still:
    """A clock that only advances by explicit calls."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()
sleep = CLOCK.sleep
