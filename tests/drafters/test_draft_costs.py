from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.drafters.draft_costs import measure_draft_costs
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.scripted import RandomDrafter
from slipstream.theory.cost_curve import CostCurve
from tests.targets.charging import Charging, Clock, Preparing
from tests.targets.toy import ToyTarget


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("slipstream.core.step_clock.perf_counter", clock)
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_costs_are_those_of_proposing_and_observing(clock: Clock, temperature: float) -> None:
    drafter, target = Slow(clock), Charging(clock, vocab=8)
    curve = measure_draft_costs(target, drafter, (1, 3, 5), temperature=temperature)
    assert curve.rows == (1, 3, 5)
    assert curve.seconds == (3.0, 7.0, 11.0)
    assert not target._slots
    assert len(drafter.released) == 1


def test_target_time_above_the_cost_curve_counts_as_draft_cost(clock: Clock) -> None:
    """The toy takes 10 and 1 per row, the curve has 10.5 and 0.5: a row costs more than on the curve."""
    curve = measure_draft_costs(Charging(clock, vocab=8), Slow(clock), (1, 3), costs=CostCurve((1, 2), (11.0, 11.5)))
    assert curve.seconds == pytest.approx((3.0 + 0.5, 7.0 + 1.5))


def test_consecutive_steps_do_not_include_the_cost_of_changing_the_number_of_rows(clock: Clock) -> None:
    """The toy takes 10 and 1 per row, and 5 more if the number of rows changes. The curve includes these 5; a bandit
    adds or subtracts them for its own steps."""
    costs = CostCurve((1, 2, 4), (11.0, 17.0, 19.0))
    assert costs.jump() * costs(1) == 5
    curve = measure_draft_costs(Preparing(clock, vocab=8), Slow(clock), (1, 3), costs=costs)
    assert curve.seconds == (3.0, 7.0)


class Uneven(Clock):
    """The clock of a machine whose speed varies: everything takes `pace` times as long."""

    def __init__(self) -> None:
        self.pace, self._now = 1.0, 0.0

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, then: float) -> None:
        self._now += self.pace * (then - self._now)


def test_draft_costs_are_scaled_to_the_curve_if_the_machines_speed_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Uneven()
    monkeypatch.setattr("slipstream.core.step_clock.perf_counter", clock)

    class Changing(Slow):
        steps = 0

        def observe(self, *args: object) -> None:
            super().observe(*args)
            if self.steps % 6 == 0:  # after the prompt, then after every two plain steps and four others
                self.clock.pace = (1.0, 3.0, 1.5)[self.steps // 6 % 3]  # type: ignore[attr-defined]
            self.steps += 1

    for speed in (1.0, 2.5):
        costs = CostCurve((1, 2), (11.0 * speed, 12.0 * speed))
        curve = measure_draft_costs(Charging(clock, vocab=8), Changing(clock), (1, 3), costs=costs)
        assert curve.seconds == pytest.approx((3.0 * speed, 7.0 * speed))


def test_a_drafter_that_takes_no_time_still_has_a_curve(clock: Clock) -> None:
    curve = measure_draft_costs(ToyTarget(8), NoDrafter(), (1, 3))
    assert 0 < curve(3) < 1e-6


def test_lengths_for_which_the_context_has_no_room_are_left_out() -> None:
    target = ToyTarget(8, context=64)
    curve = measure_draft_costs(target, RandomDrafter(8), (1, 2, 4, 8, 12))
    assert curve.rows == (1, 2, 4)
