"""Statistics for the test of all prompts together in `served`: how often a token is the most frequent follower of the
token before it, the second most frequent, and so on. Also computes the smallest fault that this test finds.

This size is simulated, because it depends on the texts: if every token has many followers, samples do not show which
follower is the most likely, and a fault that favours it stays hidden. The simulation draws new followers from the
frequencies in the samples, and plants a fault in half of the draws. On Markov chains of up to 7.5 bits per token, such
faults are found as often as stated; at 10 bits, two of three are found.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slipstream.verify.outcomes import decisive_level, shift_seen
from slipstream.verify.verification import POWER

Texts = Seq[Seq[str]]
PLACES = 6
"""Number of ranks of a token among the followers of the token before it. Rarer followers share the last rank."""
RUNS, ROUNDS = 16, 4
"""Number of simulated runs of the test, and of steps in the search for the size of the fault."""


def count_followers(one: Texts, other: Texts) -> dict[str, Counter[str]]:
    """Count the followers of each token in both samples; "" stands for the token before a text."""
    after: dict[str, Counter[str]] = defaultdict(Counter)
    for text in (*one, *other):
        for before, token in pairwise(("", *text)):
            after[before][token] += 1
    return after


def count_choices(one: Texts, other: Texts) -> tuple[np.ndarray, np.ndarray]:
    """Count, for each text of two samples, its tokens at each of the `PLACES`, float32 [texts, places].

    A token's place is its rank by frequency among the followers of the token before it (or among the first tokens), in
    both samples together, so it does not depend on the sample of the text. A token without alternatives has no place.
    """
    place = {
        (before, token): min(at, PLACES - 1)
        for before, counts in count_followers(one, other).items() if len(counts) > 1
        for at, (token, _) in enumerate(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
    }  # fmt: skip
    sides = []
    for texts in (one, other):
        counts = np.zeros((len(texts), PLACES), dtype=np.float32)
        for row, text in zip(counts, texts, strict=True):
            for pair in pairwise(("", *text)):
                if pair in place:
                    row[place[pair]] += 1
        sides.append(counts)
    return sides[0], sides[1]


def smallest_shift(samples: Seq[tuple[Texts, Texts]], level: float) -> float | None:
    """Return the size of the smallest fault that the test finds with probability `POWER`. The assumed fault sometimes
    emits the most likely token instead of a sample; its size is the total variation, averaged over all tokens. None:
    the test finds no such fault, however large. samples: for each prompt, the texts of both servers."""
    followers = _Followers.of(samples)
    if followers is None:
        return None
    usual = followers.play(0.0).spread  # would be 1 if tokens were independent
    due = usual * shift_seen(PLACES - 1, decisive_level(level, len(samples) + 1), math.sqrt(POWER))
    rate = 0.25
    for _ in range(ROUNDS):
        seen = followers.play(rate).noncentrality
        if rate == 1 and seen < due:
            return None
        rate = min(1.0, rate * math.sqrt(due / max(seen, due / 16)))
    return rate * followers.unlikely


@dataclass(frozen=True)
class _Played:
    """Result of a simulated test.

    noncentrality  noncentrality of the test's statistic.
    spread         mean of the statistic, divided by its mean for independent tokens without a fault."""

    noncentrality: float
    spread: float


@dataclass(frozen=True)
class _Followers:
    """Estimated probabilities of the followers of each token in each prompt. A pair of token and prompt is a "context".

    ends      cumulative probabilities of the followers, over all contexts in turn; each context has mass 1. The last
              follower of a context stands for all followers that the samples do not contain.
    unseen    True for this last follower of each context.
    hidden    number of the first unseen follower of each context; unseen followers are numbered over all contexts. Each
              is assumed to be as probable as a follower that occurs once.
    tokens    for each token of both samples, its context.
    unlikely  mean probability that a token is not the most likely one.
    """

    ends: np.ndarray
    unseen: np.ndarray
    hidden: np.ndarray
    tokens: np.ndarray
    unlikely: float

    @staticmethod
    def of(samples: Seq[tuple[Texts, Texts]]) -> "_Followers | None":
        """Estimate from samples; None if no token has a place. Modified Kneser-Ney smoothing (Chen & Goodman 1999,
        section 3) moves probability to unseen followers, depending on how many followers occur once, twice, ..."""
        contexts = [[*counts.values()] for pair in samples for counts in count_followers(*pair).values()]
        if all(len(counts) == 1 for counts in contexts):
            return None
        seen = Counter(count for counts in contexts for count in counts)
        usual = seen[1] / max(1, seen[1] + 2 * seen[2])
        more = [(r + 1) * seen[r + 1] / max(1, seen[r]) for r in range(4)]
        luck = [max(0.0, r - usual * more[r]) if seen[1] else 0.0 for r in range(4)]
        masses = [[count - luck[min(count, 3)] for count in counts] for counts in contexts]
        masses = [[*mass, sum(counts) - sum(mass)] for mass, counts in zip(masses, contexts, strict=True)]
        sizes = np.array([sum(counts) for counts in contexts])
        starts = np.cumsum([0, *map(len, masses)])
        chance = np.array([max(mass[:-1]) for mass in masses]) / sizes
        return _Followers(
            ends=np.concatenate([c + np.cumsum(mass) / sum(mass) for c, mass in enumerate(masses)]),
            hidden=np.cumsum([0.0, *(max(1.0, mass[-1] // max(1 - luck[1], 1e-3)) for mass in masses)]),
            unseen=np.isin(np.arange(starts[-1]), starts[1:] - 1),
            tokens=np.repeat(np.arange(len(contexts)), sizes),
            unlikely=float((sizes * (1 - chance)).sum() / sizes.sum()),
        )

    def play(self, rate: float) -> _Played:
        """Run the test on newly drawn texts. One half has the fault: with probability `rate`, a token is replaced by
        the most likely one. The samples do not always show which token this is, so other draws decide."""
        rng = np.random.default_rng(0)
        apart, total, statistic = np.zeros(PLACES), np.zeros(PLACES), 0.0
        for _ in range(RUNS):
            kinds, _, place = self._rank(self._draw(rng), rng)
            best = kinds[place == 0]  # the most likely follower of each context
            drawn = self._draw(rng)
            faulty = rng.permutation(len(drawn)) % 2 == 1
            drawn = np.where(faulty & (rng.random(len(drawn)) < rate), best[self.tokens], drawn)
            kinds, kind, place = self._rank(drawn, rng)
            context = np.empty(len(kinds), dtype=np.int64)
            context[kind] = self.tokens
            shown = (np.bincount(context) > 1)[self.tokens]
            one, other = (
                np.bincount(np.minimum(place[kind[shown & side]], PLACES - 1), minlength=PLACES).astype(np.float64)
                for side in (~faulty, faulty)
            )
            apart, total = apart + other - one, total + other + one
            statistic += float(((other - one) ** 2 / np.maximum(other + one, 1)).sum())
        signal = float((apart**2 / np.maximum(total, 1)).sum()) / RUNS
        return _Played(signal, statistic / RUNS / (PLACES - 1))

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw a follower for the context of each token of the samples."""
        drawn = np.searchsorted(self.ends[:-1], self.tokens + rng.random(len(self.tokens)), "right")
        hidden = self.hidden[self.tokens] + rng.random(len(drawn)) * np.diff(self.hidden)[self.tokens]
        return np.where(self.unseen[drawn], len(self.ends) + hidden.astype(np.int64), drawn)

    def _rank(self, drawn: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the kinds of followers, the kind of each token, and the rank of each kind by frequency in its context,
        as in `count_choices`; ties are in random order. Kinds are in the order of their contexts."""
        kinds, first, kind, counts = np.unique(drawn, return_index=True, return_inverse=True, return_counts=True)
        order = np.lexsort((rng.random(len(kinds)), -counts, self.tokens[first]))
        context = self.tokens[first][order]
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return kinds[order], back[kind], np.arange(len(order)) - np.searchsorted(context, context)
