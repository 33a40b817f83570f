"""Tiny languages with exact distributions of target and drafter, and all drafts that the drafter could make.

All probabilities are fractions with one small denominator, so that what verification computes from them in float64
can be converted back to the fraction it represents (see `tests.core.exact`).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise

Text = tuple[int, ...]
Distribution = tuple[Fraction, ...]


@dataclass(frozen=True)
class World:
    """A tiny language. p, q: functions that return the target's and the drafter's distribution after a text. A text is
    the tokens since the step began."""

    vocab: int
    p: Callable[[Text], Distribution]
    q: Callable[[Text], Distribution]
    fixed: Callable[[Text, int], int] = lambda text, node: 0
    """Function that returns a deterministic draft token, from the text before it and the node."""


def probs(*weights: int) -> Distribution:
    """`probs(7, 2, 1)` is (7/10, 2/10, 1/10)."""
    return tuple(Fraction(w, sum(weights)) for w in weights)


def point(vocab: int, token: int) -> Distribution:
    return probs(*(int(t == token) for t in range(vocab)))


def steady(p: Distribution, q: Distribution) -> World:
    """Make a world with the same distributions after every text. Deterministic draft tokens are the argmax of q."""
    return World(len(p), lambda _: p, lambda _: q, lambda text, node: q.index(max(q)))


@cache
def random_world(seed: int, vocab: int, greedy: bool = False) -> World:
    """Make a world with random distributions that differ after every text. Some have zeros, some are point masses, and
    after some texts p == q; all have the same denominator in 4..12. greedy: every p is a point mass, as at temperature
    0. Distributions are cached, because every draft needs them again."""
    n = random.Random(f"{seed}").randint(4, 12)

    def draw(*key: object) -> Distribution:
        rng = random.Random(f"{seed}/{vocab}/{key}")
        if rng.random() < 0.1:
            return point(vocab, rng.randrange(vocab))
        cuts = [0, *sorted(rng.randint(0, n) for _ in range(vocab - 1)), n]
        return tuple(Fraction(b - a, n) for a, b in pairwise(cuts))

    @cache
    def p(text: Text) -> Distribution:
        return point(vocab, random.Random(f"{seed}/top/{text}").randrange(vocab)) if greedy else draw("p", text)

    @cache
    def q(text: Text) -> Distribution:
        return p(text) if random.Random(f"{seed}/same/{text}").random() < 0.1 else draw("q", text)

    return World(vocab, p, q, lambda text, node: random.Random(f"{seed}/fixed/{text}/{node}").randrange(vocab))


@dataclass(frozen=True)
class Shape:
    """A draft tree, and how each of its draft tokens is made. Each node has one letter:

    s  sampled from q, independent of its siblings      w  sampled from q without the earlier `w` siblings
    p  a point mass                                     n  a point mass that is not acceptable
    """

    parents: tuple[int, ...]
    kinds: str

    @staticmethod
    def chain(kinds: str) -> "Shape":
        return Shape(tuple(range(-1, len(kinds) - 1)), kinds)

    @cached_property
    def height(self) -> int:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


@dataclass
class WeightedDraft:
    """One draft of one sequence: its tokens, the distribution from which each token was drawn, and the probability of
    the draft."""

    world: World
    shape: Shape
    tokens: list[int] = field(default_factory=list)
    q: list[Distribution] = field(default_factory=list)
    weight: Fraction = Fraction(1)

    def text(self, node: int) -> Text:
        """Return the text that ends with `node`; the empty text for -1."""
        return () if node < 0 else (*self.text(self.shape.parents[node]), self.tokens[node])

    @cached_property
    def rows(self) -> list[list[float]]:
        """Return the target's distribution at the last pending token and at every node."""
        return [_floats(self.world.p(self.text(node))) for node in range(-1, len(self.tokens))]

    @cached_property
    def q_rows(self) -> list[list[float]]:
        """Return `q` in float64."""
        return [_floats(q) for q in self.q]


def _floats(distribution: Distribution) -> list[float]:
    return [float(x) for x in distribution]


def every_draft(world: World, shape: Shape) -> Iterator[WeightedDraft]:
    """Yield every draft of this shape that has a positive probability."""

    def grow(draft: WeightedDraft) -> Iterator[WeightedDraft]:
        node = len(draft.tokens)
        if node == len(shape.parents):
            yield draft
            return
        drawn_from = _distribution_of(draft, node)
        for token, chance in enumerate(drawn_from):
            if chance:
                tokens, q = [*draft.tokens, token], [*draft.q, drawn_from]
                yield from grow(WeightedDraft(world, shape, tokens, q, draft.weight * chance))

    yield from grow(WeightedDraft(world, shape))


def _distribution_of(draft: WeightedDraft, node: int) -> Distribution:
    world, shape = draft.world, draft.shape
    parent, kind = shape.parents[node], shape.kinds[node]
    text = draft.text(parent)
    if kind in "pn":
        return point(world.vocab, world.fixed(text, node))
    q = world.q(text)
    if kind == "w":
        gone = {draft.tokens[i] for i in range(node) if shape.parents[i] == parent and shape.kinds[i] == "w"}
        rest = [0 if t in gone else x for t, x in enumerate(q)]
        if not sum(rest):  # no token is left to draw, so the drafter falls back to a deterministic draft token
            return point(world.vocab, world.fixed(text, node))
        q = tuple(Fraction(x) / sum(rest) for x in rest)
    return q
