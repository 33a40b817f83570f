"""Toy targets whose forwards take a stated time on a clock of their own."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.targets.toy import ToyTarget


class Clock:
    """Time stands still but for what is charged."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Charging(ToyTarget):
    """A forward over n rows takes 10 + n, the first of each n a thousand more."""

    def __init__(self, clock: Clock, **options: int):
        super().__init__(**options)  # type: ignore[arg-type]
        self.clock, self.known = clock, set[int]()

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        rows = len(seqs) + len(draft)
        self.clock.now += 10.0 + rows + (0.0 if rows in self.known else 1000.0)
        self.known.add(rows)
        return super().run(seqs, draft, taps)


class Preparing(Charging):
    """Another number of rows than in the forward before takes 5 more."""

    before = 0

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        rows = len(seqs) + len(draft)
        self.clock.now += 0.0 if rows == self.before else 5.0
        self.before = rows
        return super().run(seqs, draft, taps)
