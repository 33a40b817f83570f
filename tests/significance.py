"""Statistical tests whether samples have a distribution."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence as Seq

from scipy.stats import chi2

LEVEL = 1e-6
"""Probability that a test fails although the program is correct. With about 40 tests, this happens once in 25,000 runs.
Seeds are fixed, so a test that passes once always passes. A wrong rule fails with a far smaller p-value (see the
tests)."""


def g_test(
    samples: Iterable[Hashable] | Mapping[Hashable, int], probs: Mapping[Hashable, float], floor: float = 5.0
) -> float:
    """Return the p-value of the likelihood-ratio test that `samples` have the distribution `probs` (G is asymptotically
    chi-squared). samples: outcomes, or counts by outcome. Outcomes that are expected fewer than `floor` times are
    joined in one cell. An impossible outcome gives the p-value 0."""
    counts = Counter(samples)
    if any(not probs.get(outcome, 0) for outcome in counts):
        return 0.0
    n = sum(counts.values())
    cells = [(counts[o], n * float(p)) for o, p in probs.items() if n * float(p) >= floor]
    rest = (n - sum(count for count, _ in cells), n - sum(wanted for _, wanted in cells))
    if rest[1] >= 1e-9:
        cells.append(rest)
    g = 2 * sum(count * math.log(count / wanted) for count, wanted in cells if count)
    return float(chi2.sf(max(g, 0.0), max(1, len(cells) - 1)))


def assert_distribution(samples: Iterable[Hashable] | Mapping[Hashable, int], probs: Mapping[Hashable, float]) -> None:
    p_value = g_test(samples, probs)
    assert p_value >= LEVEL, f"the samples do not have that distribution: p-value {p_value:.1e} < {LEVEL:.0e}"


def needed(probs: Mapping[Hashable, float], other: Mapping[Hashable, float]) -> float:
    """Return how many samples of `other` are needed so that `g_test` against `probs` is expected to fail. The number is
    small if the test can distinguish the distributions. The expected G is 2 n KL(other, probs) + degrees of freedom."""
    if any(outcome not in probs for outcome in other):
        return 0.0
    divergence = sum(p * math.log(p / probs[outcome]) for outcome, p in other.items())
    freedom = len(probs) - 1
    return math.inf if divergence < 1e-12 else (float(chi2.isf(LEVEL, freedom)) - freedom) / (2 * divergence)


def beginnings(outputs: Iterable[Seq[int]], length: int = 3) -> Counter[tuple[int, ...]]:
    return Counter(tuple(output[:length]) for output in outputs)


def distribution(after: Callable[[list[int]], Seq[float]], length: int) -> dict[tuple[int, ...], float]:
    """Return the distribution of the first `length` tokens of an output. after: function from the tokens so far to the
    probabilities of the next token."""
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        reached = {(*text, t): mass * p for text, mass in reached.items() for t, p in enumerate(after(list(text))) if p}
    return reached
