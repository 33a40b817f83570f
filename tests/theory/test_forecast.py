"""Forecasts are the closed forms."""

import pytest

from slipstream.errors import ParameterError
from slipstream.theory.closed_forms import best_gamma, break_even, expect_tokens, predict, speedup
from slipstream.theory.cost_curve import CostCurve
from slipstream.theory.forecast import LONGEST_DRAFT, ForecastCosts, Rates, forecast

FREE = ForecastCosts(0.05)
STEEP = ForecastCosts(0.05, CostCurve((1, 4, 8, 16), (1.0, 1.1, 1.3, 2.4)), host=0.02)
MEASURED = (0.7296, 0.5208, 0.3545)


@pytest.mark.parametrize("costs", [FREE, STEEP, ForecastCosts(0.3, CostCurve.flat(0.1), batch=4)])
@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.95])
def test_a_forecast_is_the_closed_form_at_the_best_length(alpha: float, costs: ForecastCosts) -> None:
    predicted = forecast(Rates.constant(alpha), costs)
    k = best_gamma(alpha, costs.c, LONGEST_DRAFT, costs.target, costs.batch, costs.host)
    assert predicted.draft_tokens == k
    assert predicted.tau == pytest.approx(expect_tokens(alpha, k))
    assert predicted.speedup == pytest.approx(speedup(alpha, k, costs.c, costs.target, costs.batch, costs.host))
    assert predicted.speedup == pytest.approx(predicted.tau / predicted.step_cost)


def test_a_forecast_is_the_long_run_of_a_prediction_from_measurements() -> None:
    predicted = forecast(Rates(MEASURED), STEEP, 3)
    expected = predict(MEASURED, STEEP.target, STEEP.c * 3, step_host=STEEP.host)
    assert predicted.speedup == pytest.approx(expected.speedup)
    assert predicted.tau == pytest.approx(expected.tau)


def test_no_length_is_chosen_if_none_is_faster_and_break_even_is_for_a_given_or_the_best_length() -> None:
    predicted = forecast(Rates.constant(0.3), ForecastCosts(0.5))
    assert (predicted.draft_tokens, predicted.speedup, predicted.step_cost) == (0, 1.0, 1.0)
    assert predicted.break_even == pytest.approx(0.5)
    rates = Rates.constant(0.8)
    assert forecast(rates, FREE, 4).break_even == break_even(4, 0.05)
    assert forecast(rates, FREE).break_even == pytest.approx(0.05)
    assert forecast(rates, ForecastCosts(2.0)).break_even is None


def test_the_assumptions_are_stated_in_one_line() -> None:
    costs = ForecastCosts(0.128, CostCurve.flat(0.01), batch=16, host=0.02, basis="measured here")
    said = forecast(Rates.constant(0.775, "published"), costs, 5).assumptions
    assert said == (
        "acceptance 78% at every position (published); a draft token costs 0.128 decode steps, verifying 5 draft "
        "tokens 1.70; the host adds 0.02; batch 16; measured here"
    )
    assert forecast(Rates(MEASURED), FREE).assumptions.startswith("acceptance 73%, 52%, 35% by position (given); ")
    assert forecast(Rates(MEASURED), FREE).as_dict()["assumptions"] == forecast(Rates(MEASURED), FREE).assumptions


@pytest.mark.parametrize("wrong", [{"c": -1}, {"batch": 0}, {"host": float("nan")}, {"cc": 1}])
def test_impossible_costs_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ParameterError):
        ForecastCosts(**wrong)  # type: ignore[arg-type]


def test_impossible_rates_and_lengths_are_refused() -> None:
    for rates in ((), (1.2,), (0.5, 0.6)):
        with pytest.raises(ParameterError):
            Rates(rates)
    with pytest.raises(ParameterError, match=r"acceptance is 1\.5"):
        Rates.constant(1.5)
    with pytest.raises(ParameterError, match="draft_tokens is 4, but 3 rates were given"):
        forecast(Rates(MEASURED), FREE, 4)
    with pytest.raises(ParameterError, match="draft_tokens is 0"):
        forecast(Rates(MEASURED), FREE, 0)


@pytest.mark.parametrize("host", [0.0, 0.3])
@pytest.mark.parametrize("costs", [None, CostCurve((1, 64), (0.01, 0.01)), CostCurve((1, 8, 64), (0.01, 0.01, 0.2))])
def test_no_speed_up_is_above_the_mean_acceptance_length(costs, host):
    for alpha in (0.0, 0.5, 1.0):
        for c in (0.0, 0.1, 2.0):
            for k in (1, 4, 16):
                predicted = forecast(Rates.constant(alpha), ForecastCosts(c, costs, host=host), k)
                assert predicted.speedup <= predicted.tau <= k + 1
