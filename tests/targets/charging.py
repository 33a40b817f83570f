"""Toy targets whose forward passes take a given time on a simulated clock."""

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from tests.targets.toy import ToyTarget


class Clock:
    """A clock that only advances by explicit calls."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Charging(ToyTarget):
    """A forward pass over n rows takes 10 + n, the first one with n rows 1000 more."""

    def __init__(self, clock: Clock, **options: int):
        super().__init__(**options)  # type: ignore[arg-type]
        self.clock, self.known = clock, set[int]()

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        rows = len(seqs) + len(draft)
        self.clock.now += 10.0 + rows + (0.0 if rows in self.known else 1000.0)
        self.known.add(rows)
        return super().run(seqs, draft, taps)


class Preparing(Charging):
    """A forward pass with another number of rows than the one before takes 5 more."""

    before = 0

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        rows = len(seqs) + len(draft)
        self.clock.now += 0.0 if rows == self.before else 5.0
        self.before = rows
        return super().run(seqs, draft, taps)
