"""Tests of samples against laws, with a stated p-value instead of a look."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from scipy import stats

P_VALUE = 1e-6
"""A right sampler fails one such test in a million; the mildest wrong rule is off by far more (see the tests)."""


def g_test(samples: Iterable[Hashable], law: Mapping[Hashable, float], floor: float = 5.0) -> float:
    """p-value of the likelihood-ratio test that `samples` have `law`. Outcomes expected fewer than `floor` times are
    put together in one cell; an impossible outcome gives 0."""
    counts = Counter(samples)
    if any(not law.get(outcome, 0) for outcome in counts):
        return 0.0
    n = sum(counts.values())
    cells = [(counts[o], n * float(p)) for o, p in law.items() if n * float(p) >= floor]
    rest = (n - sum(found for found, _ in cells), n - sum(wanted for _, wanted in cells))
    if rest[1] >= 1e-9:
        cells.append(rest)
    g = 2 * sum(found * math.log(found / wanted) for found, wanted in cells if found)
    return float(stats.chi2.sf(max(g, 0.0), max(1, len(cells) - 1)))


def assert_law(samples: Iterable[Hashable], law: Mapping[Hashable, float]) -> None:
    p_value = g_test(samples, law)
    assert p_value >= P_VALUE, f"the samples do not have that law: p-value {p_value:.1e} < {P_VALUE:.0e}"
