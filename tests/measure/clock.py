"""Fake clocks for tests of results that depend on measured times. The results are the same on a busy machine, and no
test has to wait."""

import pytest

READERS = ("slipstream.core.step", "slipstream.measure.arms", "slipstream.targets.target_costs")
"""Modules that read the clock."""


class Clock:
    """A clock on which time passes only by `sleep`, and by a microsecond with each reading, so that no duration is
    0."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        """Make the modules in READERS read this clock."""
        for module in READERS:
            patch.setattr(f"{module}.perf_counter", self.read)


class Still:
    """A clock that advances only by explicit calls."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()
sleep = CLOCK.sleep
