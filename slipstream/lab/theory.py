"""The closed forms of speculative decoding, with the letters of the papers.

    alpha   acceptance rate: probability that one guess stands, E[sum min(p, q)]
    gamma   draft length: guesses a round
    c       cost coefficient: time of one draft step over time of one target step
    c_hat   arithmetic coefficient: operations of one draft step over operations of one target step
    tau     tokens a round, the bonus token included

All assume that guesses stand or fall independently with the same alpha; measured acceptance falls with depth, so
measured figures sit beside these and not on them. Sources: Leviathan et al. 2211.17192 ("L"), Chen et al. 2302.01318,
Sun et al. 2403.10444.

The functions compute with whatever numbers they are given; fractions give exact fractions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Any

Number = Any  # float or fractions.Fraction, the same throughout one call


def acceptance_rate(p: Seq[Number], q: Seq[Number]) -> Number:
    """Probability that a guess drawn from q stands: sum of min(p, q), which is 1 - TV(p, q) (L, theorem 3.5)."""
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def expected_tokens(alpha: float, gamma: int) -> float:
    """tau = (1 - alpha^(gamma + 1)) / (1 - alpha): tokens one round yields (L, equation 1)."""
    return sum(alpha**i for i in range(gamma + 1))  # the same sum, also right at alpha = 1


def expected_accepted(alpha: float, gamma: int) -> float:
    """Guesses that stand in one round: tau - 1."""
    return expected_tokens(alpha, gamma) - 1


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Expected speed-up over plain decoding, tau / (gamma c + 1), if checking gamma guesses costs what one token
    costs (L, theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """Factor by which the number of arithmetic operations grows: (gamma c_hat + gamma + 1) / tau (L, theorem 3.11)."""
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def guaranteed_speedup(alpha: float, c: float) -> float:
    """(1 + alpha) / (1 + c): reached with one guess a round; above 1 exactly if alpha > c (L, corollary 3.9)."""
    return (1 + alpha) / (1 + c)


def best_gamma(alpha: float, c: float, longest: int = 256) -> int:
    """The draft length of the greatest expected speed-up, 0 if no draft pays; the shortest one among equals.

    The speed-up first rises and then falls with gamma, so the first fall ends the search.
    """
    best = 0
    while best < longest and speedup(alpha, best + 1, c) > speedup(alpha, best, c):
        best += 1
    return best


def latency_ratio(plain: float, speculative: float) -> float:
    """Speed-up as Chen et al. state it: seconds a token of plain decoding over seconds a token of speculation."""
    return plain / speculative


def expected_length(position_rates: Seq[float]) -> float:
    """tau = 1 + the share of rounds in which the guess at position 1, 2, ... stood. Exact, whatever the rates depend
    on, if every round drafts to full depth: the expectation of a count is the sum of P(count >= j)."""
    return 1 + sum(position_rates)


def block_expected_accepted(p: Seq[Number], q: Seq[Number], gamma: int) -> Number:
    """Guesses that stand in one round under block verification, for laws p and q that do not depend on the text:
    sum over i <= gamma of E[w_i], with w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)) (2403.10444, section 4).

    Beside it, `expected_accepted(acceptance_rate(p, q), gamma)` is what token-by-token rejection accepts.
    """
    total: Number = 0
    law: dict[Number, Number] = {1: 1}  # value of w -> its probability
    for _ in range(gamma):
        longer: dict[Number, Number] = defaultdict(int)
        for w, weight in law.items():
            for a, b in zip(p, q, strict=True):
                if b:
                    longer[min(1, w * a / b)] += weight * b
        law = longer
        total += sum(w * weight for w, weight in law.items())
    return total
