"""Tests of single tokens against the target's distribution at their positions.

With any draft, an exact rule emits token x_t with the target's probability p_t(x_t | x_<t). So the distribution of
each of these sums over positions is known before the tokens are drawn:

    ranks     u_t, the mass of all tokens that are more likely than x_t, plus a uniform share of the mass of x_t itself,
              is uniform on [0, 1) and independent from position to position (Rosenblatt 1952, with a random share
              because tokens are discrete: Smith 1985). A chi-squared test over equal bins.
    outcomes  how often x_t is in a set of tokens, compared with the sum of the set's mass: an exact test, or a normal
              one for many positions. Faults change the probability of these sets: tokens that the draft favours, rare
              tokens, the end of a text, the edge of a filter, tokens with a penalty (see `OUTCOMES`).
    ids       v_t, computed like u_t but with the tokens in the order of their ids, as in sampling, is uniform and
              independent, too. It shows if a random number is used twice.
    pairs     products of v_t - 1/2 and v_{t-1} - 1/2, and of such values of two requests, have mean 0.
    joint     (u_{t-1}, u_t) of every other t is uniform in the unit square under any rule: a chi-squared test over a
              grid of bins. This tests the joint distribution of neighbouring tokens.

The sums are pooled over texts, prompts, settings and draft lengths, but separate for each place in the step, so that
correct draft tokens do not hide a fault of the bonus token. This is valid if a token has the target's distribution
*given that its position was reached*, which holds for `rejection` and `coupled` but not for `block`, whose verdict on
the beginning of a chain depends on its end. For such a rule all positions form one place. All sums are valid there,
because complete texts have the target's joint distribution; only what the draft favours is not tested.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from slipstream.theory.closed_forms import smallest
from slipstream.verify.reference import Context

DRAFTED, DEEPER, BEHIND, BONUS, UNDRAFTED, ALL, LATE, CHOSEN = (
    "draft token {}", "draft token 3 or deeper", "behind a draft token", "bonus token", "without a draft",
    "all positions", "late positions", "chosen lengths",
)  # fmt: skip
BY_REQUEST = "between requests"
PLACES = (DRAFTED.format(1), DRAFTED.format(2), DEEPER, BEHIND, BONUS, UNDRAFTED, ALL, LATE, CHOSEN, BY_REQUEST)
FAVOURED, BEST, END, PENALISED, PAIR, JOINT = (
    "favoured", "most likely", "ends the text", "penalised", "with the last", "joint"
)  # fmt: skip
RARE = {"below 1 %": 1e-2, "below 0.1 %": 1e-3, "below 0.01 %": 1e-4}
"""Outcome -> bound: the token's probability under the target is below this bound. Each set contains the rarer sets."""
EDGES = {name: f"edge of {name}" for name in ("top_k", "top_p", "min_p")}
"""Filter -> outcome: the token is the least likely one that the filter keeps, and no other filter is set."""
IDS = "ids"
OUTCOMES = (IDS, FAVOURED, BEST, *RARE, END, *EDGES.values(), PENALISED, PAIR, JOINT)
LATE_FROM = 256
"""First position in the context that counts as late."""
SCREEN = 0.0005
"""Significance level of the first run of a test. A test that fails at this level is repeated on new samples."""
GRID = 4
BINS = GRID * GRID
FEWEST = 5 * BINS
"""Fewest positions for the test of ranks at a place, so that the expected count of each bin is at least five."""
SMALLEST_VARIANCE, NORMAL_VARIANCE = 1.0, 100.0
"""Smallest variance of the number of tokens in a set for a test at all, and for the normal approximation."""


