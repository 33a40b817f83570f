from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from slipstream.core.costs import CostCurve
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.drafters.costs import measure_draft_costs
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.scripted import RandomDrafter
from slipstream.targets.toy import ToyTarget
from tests.targets.test_costs import Charging, Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("slipstream.core.step.perf_counter", clock)
    return clock


class Slow(RandomDrafter):
    """Proposing n guesses takes 2 n, observing 1."""

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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_costs_are_those_of_proposing_and_observing(clock: Clock, temperature: float) -> None:
    drafter, target = Slow(clock), Charging(clock, vocab=8)
    curve = measure_draft_costs(target, drafter, (1, 3, 5), temperature=temperature)
    assert curve.rows == (1, 3, 5)
    assert curve.seconds == (3.0, 7.0, 11.0)
    assert not target._slots
    assert len(drafter.released) == 1


def test_what_the_target_takes_beyond_its_curve_counts_where_the_curve_is_known(clock: Clock) -> None:
    """The toy charges rows + 10 a forward; the curve that is handed in says rows + 7."""
    curve = measure_draft_costs(Charging(clock, vocab=8), Slow(clock), (1, 3), costs=CostCurve((1, 2), (8.0, 9.0)))
    assert curve.seconds == (3.0 + 3.0, 7.0 + 3.0)


def test_a_drafter_that_takes_no_time_still_has_a_curve(clock: Clock) -> None:
    curve = measure_draft_costs(ToyTarget(8), NoDrafter(), (1, 3))
    assert 0 < curve(3) < 1e-6
