"""The closed forms reproduce the published tables."""

import pytest

from slipstream.errors import ParameterError
from slipstream.theory.closed_forms import (
    best_gamma,
    best_length,
    break_even,
    check_rates,
    expect_length,
    expect_tokens,
    geometric_rates,
    predict,
    speedup,
    step_cost,
)
from slipstream.theory.cost_curve import CostCurve


@pytest.mark.parametrize(
    ("alpha", "gamma", "ops", "speed"),
    [
        (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)  # fmt: skip
def test_leviathan_table_1(alpha: float, gamma: int, ops: float, speed: float) -> None:
    assert (gamma + 1) / expect_tokens(alpha, gamma) == pytest.approx(ops, abs=0.0051)  # theorem 3.11, c_hat = 0
    assert speedup(alpha, gamma, c=0) == pytest.approx(speed, abs=0.0051)


TABLES_2_AND_4 = [
    # gamma, alpha, c, predicted: EnDe T=0, EnDe T=1, CNNDM T=0, CNNDM T=1, drafts small, base, large
    (7, 0.75, 0.02, 3.2), (7, 0.80, 0.04, 3.3), (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3), (5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6), (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9), (3, 0.55, 0.04, 1.8), (3, 0.56, 0.11, 1.6),
]  # fmt: skip


@pytest.mark.parametrize(("gamma", "alpha", "c", "predicted"), TABLES_2_AND_4)
def test_leviathan_tables_2_and_4(gamma: int, alpha: float, c: float, predicted: float) -> None:
    """Within .07, because alpha and c are printed rounded: some pair that rounds to them gives the printed figure."""
    assert abs(speedup(alpha, gamma, c) - predicted) <= 0.07
    low, high = speedup(alpha - 0.005, gamma, c + 0.005), speedup(alpha + 0.005, gamma, c - 0.005)
    assert low < predicted + 0.05
    assert high > predicted - 0.05


@pytest.mark.parametrize("c", [0.02, 0.05, 0.10])
def test_the_best_gamma_has_the_greatest_speedup_of_all(c: float) -> None:
    for alpha in (0.5, 0.6, 0.7, 0.8, 0.9):
        speeds = [speedup(alpha, gamma, c) for gamma in range(100)]
        assert best_gamma(alpha, c) == speeds.index(max(speeds))


def test_a_perfect_drafter_yields_gamma_plus_one() -> None:
    assert expect_tokens(1.0, 4) == 5
    assert best_gamma(1.0, 0.0, longest=7) == 7


@pytest.mark.parametrize(
    ("rates", "length"),
    [
        ((0.7296, 0.5208, 0.3545), 2.60),  # Llama-3.1-8B with EAGLE-3
        ((0.6541, 0.3993, 0.2020), 2.26),  # Qwen3-8B
        ((0.7165, 0.5120, 0.3337), 2.56),  # gpt-oss-20b
    ],
)
def test_length_is_one_plus_the_rates_by_position(rates: tuple[float, ...], length: float) -> None:
    assert expect_length(rates) == pytest.approx(length, abs=0.0051)


STEEP = CostCurve((1, 4, 8, 16), (2.0, 2.2, 2.6, 4.8))


def test_a_step_costs_drafting_verification_and_host_work():
    assert step_cost(4, 0.1) == pytest.approx(1.4)
    assert step_cost(7, 0.1, STEEP, host=0.05) == pytest.approx(0.7 + 1.3 + 0.05)
    assert step_cost(3, 0.0, STEEP, batch=4) == pytest.approx(4.8 / 2.2)
    assert step_cost(0, 0.1, STEEP, host=0.05) == 1  # plain decoding


def test_the_best_length_is_found_after_a_jump_of_the_curve_and_for_measured_rates():
    """Rows 2..4 cost the same, so one draft token is a loss and three are a gain: a search that ends at the first
    decrease would find no gain."""
    stairs = CostCurve((1, 2, 4, 5), (1.0, 1.9, 1.9, 4.0))
    assert speedup(0.8, 1, 0.0, stairs) < 1 < speedup(0.8, 3, 0.0, stairs)
    assert best_gamma(0.8, 0.0, costs=stairs) == 3
    assert best_length([0.8, 0.64, 0.512, 0.4], 0.0, stairs) == 3
    rates = [0.73, 0.52, 0.35, 0.2, 0.1]
    gains = [expect_length(rates[:k]) / step_cost(k, 0.08, STEEP) for k in range(len(rates) + 1)]
    assert gains[best_length(rates, 0.08, STEEP)] == max(gains)
    assert best_length([], 0.1) == 0


@pytest.mark.parametrize(("gamma", "c", "costs", "host"), [
    (1, 0.3, None, 0.0), (4, 0.05, None, 0.0), (8, 0.1, STEEP, 0.0), (3, 0.2, STEEP, 0.3),
])  # fmt: skip
def test_break_even_is_where_speculation_becomes_faster(gamma, c, costs, host):
    alpha = break_even(gamma, c, costs, host=host)
    assert speedup(alpha, gamma, c, costs, host=host) == pytest.approx(1)
    assert speedup(alpha + 1e-4, gamma, c, costs, host=host) > 1
    assert speedup(alpha - 1e-4, gamma, c, costs, host=host) < 1


def test_break_even_of_one_draft_token_is_c_and_of_steps_that_cost_more_than_they_can_yield_is_none():
    for c in (0.05, 0.5, 1.0):
        assert break_even(1, c) == pytest.approx(c)
    assert break_even(4, 0.0) == pytest.approx(0)
    assert break_even(4, 1.2) is None
    assert break_even(1, 0.5, CostCurve((1, 2), (1.0, 3.0))) is None
    assert break_even(4, 1.0) == pytest.approx(1)  # only an exact draft does


@pytest.mark.parametrize("wrong", [
    {"gamma": 0}, {"gamma": 1.5}, {"c": -0.1}, {"c": float("nan")}, {"host": float("inf")},
])  # fmt: skip
def test_break_even_refuses_invalid_costs(wrong):
    with pytest.raises(ParameterError):
        break_even(**{"gamma": 4, "c": 0.1} | wrong)


def test_rates_of_an_alpha_give_the_closed_form_and_impossible_rates_are_refused():
    assert geometric_rates(0.5, 3) == [0.5, 0.25, 0.125]
    check_rates([1.0, 0.5, 0.5, 0.0])
    for wrong in ([], [1.1], [-0.1], [0.5, 0.6], [float("nan")]):
        with pytest.raises(ParameterError):
            check_rates(wrong)
    flat = CostCurve((1,), (0.010,))
    prediction = predict(geometric_rates(0.8, 4), flat, draft_seconds=4 * 0.05 * 0.010)
    assert prediction.speedup == pytest.approx(speedup(0.8, 4, 0.05))
    assert prediction.tau == pytest.approx(expect_tokens(0.8, 4))
    assert predict(geometric_rates(0.8, 4), STEEP, 0.4).speedup == pytest.approx(speedup(0.8, 4, 0.05, STEEP))


def test_host_work_and_prefill_count_for_both():
    """Plain: 1 s + 10 (0.1 + 0.05) s. An exact draft of 4: 1 + 0.5 s, then 2 steps of 0.1 + 0.02 + 0.08 s."""
    prediction = predict([1.0] * 4, CostCurve((1,), (0.1,)), 0.02, step_host=0.08, plain_host=0.05, prefill=1.0,
                    draft_prefill=0.5, tokens=11)  # fmt: skip
    assert prediction.plain_seconds == pytest.approx(1 + 10 * 0.15)
    assert prediction.steps == 2
    assert prediction.seconds == pytest.approx({"prefill": 1.5, "draft": 0.04, "target": 0.2, "host": 0.16})
    assert prediction.speedup == pytest.approx(2.5 / 1.9)


def enumerate_seconds(left, rates, costs, draft, host):
    """Expected seconds of the last `left` tokens, step by step."""
    if left == 0:
        return 0.0
    room = min(len(rates), left - 1)
    reach = [1.0, *rates[:room], 0.0]
    here = costs(room + 1) + (draft + host if room else 0.0)
    return here + sum(
        (reach[k] - reach[k + 1]) * enumerate_seconds(left - 1 - k, rates, costs, draft, host) for k in range(room + 1)
    )


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 9])
def test_short_texts_are_predicted_exactly(tokens):
    """The last steps draft less: a text of 2 has a step without a draft after the prefill."""
    rates = [0.7, 0.4, 0.3]
    prediction = predict(rates, STEEP, 0.3, step_host=0.1, tokens=tokens, prefill=5.0)
    assert prediction.total_seconds - 5.0 == pytest.approx(enumerate_seconds(tokens - 1, rates, STEEP, 0.3, 0.1))
    assert prediction.plain_seconds == pytest.approx(5.0 + 2.0 * (tokens - 1))


def test_steps_that_draft_nothing_are_counted_at_their_own_cost():
    """Half of the steps find no n-gram: tau = 1 + .5 (.8 + .6), and the target verifies 1 or 3 rows."""
    prediction = predict([0.8, 0.6], STEEP, 0.1, drafted=[0.5, 0.5])
    assert prediction.tau == pytest.approx(1.7)
    assert prediction.seconds["target"] == pytest.approx(0.5 * STEEP(1) + 0.5 * STEEP(3))
    long = predict([0.8, 0.6], STEEP, 0.1, drafted=[0.5, 0.5], tokens=5000)
    assert long.speedup == pytest.approx(prediction.speedup, rel=1e-3)


@pytest.mark.parametrize("wrong", [
    {"position_rates": [1.2]}, {"position_rates": [float("nan")]}, {"drafted": [0.5]}, {"drafted": [0.5, 0.9]},
    {"tokens": 0},
])  # fmt: skip
def test_predict_refuses_impossible_rates(wrong):
    with pytest.raises(ParameterError):
        predict(**{"position_rates": [0.8, 0.6], "costs": STEEP, "draft_seconds": 0.1} | wrong)