def sets(p: np.ndarray, favoured: np.ndarray | None, context: Context, edge: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (outcome, ids in its set) at one position, for `OUTCOMES`. p: float64 [V]; favoured: ids that the draft
    favours; edge: True if rounding cannot change which token is the last that the filters keep."""
    params, prompt, output, stop_ids = context
    if favoured is not None:
        yield FAVOURED, favoured
    possible = np.flatnonzero(p)
    masses = p[possible]
    yield BEST, possible[masses == masses.max()]
    for name, below in RARE.items():
        yield name, possible[masses < below]
    yield END, np.array([token for token in stop_ids if token < len(p)], dtype=np.int64)
    filters = [name for name in EDGES if getattr(params, name) not in (0, 1.0)]
    if edge and len(filters) == 1:
        yield EDGES[filters[0]], possible[masses == masses.min()]
    if params.repetition_penalty not in (None, 1.0) or params.frequency_penalty or params.presence_penalty:
        yield PENALISED, np.array([token for token in {*prompt, *output} if token < len(p)], dtype=np.int64)


def ranks(p: np.ndarray, token: int, share: float) -> tuple[float, float]:
    """Compute u_t and v_t of a token. p: float64 [V]; share: uniform random share of the token's own mass."""
    mass = p[token]
    return float(p[p > mass].sum() + share * p[p == mass].sum()), float(p[:token].sum() + share * mass)


def uniform(counts: np.ndarray) -> float | None:
    """Return the p-value of the chi-squared test that these bins are equally likely; None if the counts are too few."""
    n = int(counts.sum())
    return chi2_sf(float(((counts - n / BINS) ** 2).sum() / (n / BINS)), BINS - 1) if n >= FEWEST else None


@dataclass
class Sum:
    """Sums over positions: number of tokens that were in the set (`count`), and mass of the set at each (`masses`)."""

    count: int = 0
    masses: list[float] = field(default_factory=list)

    def add(self, inside: bool, mass: float) -> None:
        self.count += inside
        self.masses.append(min(1.0, mass))

    @property
    def p(self) -> float | None:
        """The two-sided p-value of `count`; None if there is too little to test."""
        masses = np.array(self.masses)
        variance = float((masses * (1 - masses)).sum())
        if variance < SMALLEST_VARIANCE:
            return None
        if variance >= NORMAL_VARIANCE:
            return math.erfc(abs(self.count - sum(self.masses)) / math.sqrt(2 * variance))
        chances = np.ones(1)  # probability of each count
        for mass in masses[masses > 0]:
            chances = np.convolve(chances, (1 - mass, mass))
        below, above = chances[: self.count + 1].sum(), chances[self.count :].sum()
        return float(min(1.0, 2 * min(below, above)))


@dataclass
class Evidence:
    """The sums over the positions of one place.

    ranks      counts of u_t in equal bins; ids: counts of v_t; joint: counts of pairs of u_t.
    sums       outcome -> `Sum`.
    products   products of v_t - 1/2 of two tokens, in standard deviations.
    forbidden  number of tokens that the target cannot emit.
    """

    ranks: np.ndarray = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    ids: np.ndarray = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    joint: np.ndarray = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    sums: dict[str, Sum] = field(default_factory=lambda: defaultdict(Sum))
    products: list[float] = field(default_factory=list)
    forbidden: int = 0

    def token(self, u: float, v: float, outcomes: Seq[tuple[str, bool, float]]) -> None:
        """Add a token with its ranks u and v. outcomes: (outcome, True if the token is in the set, mass of the set)."""
        self.ranks[min(BINS - 1, int(u * BINS))] += 1
        self.ids[min(BINS - 1, int(v * BINS))] += 1
        for name, inside, mass in outcomes:
            self.sums[name].add(inside, mass)

    def neighbours(self, u: float, after: float) -> None:
        """Add the ranks of two neighbouring tokens. A token may be in one pair only."""
        self.joint[min(GRID - 1, int(u * GRID)) * GRID + min(GRID - 1, int(after * GRID))] += 1

    def pair(self, v: float, other: float) -> None:
        """Add v_t of two tokens, which are independent."""
        self.products.append(12 * (v - 0.5) * (other - 0.5))

    @property
    def positions(self) -> int:
        return int(self.ranks.sum()) + self.forbidden or len(self.products)


@dataclass(frozen=True)
class PlaceTest:
    """The tests of one place. ranks, outcomes: p-values; None or missing if there is too little to test."""

    place: str
    positions: int
    forbidden: int
    ranks: float | None
    outcomes: Mapping[str, float]

    @property
    def p(self) -> float:
        """The smallest p-value; 0 if an impossible token was emitted, 1 if there is too little to test."""
        return 0.0 if self.forbidden else min([1.0 if self.ranks is None else self.ranks, *self.outcomes.values()])


def judge(place: str, row: Evidence) -> PlaceTest:
    outcomes = {name: p for name in OUTCOMES if name in row.sums and (p := row.sums[name].p) is not None}
    ids, joint = uniform(row.ids), uniform(row.joint)
    if ids is not None:
        outcomes = {IDS: ids} | outcomes
    if len(row.products) >= FEWEST:
        outcomes[PAIR] = math.erfc(abs(sum(row.products)) / math.sqrt(2 * len(row.products)))
    if joint is not None:
        outcomes[JOINT] = joint
    return PlaceTest(place, row.positions, row.forbidden, uniform(row.ranks), outcomes)


def decisive_level(level: float, tests: int) -> float:
    """Return the level of the repeated tests. All tests together then call a correct run a bug with a probability of at
    most `level`. A first p-value below `SCREEN` times this level is as rare as two failures, so it decides alone."""
    return min(SCREEN, level / SCREEN / tests / 2)


def chi2_sf(x: float, freedom: float) -> float:
    a, b = (torch.tensor(v / 2, dtype=torch.float64) for v in (freedom, x))
    return float(torch.special.gammaincc(a, b))


@cache
def shift_seen(freedom: int, level: float, power: float) -> float:
    """Return the noncentrality at which chi-squared exceeds its critical value for `level` with probability `power`."""
    critical = _solve(lambda x: chi2_sf(x, freedom) <= level)
    return _solve(lambda shift: noncentral_sf(critical, freedom, shift) >= power)


def noncentral_sf(x: float, freedom: int, shift: float) -> float:
    """Return P(noncentral chi-squared > x): a mixture of central chi-squared distributions with freedom + 2 k degrees
    of freedom, where k is Poisson-distributed."""
    mean = shift / 2
    k = torch.arange(int(mean + 12 * math.sqrt(mean + 1) + 12), dtype=torch.float64)
    weights = torch.exp(k * math.log(mean) - mean - torch.lgamma(k + 1)) if mean else (k == 0).double()
    tails = torch.special.gammaincc(freedom / 2 + k, torch.full_like(k, x / 2))
    return float((weights * tails).sum())


def _solve(reached: Callable[[float], bool]) -> float:
    """Return the smallest number >= 0 for which `reached` holds. It must hold for every larger number, too."""
    high = 1.0
    while not reached(high):
        high *= 2
    return smallest(reached, 0.0, high)
