import numpy as np
import pytest

from slipstream.lab.estimates import agreement, mean, ratio, spread


def test_ratio_is_of_medians_over_rounds_then_prompts():
    top = [[2.0, 2.0, 90.0], [4.0, 4.0, 4.0], [6.0, 1.0, 6.0]]  # typical 2, 4, 6
    bottom = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [9.0, 9.0, 9.0]]  # typical 1, 2, 9
    assert ratio(top, bottom).value == 2.0


def test_interval_of_a_constant_ratio_is_a_point():
    bottom = np.full((5, 4), 0.5)
    found = ratio(3 * bottom, bottom)
    assert (found.low, found.value, found.high) == (3.0, 3.0, 3.0)


def test_pairing_cancels_what_disturbs_both_sides():
    rng = np.random.default_rng(1)
    noise = rng.lognormal(0, 1, size=(1, 9))  # one factor a round
    bottom = np.ones((6, 9)) * noise
    found = ratio(2 * bottom, bottom)
    assert found.high - found.low < 1e-12


def test_interval_covers_the_truth():
    hits = 0
    for trial in range(100):
        rng = np.random.default_rng(trial)
        top, bottom = 2 * rng.lognormal(0, 0.1, (12, 5)), rng.lognormal(0, 0.1, (12, 5))
        found = ratio(top, bottom, resamples=300)
        hits += found.low <= 2 <= found.high
    assert hits >= 85  # a 95 % percentile interval of 12 prompts is a little too narrow


def test_shapes_must_match():
    with pytest.raises(ValueError, match="paired"):
        ratio([[1.0, 2.0]], [[1.0]])


def test_spread():
    assert spread([1, 2, 3, 4, 5]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


def test_agreement_names_the_first_difference():
    assert agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 8]]) == {
        "identical": 0.5,
        "divergences": [{"prompt": 1, "token": 1}],
    }
    assert agreement([[1, 2]], [[1]])["divergences"] == [{"prompt": 0, "token": 1}]


def test_weights_make_it_the_ratio_of_the_totals():
    top = [[2.0, 2.0, 90.0], [6.0, 6.0, 6.0]]  # medians 2 and 6
    bottom = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    found = ratio(top, bottom, weights=[1, 3])
    assert found.value == (2 + 18) / (1 + 6)
    assert found.low == 2.0  # a resample may hold the first prompt alone
    assert found.high >= 3.0
    assert ratio(top, bottom, weights=[5, 5]).value == 8 / 3


def test_weighted_mean():
    found = mean([[1.0, 1.0, 50.0], [3.0, 3.0, 3.0]], weights=[1, 1])
    assert found.value == 2.0
    assert found.low <= 2.0 <= found.high
