"""Every cause is created on purpose and found: by numbers, and by drafters and targets that have it."""

from dataclasses import replace

import pytest

from slipstream.cli.report import make_section
from slipstream.core import step
from slipstream.core.params import SamplingParams
from slipstream.llm import LLM
from slipstream.measure import diagnosis, tuning
from slipstream.measure.diagnosis import Diagnosis, diagnose, remove_cause
from slipstream.measure.estimates import Estimate
from slipstream.measure.measured_steps import Counting, Tally
from slipstream.measure.results import read
from slipstream.measure.step_figures import Measured
from slipstream.measure.tuning import TuneConfig
from slipstream.theory.closed_forms import geometric_rates, speedup
from slipstream.theory.cost_curve import CostCurve
from tests.drafters.scripted_drafters import RandomDrafter, ScriptedDrafter
from tests.measure.clock import CLOCK, sleep
from tests.measure.slow_target import Slow, scripted, tuned
from tests.targets.toy import ToyTarget

FLAT = CostCurve((1, 64), (0.010, 0.011))
GOOD = Measured(
    costs=FLAT, draft_tokens=4, position_rates=tuple(geometric_rates(0.8, 4)), drafted=(1.0,) * 4, draft_each=0.0005,
    step_host=0.0001, plain_host=0.0001, prefill=0.01, tokens=64,
)  # fmt: skip


def cause(m: Measured) -> str:
    return diagnose(m).cause


def test_a_good_pair_has_no_cause():
    diagnosis = diagnose(GOOD)
    assert (diagnosis.cause, diagnosis.fix) == ("nothing is wrong", "")
    assert diagnosis.speedup == diagnosis.predicted == pytest.approx(GOOD.prediction().speedup)
    assert 2.4 < diagnosis.speedup < 3
    assert diagnosis.acceptance == pytest.approx(0.8)
    assert diagnosis.break_even == pytest.approx(0.2, abs=0.05)


