"""How often tokens are the most frequent one after the token before them, the second, ...: the test of all prompts
together in `served`, and the size of the faults that it finds.

The size is simulated, because it depends on the texts: where every token has many followers, the samples do not say
which one is the most likely, and a fault that favours it stays hidden. So followers are drawn anew from what the
samples say of them, and a fault is planted into one half of the draws. On Markov chains of up to 7.5 bits a token such
faults are found as often as stated; at 10 bits, two of three.
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
"""Places of a token among those that follow the token before it; the last one is of all that are less frequent."""
RUNS, ROUNDS = 16, 4
"""Simulated runs of the test, and steps towards the size of the fault."""


def count_followers(one: Texts, other: Texts) -> dict[str, Counter[str]]:
    """Count the followers of each token in both samples; "" is the token before a text."""
    after: dict[str, Counter[str]] = defaultdict(Counter)
    for text in (*one, *other):
        for before, token in pairwise(("", *text)):
            after[before][token] += 1
    return after


def count_choices(one: Texts, other: Texts) -> tuple[np.ndarray, np.ndarray]:
    """Count, for each text of two samples, its tokens at each of the `PLACES`, float32 [texts, places].

    A token's place is its rank by frequency after the token before it, or at the beginning of the text, in both samples
    together. So it does not depend on which sample the text is from. A token without alternatives has no place.
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
    """Return the total variation of the smallest fault of one kind that the test finds with probability `POWER`: one
    that now and then takes the most likely token in place of a sample. It is averaged over all tokens. None: the test
    finds no such fault, however large. samples: of each prompt, from both servers."""
    followers = _Followers.of(samples)
    if followers is None:
        return None
    usual = followers.play(0.0).spread  # 1, if tokens were independent
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
    """noncentrality  of the test's statistic.
    spread         its mean over what it would be for independent tokens without a fault."""

    noncentrality: float
    spread: float


@dataclass(frozen=True)
class _Followers:
    """What the samples say of the followers of each token, in each prompt ("context").

    ends      where the probability of each follower ends, summed over all contexts, each of which has mass 1. The last
              follower of a context stands for all that were not seen.
    unseen    whether a follower is such a one.
    hidden    where the followers of a context that were not seen begin, numbered over all contexts. They are as
              probable as one that was seen once.
    tokens    context of each token of both samples.
    unlikely  mean probability that a token is not the most likely one.
    """

    ends: np.ndarray
    unseen: np.ndarray
    hidden: np.ndarray
    tokens: np.ndarray
    unlikely: float

    @staticmethod
    def of(samples: Seq[tuple[Texts, Texts]]) -> "_Followers | None":
        """None if no token has a place. How much of a follower's frequency is luck, and belongs to followers that were
        not seen, depends on how many are seen once, twice, ... (modified Kneser-Ney: Chen & Goodman 1999, 3)."""
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
        """Run the test on texts drawn anew. In one half, the most likely token is taken with this probability. Which
        one that is, the samples do not always say, so it is the most frequent one of other draws."""
        rng = np.random.default_rng(0)
        apart, total, statistic = np.zeros(PLACES), np.zeros(PLACES), 0.0
        for _ in range(RUNS):
            kinds, _, place = self._rank(self._draw(rng), rng)
            best = kinds[place == 0]  # of each context
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
        """A follower for each token of the samples."""
        drawn = np.searchsorted(self.ends[:-1], self.tokens + rng.random(len(self.tokens)), "right")
        hidden = self.hidden[self.tokens] + rng.random(len(drawn)) * np.diff(self.hidden)[self.tokens]
        return np.where(self.unseen[drawn], len(self.ends) + hidden.astype(np.int64), drawn)

    def _rank(self, drawn: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the kinds of followers, the kind of each token, and the rank of each kind by frequency in its context,
        as in `count_choices`; equals have a random order. Kinds are in the order of their contexts."""
        kinds, first, kind, counts = np.unique(drawn, return_index=True, return_inverse=True, return_counts=True)
        order = np.lexsort((rng.random(len(kinds)), -counts, self.tokens[first]))
        context = self.tokens[first][order]
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return kinds[order], back[kind], np.arange(len(order)) - np.searchsorted(context, context)
