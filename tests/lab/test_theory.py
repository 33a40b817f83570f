"""The closed forms reproduce the published tables."""

from __future__ import annotations

from fractions import Fraction

import pytest

from slipstream.lab.theory import (
    acceptance_rate,
    best_gamma,
    block_expected_accepted,
    expected_accepted,
    expected_length,
    expected_tokens,
    guaranteed_speedup,
    latency_ratio,
    operations,
    speedup,
)


@pytest.mark.parametrize(
    ("alpha", "gamma", "ops", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_leviathan_table_1(alpha: float, gamma: int, ops: float, speed: float) -> None:
    assert operations(alpha, gamma, c_hat=0) == pytest.approx(ops, abs=0.0051)
    assert speedup(alpha, gamma, c=0) == pytest.approx(speed, abs=0.0051)


TABLES_2_AND_4 = [
    # gamma, alpha, c, predicted: EnDe T=0, EnDe T=1, CNNDM T=0, CNNDM T=1, drafts small, base, large
    (7, 0.75, 0.02, 3.2), (7, 0.80, 0.04, 3.3), (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3), (5, 0.68, 0.04, 2.4), (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4), (5, 0.73, 0.04, 2.6), (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9), (3, 0.55, 0.04, 1.8), (3, 0.56, 0.11, 1.6),
]  # fmt: skip


@pytest.mark.parametrize(("gamma", "alpha", "c", "predicted"), TABLES_2_AND_4)
def test_leviathan_tables_2_and_4(gamma: int, alpha: float, c: float, predicted: float) -> None:
    """Within .07, because alpha and c are printed rounded: some pair that rounds to them gives the printed figure."""
    assert abs(speedup(alpha, gamma, c) - predicted) <= 0.07
    low, high = speedup(alpha - 0.005, gamma, c + 0.005), speedup(alpha + 0.005, gamma, c - 0.005)
    assert low < predicted + 0.05
    assert high > predicted - 0.05


def test_leviathan_bigram() -> None:
    assert expected_tokens(0.2, 3) == pytest.approx(1.25, abs=0.0051)
    assert speedup(0.2, 3, c=0) == pytest.approx(1.25, abs=0.0051)


OPTIMAL = {
    0.02: [(4, 1.794), (6, 2.170), (8, 2.758), (11, 3.817), (19, 6.365)],
    0.05: [(3, 1.630), (4, 1.921), (6, 2.353), (8, 3.092), (13, 4.674)],
    0.10: [(2, 1.458), (3, 1.674), (4, 1.981), (6, 2.470), (10, 3.431)],
}


@pytest.mark.parametrize("c", OPTIMAL)
def test_best_gamma_and_its_speedup(c: float) -> None:
    for alpha, (gamma, speed) in zip((0.5, 0.6, 0.7, 0.8, 0.9), OPTIMAL[c], strict=True):
        assert best_gamma(alpha, c) == gamma
        assert speedup(alpha, gamma, c) == pytest.approx(speed, abs=0.00051)
        assert speedup(alpha, gamma, c) == max(speedup(alpha, g, c) for g in range(100))


def test_no_draft_pays_when_alpha_is_at_most_c() -> None:
    for alpha, c in ((0.1, 0.1), (0.2, 0.5), (0.0, 0.1)):
        assert best_gamma(alpha, c) == 0
        assert guaranteed_speedup(alpha, c) <= 1


def test_the_guaranteed_speedup_is_that_of_one_guess() -> None:
    for alpha, c in ((0.3, 0.1), (0.9, 0.02)):
        assert guaranteed_speedup(alpha, c) == pytest.approx(speedup(alpha, 1, c))
        assert guaranteed_speedup(alpha, c) > 1


def test_a_perfect_drafter_yields_gamma_plus_one() -> None:
    assert expected_tokens(1.0, 4) == 5
    assert expected_accepted(1.0, 4) == 4
    assert best_gamma(1.0, 0.0, longest=7) == 7


@pytest.mark.parametrize(("milliseconds", "printed"), [(7.00, 2.01), (5.73, 2.46)])
def test_chen_table(milliseconds: float, printed: float) -> None:
    """XSum greedy and HumanEval; plain decoding takes 14.1 ms a token."""
    assert latency_ratio(14.1, milliseconds) == pytest.approx(printed, abs=0.0051)


def test_chen_prints_one_ratio_that_its_own_times_do_not_give() -> None:
    """XSum nucleus is printed as 1.92x, but 14.1 ms / 7.52 ms is 1.875."""
    assert latency_ratio(14.1, 7.52) == pytest.approx(1.875)
    assert abs(latency_ratio(14.1, 7.52) - 1.92) > 0.04


def test_acceptance_rate_is_one_minus_total_variation() -> None:
    p, q = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
    assert acceptance_rate(p, q) == pytest.approx(0.8)
    assert acceptance_rate(p, p) == pytest.approx(1.0)
    assert acceptance_rate([1.0, 0.0], [0.0, 1.0]) == 0


@pytest.mark.parametrize(
    ("gamma", "token", "block"),
    [
        (1, Fraction(2, 3), Fraction(2, 3)),
        (2, Fraction(10, 9), Fraction(11, 9)),
        (3, Fraction(38, 27), Fraction(5, 3)),
        (4, Fraction(130, 81), Fraction(166, 81)),
    ],
)
def test_block_verification_figures(gamma: int, token: Fraction, block: Fraction) -> None:
    p, q = [Fraction(1, 3), Fraction(2, 3)], [Fraction(2, 3), Fraction(1, 3)]
    assert expected_accepted(acceptance_rate(p, q), gamma) == token
    assert block_expected_accepted(p, q, gamma) == block
    assert block_expected_accepted([float(x) for x in p], [float(x) for x in q], gamma) == pytest.approx(float(block))


@pytest.mark.parametrize(
    ("rates", "length"),
    [
        ((0.7296, 0.5208, 0.3545), 2.60),  # Llama-3.1-8B with EAGLE-3
        ((0.6541, 0.3993, 0.2020), 2.26),  # Qwen3-8B
        ((0.7165, 0.5120, 0.3337), 2.56),  # gpt-oss-20b
    ],
)
def test_length_is_one_plus_the_rates_by_position(rates: tuple[float, ...], length: float) -> None:
    assert expected_length(rates) == pytest.approx(length, abs=0.0051)
