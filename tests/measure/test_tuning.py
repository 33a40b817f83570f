"""The tuner predicts, confirms, and never chooses what is slower than plain decoding."""

from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.cli.report import make_section
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.measure import tuning
from slipstream.measure.benchmark import Contender
from slipstream.measure.configs import DrafterChoice
from slipstream.measure.measured_steps import measure_contradiction
from slipstream.measure.results import read, to_json
from slipstream.measure.step_figures import Measured
from slipstream.measure.tables import Estimate
from slipstream.measure.tuning import TuneConfig, choose, choose_candidates, count_steps, list_candidates, tune
from slipstream.theory.closed_forms import geometric_rates
from slipstream.theory.cost_curve import CostCurve
from tests.drafters.scripted_drafters import RandomDrafter, wrong_at
from tests.measure.clock import CLOCK, sleep
from tests.measure.slow_target import PROMPTS, Slow, scripted, tuned
from tests.targets.toy import ToyTarget

FLAT = CostCurve((1, 64), (0.010, 0.0102))
STEEP = CostCurve((1, 8, 64), (0.010, 0.011, 0.2))


def facts(alpha: float, k: int = 8, each: float = 0.0005, costs: CostCurve = FLAT) -> Measured:
    return Measured(costs, k, tuple(geometric_rates(alpha, k)), (1.0,) * k, draft_each=each, tokens=500)


def test_candidates_are_every_length_best_first():
    ranked = list_candidates(["good", "bad"], [facts(0.8), facts(0.2, 3, 0.01)])
    assert len(ranked) == 11
    assert [c.predicted for c in ranked] == sorted((c.predicted for c in ranked), reverse=True)
    best = facts(0.8).best_length()
    assert (ranked[0].label, ranked[0].draft_tokens, ranked[0].predicted) == ("good", *best)


def test_the_shortlist_has_the_best_of_each_drafter_that_is_predicted_to_be_faster_or_the_best_of_all():
    ranked = list_candidates(["good", "fair", "bad"], [facts(0.8), facts(0.6), facts(0.1, 4, 0.01)])
    short = choose_candidates(ranked, 3)
    assert [c.label for c in short] == ["good", "fair", "good"]
    assert abs(short[0].draft_tokens - short[2].draft_tokens) > 1
    assert [c.label for c in choose_candidates(ranked, 1)] == ["good"]
    ranked = list_candidates(["a", "b"], [facts(0.1, 2, 0.01), facts(0.2, 2, 0.01)])
    assert [c.label for c in choose_candidates(ranked, 1)] == ["b"]


def chosen(*gains: tuple[float, float | None]) -> float | None:
    known = {value: Estimate(value, low, low and 2 * value) for value, low in gains}
    return choose(list(known), known.get)


def test_only_a_significantly_faster_setting_is_chosen():
    assert chosen((1.5, 1.2), (1.9, 0.9), (1.7, 1.1)) == 1.7
    assert chosen((1.5, 0.99), (0.8, 0.7)) is chosen((1.5, None)) is chosen() is None


QUICK = TuneConfig(tokens=24, rounds=3, seconds=5)
SHORT = TuneConfig(tokens=8, rounds=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    CLOCK.replace(monkeypatch)
    monkeypatch.setattr("slipstream.measure.measured_steps.ROWS", (1, 2, 4, 8))


def test_the_better_drafter_is_chosen_and_predicted(tmp_path):
    target = Slow(vocab=16)
    given = [
        Contender("mostly right", scripted(target, wrong_at(3)), 4),
        Contender("blind", RandomDrafter(16, sampled=False), 4),
    ]
    calls, llm = [], LLM(target, draft_tokens=4)
    result = tune(
        llm, given, PROMPTS, QUICK, tmp_path / "r.json", lambda: calls.append(1), DrafterChoice("none", target="t")
    )
    data = result.data
    assert data.choice.label == "mostly right"
    assert data.choice.draft_tokens in (3, 4)
    assert data.choice.speedup.low > 1
    assert data.choice.predicted > 2
    assert data.configs.slipstream["target"] == "t"
    assert data.configs.slipstream["drafter"] == "scripted"
    assert "has no drafter that corresponds to" in data.configs.vllm.note
    assert 0 < len(calls) <= count_steps(llm, given, PROMPTS, QUICK)
    assert read(tmp_path / "r.json").data["choice"] == to_json(data.choice)


def test_a_setting_slower_than_plain_decoding_is_never_chosen():
    class Sleepy(RandomDrafter):
        def propose(self, seqs, budgets):
            sleep(0.03)
            return super().propose(seqs, budgets)

    data = tuned(Slow(vocab=16), Sleepy(16, sampled=False), SHORT, 2).data
    assert data.choice is None
    assert data.raced[0].speedup.value < 1
    assert data.configs.slipstream == {"target": "embedded", "drafter": "none", "draft_tokens": 0}
    assert data.configs.vllm.text == ""


def test_noisy_costs_are_marked(monkeypatch):
    """A target whose speed doubles and halves from pass to pass."""

    class Unsteady(ToyTarget):
        calls = 0

        def run(self, seqs, draft, taps=()):
            Unsteady.calls += 1
            sleep(0.002 if Unsteady.calls // 40 % 2 else 0.02)
            return super().run(seqs, draft, taps)

    target = Unsteady(vocab=16)
    result = tuned(target, scripted(target, wrong_at(3)), SHORT)
    assert result.data.drafters[0].noisy
    assert any("the timings are noisy" in warning for warning in result.warnings)
    table = next(t for t in make_section(result).tables if t.title == "Measured at the longest draft")
    assert "x?, K=" in table.texts()[0][-1]


def test_drafts_that_get_cheaper_with_their_length_are_noise():
    run = SimpleNamespace(seconds_per_token=lambda: np.ones((2, 2)), weights=lambda: np.ones(2))
    assert measure_contradiction([run], each=0.001, draft=0.004, fixed=0.0) == 0
    assert measure_contradiction([run], each=0.0, draft=0.004, fixed=0.004) == 1


def test_a_wrong_text_is_never_chosen(monkeypatch):
    """Even if it is fastest."""
    target = Slow(vocab=16)
    monkeypatch.setattr("slipstream.measure.arms.Run.exact", property(lambda run: False))
    data = tuned(target, scripted(target, wrong_at(9)), QUICK).data
    assert data.raced[0].speedup.value > 1
    assert data.choice is None


def test_interruption_keeps_what_was_recorded(tmp_path, monkeypatch):
    target = Slow(vocab=16)

    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning._Tuning, "confirm", stop)
    with pytest.raises(KeyboardInterrupt):
        tuned(target, scripted(target, wrong_at(3)), QUICK, out=tmp_path / "r.json")
    kept = read(tmp_path / "r.json")
    assert not kept.complete
    assert kept.data["drafters"][0]["label"] == "planted"
    assert (kept.data["raced"], kept.data["choice"], kept.data["configs"]) == ([], None, None)


def test_bad_settings_are_refused():
    with pytest.raises(ParameterError, match="confirm"):
        TuneConfig(confirm=0)
