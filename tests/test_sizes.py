"""Numbers of bytes as text."""

import pytest

from slipstream.templates.sizes import size


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (28324608, "28.3 MB"), (141e9, "141.0 GB"), (2e12, "2.0 TB")],
)
def test_a_number_of_bytes_has_the_unit_that_keeps_it_short(n: float, text: str) -> None:
    assert size(n) == text