PLANTED = {
    "draft too expensive": {"draft_each": 0.010},
    "acceptance too low": {"position_rates": tuple(geometric_rates(0.05, 4))},
    "compute-bound target": {"costs": CostCurve((1, 2, 64), (0.010, 0.020, 0.64))},
    "host overhead": {"step_host": 0.03},
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_cause_is_named(name):
    sick = replace(GOOD, **PLANTED[name])
    causes = diagnose(sick)
    assert causes.cause == name
    assert causes.fix == diagnosis.FIXES[name]
    assert causes.enough
    assert causes.predicted < 1.05
    first, gain = next(iter(causes.counterfactuals.items()))
    assert first == name
    assert gain == pytest.approx(remove_cause(sick, name).prediction().speedup)
    assert gain > 2


def test_lookups_that_find_nothing_batches_that_are_too_large_and_experts_are_named_as_causes():
    diagnosis = diagnose(replace(GOOD, drafted=(0.02,) * 4, draft_each=0.0))
    assert diagnosis.cause == "acceptance too low"
    assert "in the 2% of the steps that drafted" in diagnosis.evidence[0]
    nothing = diagnose(replace(GOOD, position_rates=(), drafted=()))
    assert (nothing.cause, nothing.acceptance) == ("acceptance too low", None)
    assert nothing.evidence[0] == "nothing was drafted"
    # Up to eight rows cost as much as one, further rows cost extra: sixteen sequences gain nothing, one does.
    knee = CostCurve((1, 8, 16, 160), (0.010, 0.0101, 0.020, 0.2))
    big = replace(GOOD, costs=knee, batch=16, draft_each=0.002)
    assert cause(big) == "batch too large"
    assert cause(replace(big, batch=1, draft_each=0.0005)) == "nothing is wrong"
    steep = replace(GOOD, costs=CostCurve((1, 2, 64), (0.010, 0.019, 0.5)))
    assert cause(steep) == "compute-bound target"
    diagnosis = diagnose(replace(steep, experts=(2, 8)))
    assert diagnosis.cause == "few active experts"
    assert "2 of 8 experts" in diagnosis.evidence[0]
    assert cause(replace(steep, experts=(8, 8))) == "compute-bound target"


def test_measurements_count_more_than_predictions():
    slow = diagnose(replace(GOOD, speedup=Estimate(0.8, 0.7, 0.9)))
    assert (slow.speedup, slow.reason) == (0.8, "")
    assert slow.cause != "nothing is wrong"
    assert cause(replace(GOOD, draft_each=0.010, speedup=Estimate(1.5, 1.4, 1.6))) == "nothing is wrong"


@pytest.mark.parametrize(
    ("speedup", "neighbours", "reason", "fix"),
    [
        (Estimate(1.3, 0.9, 1.8), None, "0.90 to 1.80, includes 1", "--rounds"),
        (Estimate(0.9, 0.7, 1.1), None, "0.70 to 1.10, includes 1", "--rounds"),
        (Estimate(1.5, None, None, "few passes"), None, "not enough passes", "--rounds"),
        (Estimate(0.8, 0.7, 0.9), 0.4, "40% of the machine's time", "end other programs"),
        (None, 0.4, "40% of the machine's time", "end other programs"),  # also where all looks well
    ],
)
def test_what_noise_could_have_made_is_not_diagnosed(speedup, neighbours, reason, fix):
    diagnosis = diagnose(replace(GOOD, speedup=speedup), neighbours)
    assert diagnosis.cause == "not diagnosed"
    assert reason in diagnosis.reason
    assert fix in diagnosis.fix
    assert diagnose(GOOD, neighbours=0.02).cause == "nothing is wrong"


def test_a_drafter_that_drafted_nothing_is_not_praised_for_a_chance_gain():
    nothing = replace(GOOD, position_rates=(), drafted=(), speedup=Estimate(1.07, None, None, "no drafts"))
    assert diagnose(nothing).cause == "acceptance too low"


def test_a_gain_is_not_praised_where_a_shorter_draft_gains_more():
    """Sixteen draft tokens are measured at 1.28x, and the same measurement says that four or so give nearly 2x."""
    rates = tuple(geometric_rates(0.72, 16))
    long = replace(GOOD, draft_tokens=16, position_rates=rates, drafted=(1.0,) * 16, draft_each=0.0009)
    predicted = long.prediction().speedup
    measured = replace(long, speedup=Estimate(1.28, 1.2, 1.36))
    diagnosis, (length, gain) = diagnose(measured), measured.best_length()
    assert predicted == pytest.approx(1.28, abs=0.15)
    assert diagnosis.cause == "drafts too long"
    assert length in range(3, 7)
    assert gain == pytest.approx(1.9, abs=0.15)
    assert diagnosis.fix == f"lower --draft-tokens to {length}"
    assert f"{length} draft tokens are predicted at" in diagnosis.evidence[0]


def test_no_prediction_is_above_the_mean_acceptance_length():
    """A step that drafts is never predicted to be faster than a decode step, even from noisy times."""
    noisy = replace(GOOD, draft_each=0.0, step_host=0.0, plain_host=0.004, speedup=Estimate(3.9, 3.0, 4.8))
    for k in range(1, 5):
        assert noisy.expect(k) <= noisy.length(k) <= k + 1
    assert noisy.expect(4) == noisy.length(4) < 3.9
    assert replace(noisy, speedup=None).expect(4) <= noisy.length(4)


def test_with_two_faults_removing_one_is_reported_as_not_enough():
    diagnosis = diagnose(replace(GOOD, draft_each=0.1, costs=CostCurve((1, 2), (0.01, 0.04))))
    assert diagnosis.cause == "draft too expensive"
    assert not diagnosis.enough


def test_predictions_are_the_closed_form_and_trees_are_wider_than_they_are_deep():
    """No host, no prefill, flat costs, long texts: tau / (gamma c + 1)."""
    flat, rates = CostCurve((1, 5), (1.0, 1.0)), tuple(geometric_rates(0.7, 4))
    plain = Measured(flat, 4, rates, (1.0,) * 4, draft_each=0.1, tokens=20_000)
    assert plain.prediction().speedup == pytest.approx(speedup(0.7, 4, 0.1), rel=1e-3)
    assert plain.prediction(2).speedup == pytest.approx(speedup(0.7, 2, 0.1), rel=1e-3)
    assert plain.prediction(0).speedup == pytest.approx(1)
    assert plain.best_length()[0] == 4
    assert replace(plain, draft_each=5.0).best_length() == (0, 1.0)
    tree = replace(GOOD, width=4.0, costs=CostCurve((1, 64), (0.01, 0.64)))
    assert tree.rows == 17
    assert tree.prediction().speedup < replace(tree, width=1.0).prediction().speedup


QUICK = TuneConfig(tokens=12, rounds=3, confirm=1)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Other processes do not affect these tests."""
    CLOCK.replace(monkeypatch)
    monkeypatch.setattr(tuning.OtherProcesses, "share", lambda self: 0.0)


class Sleepy(ScriptedDrafter):
    def propose(self, seqs, budgets):
        sleep(0.1)
        return super().propose(seqs, budgets)


def seen(target, drafter) -> Diagnosis:
    return tuned(target, drafter, QUICK).data.raced[0].diagnosis


def test_a_drafter_that_sleeps_is_too_expensive_and_one_at_random_has_low_acceptance():
    target = Slow(vocab=16)
    diagnosis = seen(target, Sleepy(scripted(target).continuations, 16))
    assert diagnosis.cause == "draft too expensive"
    assert diagnosis.speedup < 1
    # One of 256 tokens is right by chance, and four further rows cost as much as a pass: it can never be faster.
    target = Slow(vocab=256)
    target.row = 0.0005
    diagnosis = seen(target, RandomDrafter(256, sampled=False))
    assert diagnosis.cause == "acceptance too low"
    assert diagnosis.acceptance < 0.2
    assert diagnosis.speedup < 0.9


def test_a_target_whose_cost_grows_with_every_row_is_compute_bound(monkeypatch):
    monkeypatch.setattr("slipstream.measure.measured_steps.ROWS", (1, 2, 4, 6))
    target = Slow(vocab=16)
    target.row = 0.03
    diagnosis = seen(target, scripted(target))
    assert diagnosis.cause == "compute-bound target"
    assert diagnosis.break_even is None


def test_host_work_is_detected(monkeypatch):
    """A slow verification of drafts."""
    follow = step.follow

    def slow(draft, picks):
        if len(draft):
            sleep(0.03)
        return follow(draft, picks)

    monkeypatch.setattr(step, "follow", slow)
    target = Slow(vocab=16)
    assert seen(target, scripted(target)).cause == "host overhead"


def test_a_good_drafter_has_no_cause_and_everything_is_stored(tmp_path):
    target = Slow(vocab=16)
    result = tuned(target, scripted(target), QUICK, out=tmp_path / "r.json")
    row = result.data.raced[0]
    assert row.diagnosis.cause == "nothing is wrong"
    assert row.diagnosis.acceptance == pytest.approx(1)
    assert read(tmp_path / "r.json").data["raced"][0]["measured"]["drafted"] == [1.0] * row.draft_tokens
    assert any(note.endswith("nothing is wrong.") for note in make_section(result).notes)


def test_a_busy_machine_is_noticed_while_measuring(monkeypatch):
    monkeypatch.setattr(tuning.OtherProcesses, "share", lambda self: 0.5)
    target = Slow(vocab=16)
    result = tuned(target, scripted(target), QUICK)
    assert result.data.raced[0].diagnosis.cause == "not diagnosed"
    assert any("not diagnosed: other processes took 50%" in note for note in make_section(result).notes)


def test_room_for_drafts_is_counted_separately():
    """The last steps of a text have no room for deep draft tokens; that does not lower the drafter's rates."""
    target, tally = ToyTarget(vocab=16), Tally()
    llm = LLM(target, Counting(scripted(target), tally), draft_tokens=4)
    llm.generate([[1, 2]], SamplingParams(max_tokens=8))  # 1 by the prefill, 5, then 2 with room for one draft token
    assert dict(tally.able) == dict(tally.drafted) == {1: 2, 2: 1, 3: 1, 4: 1}
    assert tally.share(4) == 1
    assert tally.share(5) == 0
