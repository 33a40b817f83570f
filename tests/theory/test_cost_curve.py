import math

import pytest

from slipstream.errors import ParameterError
from slipstream.theory.cost_curve import CostCurve


def test_it_is_linear_between_and_beyond_the_points_or_a_share_of_a_plain_step_for_each_row() -> None:
    curve = CostCurve((1, 4, 8), (2.0, 2.6, 4.6))
    assert [curve(n) for n in (1, 4, 8)] == [2.0, 2.6, 4.6]
    assert curve(2) == pytest.approx(2.2)
    assert curve(6) == pytest.approx(3.6)
    assert curve(12) == pytest.approx(6.6)
    assert curve(2.5) == pytest.approx(2.3), "mean rows of a batch need not be whole"
    assert curve(0) == curve(0.5) == 2.0, "there is no forward over less than a row"
    curve = CostCurve.flat(0.05)
    assert [curve(n) for n in (1, 2, 21)] == pytest.approx([1.0, 1.05, 2.0])
    assert CostCurve.flat(0.0)(50) == 1.0


def test_dips_of_noise_are_levelled_by_their_mean() -> None:
    assert CostCurve.monotone((1, 2, 4, 8), (1.0, 1.3, 1.1, 2.0)).seconds == pytest.approx((1.0, 1.2, 1.2, 2.0))
    assert CostCurve.monotone((1, 2, 4), (3.0, 2.0, 1.0)).seconds == pytest.approx((2.0, 2.0, 2.0))
    assert CostCurve.monotone((1, 2, 4), (2.0, 3.0, 1.0)).seconds == pytest.approx((2.0, 2.0, 2.0))
    rising = (1.0, 1.0, 1.5)
    assert CostCurve.monotone((1, 2, 4), rising).seconds == rising
    one_outlier = CostCurve.monotone((1, 2, 4, 8, 16), (1.0, 9.0, 1.2, 1.3, 1.4))
    assert one_outlier(16) < 9.0, "a single bad measurement does not raise everything after it to its height"


@pytest.mark.parametrize("rows", [(), (2, 4), (1, 1), (1, 4, 2)])
def test_rows_that_are_no_increasing_counts_from_one_are_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ParameterError, match="rows of a cost curve"):
        CostCurve(rows, (1.0,) * len(rows))


@pytest.mark.parametrize("seconds", [(), (1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (1.0, math.inf)])
def test_times_that_are_none_are_refused(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ParameterError, match="for 2 row counts"):
        CostCurve((1, 2), seconds)
