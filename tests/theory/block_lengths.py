"""How many draft tokens block verification accepts on average, for distributions that do not depend on the text."""

from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Any

Number = Any  # float or fractions.Fraction


def block_expected_accepted(p: Seq[Number], q: Seq[Number], gamma: int) -> Number:
    """Draft tokens accepted in one step under block verification, for distributions p and q that do not depend on the
    text: sum over i <= gamma of E[w_i], with w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)) (2403.10444, section 4).

    For comparison, token-by-token rejection accepts `expected_tokens(sum of min(p, q), gamma) - 1`.
    """
    total: Number = 0
    probs: dict[Number, Number] = {1: 1}  # value of w -> its probability
    for _ in range(gamma):
        longer: dict[Number, Number] = defaultdict(int)
        for w, weight in probs.items():
            for a, b in zip(p, q, strict=True):
                if b:
                    longer[min(1, w * a / b)] += weight * b
        probs = longer
        total += sum(w * weight for w, weight in probs.items())
    return total
