from itertools import pairwise

import pytest

from slipstream.errors import ParameterError
from slipstream.training.layerskip_objective import dropout_rates, exit_weights, kept_layers
from slipstream.training.methods import LayerSkipOptions


def test_rates_follow_the_paper() -> None:
    rates = dropout_rates(8, 0.1)
    assert rates[0] == 0.0
    assert rates[-1] == pytest.approx(0.1)
    # D(l) doubles from 1 to 2 over the depth: (1 + D(l+1)) / (1 + D(l)) is constant.
    ratios = [(1 + b / 0.1) / (1 + a / 0.1) for a, b in pairwise(rates)]
    assert ratios == pytest.approx([2 ** (1 / 7)] * 7)


def test_rates_grow_over_training() -> None:
    assert dropout_rates(8, 0.1, progress=0.0) == [0.0] * 8
    assert dropout_rates(8, 0.1, progress=0.5)[-1] == pytest.approx(0.1 * (2**0.5 - 1))
    assert dropout_rates(1, 0.5) == [0.0]


def test_kept_layers_are_a_function_of_seed_and_step() -> None:
    rates = [0.5] * 8
    assert kept_layers(rates, 1, 5) == kept_layers(rates, 1, 5)
    draws = [kept_layers(rates, 1, step) for step in range(400)]
    assert 0.45 < sum(map(sum, draws)) / (400 * 8) < 0.55
    assert all(kept_layers([0.0] * 8, 3, step) == [True] * 8 for step in range(50))


def test_exit_weights_follow_the_paper() -> None:
    settings = LayerSkipOptions(exit_scale=0.2, rotation=7)
    # Step 3: exit 3 and the last layer. e(3) = 0.2 * (0+1+2+3), e(7) = 7 + 0.2 * (0+...+6).
    weights = exit_weights(8, settings, 3)
    assert list(weights) == [3, 7]
    assert weights[3] / weights[7] == pytest.approx(1.2 / 11.2)
    assert sum(weights.values()) == pytest.approx(1.0)


def test_rotation_visits_every_layer() -> None:
    seen = [set(exit_weights(8, LayerSkipOptions(rotation=7), step)) - {7} for step in range(7)]
    assert set().union(*seen) == {1, 2, 3, 4, 5, 6}  # e(0) = 0: an exit without weight is not computed
    assert exit_weights(8, LayerSkipOptions(rotation=0), 3) == {7: 1.0}


def test_impossible_rate_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"p_max is 1\.5"):
        LayerSkipOptions(p_max=1.5)
