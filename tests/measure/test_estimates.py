import numpy as np
import pytest
from scipy.stats import t as student

from slipstream.measure.estimates import Estimate, estimate_mean, estimate_ratio, explain_doubt, t_quantile


def test_the_ratio_is_of_means_over_passes_then_totals_and_pairing_cancels_disturbances():
    top = [[1.0, 2.0, 4.0], [4.0, 4.0, 4.0], [6.0, 6.0, 6.0]]  # typical 2, 4, 6
    bottom = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [1.0, 3.0, 9.0]]  # typical 1, 2, 3
    assert estimate_ratio(top, bottom).value == pytest.approx(2.0)
    # One factor a pass, on both sides: the interval of a constant ratio is a point.
    bottom = np.ones((6, 9)) * np.random.default_rng(1).lognormal(0, 1, size=(1, 9))
    estimate = estimate_ratio(3 * bottom, bottom)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((3.0, 3.0, 3.0))


def test_passes_have_their_t_interval_and_no_interval_is_narrower_than_that_of_single_passes():
    logs = np.array([0.1, 0.3, 0.2, 0.4])
    estimate = estimate_ratio(np.exp(logs), np.ones(4))
    low, high = student.interval(0.95, 3, logs.mean(), logs.std(ddof=1) / 2)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(np.exp([0.25, low, high]), rel=1e-3)
    rng = np.random.default_rng(3)
    for _ in range(20):
        plain, fast = rng.lognormal(0, 0.2, (2, 6, 4))
        estimate = estimate_ratio(plain, fast)
        whole = estimate_ratio(plain.prod(0) ** (1 / 6), fast.prod(0) ** (1 / 6))
        assert estimate.high / estimate.low > 0.9 * whole.high / whole.low  # those weigh every prompt the same


@pytest.mark.parametrize(
    ("prompts", "passes", "note"), [(4, 2, "few passes"), (2, 5, "few prompts"), (1, 5, "few prompts"), (3, 3, "")]
)
def test_too_few_prompts_or_passes_have_no_interval(prompts, passes, note):
    estimate = estimate_ratio(np.full((prompts, passes), 2.0), np.ones((prompts, passes)))
    assert (estimate.value, estimate.note) == (pytest.approx(2.0), note)
    assert (estimate.low is None) == (estimate.high is None) == bool(note)


def test_few_prompts_and_what_is_not_shown_to_differ_are_said_to_be():
    cells = np.ones((3, 5))
    assert estimate_ratio(cells, cells, weights=[100, 1, 1]).note == "few prompts"
    assert not estimate_ratio(cells, cells, weights=[2, 1, 1]).note
    assert "includes 1" in explain_doubt(Estimate(1.0, 0.9, 1.1))
    assert explain_doubt(Estimate(1.0, 1.1, 1.2)) == explain_doubt(Estimate(1.0, 0.8, 0.9)) == ""
    assert "raise --rounds" in explain_doubt(Estimate(1.0, None, None, "few passes"))
    assert "raise --prompts" in explain_doubt(Estimate(1.0, None, None, "few prompts"))
    assert "plain decoding" in explain_doubt(Estimate(1.0, None, None, "no drafts"))


@pytest.mark.parametrize("freedom", [1.0, 2.0, 3.7, 11.0, 500.0])
def test_the_quantile_is_that_of_students_t(freedom):
    assert t_quantile(0.975, freedom) == pytest.approx(student.ppf(0.975, freedom), rel=1e-3)


def test_shapes_must_match():
    with pytest.raises(ValueError, match="paired"):
        estimate_ratio([[1.0, 2.0]], [[1.0]])


def test_weights_make_it_the_ratio_of_the_totals_or_a_weighted_mean():
    top, bottom = np.repeat([[2.0], [6.0], [6.0]], 3, 1), np.repeat([[1.0], [2.0], [2.0]], 3, 1)
    estimate = estimate_ratio(top, bottom, weights=[1, 2, 1])
    assert estimate.value == pytest.approx((2 + 12 + 6) / (1 + 4 + 2))
    assert estimate.low <= 2.0  # a further prompt may be like the first
    assert estimate.high >= 3.0
    assert estimate_ratio(top, bottom, weights=[5, 5, 5]).value == pytest.approx(14 / 5)
    estimate = estimate_mean(np.repeat([[1.0], [2.0], [3.0]], 3, 1), weights=[1, 1, 2])
    assert estimate.value == pytest.approx(2.25)
    assert estimate.low <= 2.25 <= estimate.high
    turned = estimate.inverse()
    assert (turned.low, turned.value, turned.high) == (1 / estimate.high, 1 / estimate.value, 1 / estimate.low)
    assert estimate_mean([1.0, 2.0]).inverse().low is None
