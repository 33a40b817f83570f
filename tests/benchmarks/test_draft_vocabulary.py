"""`benchmarks.draft_vocabulary`: what its figures are computed of."""

from collections import Counter

import pytest

pytest.importorskip("numba")

from benchmarks.draft_vocabulary import least_accepted, most_common, tokens_per_step


def test_a_step_breaks_even_where_its_tokens_cost_as_much_as_plain_decoding() -> None:
    assert tokens_per_step(0.5, 3) == 1.875
    assert least_accepted(1.875, 3) == pytest.approx(0.5)
    assert least_accepted(1.0, 3) == pytest.approx(0.0)
    assert least_accepted(5.0, 3) == 1.0


def test_where_fewer_ids_occur_than_are_drafted_the_first_others_are_drafted() -> None:
    counts = Counter({7: 3, 2: 2, 9: 1})
    assert most_common(counts, 2) == {7, 2}
    assert most_common(counts, 5) == {7, 2, 9, 0, 1}
