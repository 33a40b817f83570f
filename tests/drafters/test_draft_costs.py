from collections.abc import Sequence as Seq

import pytest

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.drafters.draft_costs import measure_draft_costs
from slipstream.drafters.none import NoDrafter
from tests.drafters.scripted_drafters import RandomDrafter
from tests.targets.charging import Charging, Clock
from tests.targets.toy import ToyTarget


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("slipstream.core.step.perf_counter", clock)
    return clock


class Slow(RandomDrafter):
    """Proposing n draft tokens takes 2 n, observing 1."""

    def __init__(self, clock: Clock):
        super().__init__(8)
        self.clock, self.released = clock, list[int]()

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        self.clock.now += 2 * sum(budget)
        return super().propose(seqs, budget)

    def observe(self, *args: object) -> None:
        self.clock.now += 1

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)


def test_draft_costs_are_those_of_proposing_and_observing(clock: Clock) -> None:
    drafter, target = Slow(clock), Charging(clock, vocab=8)
    curve = measure_draft_costs(target, drafter, (1, 3, 5))
    assert curve.rows == (1, 3, 5)
    assert curve.seconds == (3.0, 7.0, 11.0)
    assert not target._slots
    assert len(drafter.released) == 1


def test_a_drafter_that_takes_no_time_still_has_a_curve(clock: Clock) -> None:
    curve = measure_draft_costs(ToyTarget(8), NoDrafter(), (1, 3))
    assert 0 < curve(3) < 1e-6


def test_lengths_for_which_the_context_has_no_room_are_left_out() -> None:
    target = ToyTarget(8, context=64)
    curve = measure_draft_costs(target, RandomDrafter(8), (1, 2, 4, 8, 12))
    assert curve.rows == (1, 2, 4)
