"""Loops are found at the end of a text, and only there."""

import pytest

from slipstream.measure.loops import find_looping, measure_loops, measure_periodic_tail


@pytest.mark.parametrize(
    ("ids", "tail"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0),
        ([9, 8, 7] + [1, 2, 3] * 4, 12),
        ([9, 8, 7] + [1, 2, 3] * 4 + [1], 13),  # the loop is cut off
        ([5] * 20, 20),
        ([5] * 7, 0),  # short
        ([1, 2, 3, 4] * 2, 0),  # twice is no loop
        ([1, 2, 3] * 5 + [9, 8, 7, 6, 5, 4], 0),  # it ended
        ([], 0),
    ],
)
def test_the_tail_is_what_repeats_exactly(ids, tail):
    assert measure_periodic_tail(ids) == tail


def test_shares_are_of_tokens_and_looping_texts_are_named():
    texts = {0: list(range(20)), 4: list(range(10)) + [1, 2] * 5, 7: list(range(40)) + [3] * 8}
    assert measure_loops(texts) == 18 / 88
    assert find_looping(texts) == [4]
    assert measure_loops({}) == 0
