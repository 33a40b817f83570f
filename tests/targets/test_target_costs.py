from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

import slipstream.targets.target_costs
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import Capabilities, TargetOut
from slipstream.drafters.none import NoDrafter
from slipstream.errors import ParameterError
from slipstream.targets.target_costs import ExpertReads, measure_costs, measure_draft_costs
from tests.core.fake_drafters import depths
from tests.drafters.scripted_drafters import RandomDrafter
from tests.measure.clock import Still
from tests.targets.toy import ToyTarget


class Charging(ToyTarget):
    """A forward pass over n rows takes 10 + n, the first one with n rows 1000 more. changing: what it takes besides if
    the pass before had another number of rows."""

    before = 0

    def __init__(self, clock: Still, changing: float = 0.0, **options: int):
        super().__init__(**options)  # type: ignore[arg-type]
        self.clock, self.changing, self.known = clock, changing, set[int]()

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        rows = len(seqs) + len(draft)
        self.clock.now += 10.0 + rows + (0.0 if rows in self.known else 1000.0)
        self.clock.now += 0.0 if rows == self.before else self.changing
        self.known.add(rows)
        self.before = rows
        return super().run(seqs, draft, taps)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Still:
    clock = Still()
    monkeypatch.setattr(slipstream.targets.target_costs, "perf_counter", clock)
    monkeypatch.setattr("slipstream.core.step.perf_counter", clock)
    return clock


def test_the_curve_leaves_out_the_first_repetition(clock: Still) -> None:
    curve = measure_costs(Charging(clock, vocab=8), (1, 4, 16))
    assert curve.rows == (1, 4, 16)
    assert curve.seconds == (11.0, 14.0, 26.0)


def test_several_rows_include_the_cost_of_changing_their_number_and_one_row_does_not(clock: Still) -> None:
    assert measure_costs(Charging(clock, 5.0, vocab=8), (1, 4, 16)).seconds == (11.0, 19.0, 31.0)


class Striding(Charging):
    """Several steps in one call take 7 each."""

    steps_per_call = 4

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, multi_step=self)

    def decode_steps(self, seqs: Seq[Sequence], steps: int) -> None:
        self.clock.now += 7.0 * steps


def test_one_row_can_be_measured_as_a_decode_step(clock: Still) -> None:
    assert measure_costs(Striding(clock, vocab=8), (1, 4)).seconds == (11.0, 14.0)
    assert measure_costs(Striding(clock, vocab=8), (1, 4), plain=True).seconds == (7.0, 14.0)
    assert measure_costs(Charging(clock, vocab=8), (1, 4), plain=True).seconds == (11.0, 14.0)
    assert measure_costs(Striding(clock, vocab=8, context=3), (1, 2), plain=True).seconds == (11.0, 12.0)


def test_nothing_is_kept_and_running_sequences_continue() -> None:
    target = ToyTarget(8)
    seq = Sequence([1, 2, 3], SamplingParams(max_tokens=12))
    step([seq], target, NoDrafter(), RULES["greedy"], 0)
    measure_costs(target, (1, 2), repeats=1)
    assert set(target._slots) == {seq.id}
    while not seq.finish:
        step([seq], target, NoDrafter(), RULES["greedy"], 0)


def test_rows_that_exceed_the_context_are_left_out() -> None:
    assert measure_costs(ToyTarget(8, context=10), (1, 4, 8, 16), repeats=1).rows == (1, 4, 8)
    assert measure_costs(ToyTarget(8, context=2), (1, 4), repeats=1).rows == (1,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": ()}, "rows is"), ({"rows": (2, 4)}, "rows is"), ({"rows": (1, 4, 4)}, "rows is"),
        ({"repeats": 0}, "repeats is 0"), ({"past": 0}, "past is 0"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        measure_costs(ToyTarget(8), **options)


class Slow(RandomDrafter):
    """Proposing n draft tokens takes 2 n, observing 1."""

    def __init__(self, clock: Still):
        super().__init__(8)
        self.clock, self.released = clock, list[int]()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        self.clock.now += 2 * sum(depths(budgets))
        return super().propose(seqs, budgets)

    def observe(self, *args: object) -> None:
        self.clock.now += 1

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)


def test_draft_costs_are_those_of_proposing_and_observing(clock: Still) -> None:
    drafter, target = Slow(clock), Charging(clock, vocab=8)
    curve = measure_draft_costs(target, drafter, (1, 3, 5))
    assert curve.rows == (1, 3, 5)
    assert curve.seconds == (3.0, 7.0, 11.0)
    assert not target._slots
    assert len(drafter.released) == 1


def test_a_drafter_that_takes_no_time_still_has_a_curve(clock: Still) -> None:
    curve = measure_draft_costs(ToyTarget(8), NoDrafter(), (1, 3))
    assert 0 < curve(3) < 1e-6


def test_draft_lengths_for_which_the_context_has_no_room_are_left_out() -> None:
    curve = measure_draft_costs(ToyTarget(8, context=64), RandomDrafter(8), (1, 2, 4, 8, 12))
    assert curve.rows == (1, 2, 4)


def test_rows_cost_what_the_union_of_their_experts_reads() -> None:
    """4 rows of 128 experts, of which each picks 8, read 3.6 times as many as one row."""
    mixtures_alone = ExpertReads(0.0, 1.0, 48, (8, 128))
    assert [round(mixtures_alone(rows), 2) for rows in (1, 2, 4, 8)] == [1.0, 1.94, 3.64, 6.45]
    half = ExpertReads(8.0, 1.0, 48, (8, 128))
    assert half(4) == pytest.approx((1 + mixtures_alone(4)) / 2)
    assert mixtures_alone(10**6) == 16


def test_rows_that_choose_alike_are_learned_from_what_passes_read() -> None:
    costs = ExpertReads(0.0, 1.0, 2, (8, 128))
    independent = [costs(rows) for rows in range(9)]
    costs.learn(4, 2 * 8)
    assert costs(4) < independent[4]
    for _ in range(300):
        costs.learn(4, 2 * 12)
    assert costs(4) == pytest.approx(12 / 8, rel=0.01)
    assert 1 == costs(1) < costs(2) < costs(4) < costs(8) < independent[8]
    for _ in range(300):
        costs.learn(1, 2 * 8)  # says nothing
        costs.learn(512, 2 * 8)  # a prompt
    assert costs(4) == pytest.approx(12 / 8, rel=0.01)
    for _ in range(300):
        costs.learn(2, 2 * 128)  # more than two rows can choose
    assert costs(4) == pytest.approx(independent[4], rel=0.01)
