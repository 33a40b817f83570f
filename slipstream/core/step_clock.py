"""`StepClock`: where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from time import perf_counter
from types import TracebackType
from typing import ParamSpec, TypeVar

from slipstream.core.sequence import Sequence
from slipstream.core.stats import PHASES

P = ParamSpec("P")
T = TypeVar("T")


class StepClock:
    """Times the calls of a step by phase (see `SpecStats.seconds`) and shares the whole among the sequences at the end:

        with StepClock(seqs) as clock:
            draft = clock("draft", drafter.propose, seqs, budgets)

    What is not timed as another phase is "host". A step that raises is not counted.
    """

    __slots__ = ("_began", "_seqs", "seconds")

    def __init__(self, seqs: Seq[Sequence]):
        self._seqs = seqs
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def __call__(self, phase: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """call(*args), timed as this phase."""
        began = perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds[phase] += perf_counter() - began

    def __enter__(self) -> StepClock:
        self._began = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.seconds["host"] = perf_counter() - self._began - sum(self.seconds.values())
            for seq in self._seqs:
                seq.stats.add_seconds(self.seconds, len(self._seqs))
