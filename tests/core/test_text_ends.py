"""`common_beginning`: how far two texts are the same."""

import pytest

from slipstream.core.text_ends import common_beginning


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [([], [], 0), ([], [1], 0), ([1], [2], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2, 1], [1, 2, 1], 3)],
)
def test_it_ends_at_the_first_difference_or_with_the_shorter_text(a: list[int], b: list[int], count: int) -> None:
    assert common_beginning(a, b) == common_beginning(tuple(b), a) == count
