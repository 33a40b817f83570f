"""Figures of benchmarks."""

from benchmarks.figures import agreement, spread


def test_spread():
    assert spread([1, 2, 3, 4, 5]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


def test_agreement_names_the_first_difference():
    assert agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 8]]) == {
        "identical": 0.5,
        "divergences": [{"prompt": 1, "token": 1}],
    }
    assert agreement([[1, 2]], [[1]])["divergences"] == [{"prompt": 0, "token": 1}]
