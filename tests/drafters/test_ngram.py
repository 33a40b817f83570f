"""The n-gram drafter: what it matches, copies and remembers, and when it proposes nothing."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

from slipstream.drafters.ngram import FOLLOWERS, NgramConfig, NgramStore
from tests.drafters.lookup_conformance import LookupCase

THE, CAT, SAT, RAN, DOT = range(5)
LOOKUP = LookupCase("ngram")


def test_the_example_of_the_docstring() -> None:
    text = [THE, CAT, SAT, DOT, THE, CAT, RAN, DOT, THE, CAT]
    assert LOOKUP.chain(text, 3, row_cost=0.05) == [RAN, DOT, THE]


def test_no_match_is_longer_than_max_ngram() -> None:
    #  "2 3" was followed by 4 three times, "1 2 3" by 5 once
    assert LOOKUP.chain([2, 3, 4, 2, 3, 4, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], depth=1, max_ngram=2) == [4]


def test_counts_equal_a_recount_from_scratch() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(3) for _ in range(400)]
    store, piece = NgramStore(NgramConfig(max_ngram=3, min_ngram=2)), list[int]()
    while len(piece) < len(tokens):
        piece = tokens[: len(piece) + rng.randrange(1, 6)]
        store.index(piece)
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for k in (2, 3):
        for i in range(k, len(tokens)):
            followers[tuple(tokens[i - k : i])][tokens[i]] += 1
    assert len(store) == len(followers)
    longest = followers[tuple(tokens[-3:])]
    follower = store.follower(tokens)
    assert follower is not None
    assert longest[follower[0]] == max(longest.values())


def test_memory_is_bounded_and_the_most_recent_is_kept() -> None:
    config = NgramConfig(max_ngram=2, max_entries=200)
    rng = random.Random(4)
    tokens = [rng.randrange(1000) for _ in range(5000)]
    tokens += tokens[-20:-10]
    store = NgramStore(config)
    store.index(tokens)
    assert len(store) <= 200
    assert store.follower(tokens) == (tokens[-20], len(tokens) - 20, 2)


def test_a_context_that_keeps_occurring_survives_any_number_of_others() -> None:
    config = NgramConfig(max_ngram=1, max_entries=20)
    tokens = [t for i in range(100, 400) for t in ((1, 2) if i % 3 == 0 else (i,))]
    store = NgramStore(config)
    store.index(tokens)
    follower = store.follower([1])
    assert follower is not None
    assert follower[0] == 2


def test_followers_of_one_context_are_bounded() -> None:
    store = NgramStore(NgramConfig(max_ngram=1))
    tokens = [t for i in range(500) for t in (0, 1000 + i)] + [0, 7, 0, 7, 0]
    store.index(tokens)
    entry = store._young[0,]
    assert isinstance(entry, dict)
    assert len(entry) == FOLLOWERS
    assert store.follower(tokens) == (7, len(tokens) - 2, 1)
