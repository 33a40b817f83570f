"""The n-gram drafter: what it matches, copies and remembers, how it branches, and when it proposes nothing."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.ngram import FOLLOWERS, NgramConfig, NgramDrafter, NgramStore

THE, CAT, SAT, RAN, DOT = range(5)


def draft(tokens: Iterable[int], depth: int = 8, **options: object) -> Draft:
    return NgramDrafter(NgramConfig(**options)).propose([Sequence(list(tokens))], [depth])  # type: ignore[arg-type]


def chain(tokens: Iterable[int], depth: int = 8, **options: object) -> list[int]:
    made = draft(tokens, depth, row_cost=0.0, **options)
    assert made.is_chain
    assert made.q is None
    return made.ids


def test_the_example_of_the_docstring() -> None:
    text = [THE, CAT, SAT, DOT, THE, CAT, RAN, DOT, THE, CAT]
    made = draft(text, depth=3, branches=2)
    assert (made.ids, list(made.parents)) == ([RAN, DOT, THE, SAT], [-1, 0, 1, -1])


def test_no_match_is_longer_than_max_ngram() -> None:
    #  "2 3" was followed by 4 three times, "1 2 3" by 5 once
    assert chain([2, 3, 4, 2, 3, 4, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], depth=1, max_ngram=2) == [4]


def test_the_most_counted_follower_wins() -> None:
    assert chain([1, 5, 1, 5, 1, 6, 1], depth=1, max_ngram=1) == [5]


def test_a_match_shorter_than_min_ngram_is_not_used() -> None:
    assert chain([1, 2, 3, 9, 3], min_ngram=2) == []


def test_branches_are_distinct_and_have_the_parent_they_followed_in_the_text() -> None:
    """Each branch holds tokens that followed its parent path in the text."""
    rng = random.Random(0)
    for _ in range(200):
        text = [rng.randrange(4) for _ in range(60)]
        made = draft(text, depth=6, branches=3, max_ngram=3, row_cost=0.0)
        made.check([6], 4, MAX_NODES)
        children = made.children(0)
        for parent, below in children.items():
            tokens = [made.ids[i] for i in below]
            assert len(set(tokens)) == len(tokens) <= 3
            assert len(below) == 1 or parent == -1
            ahead = [made.ids[i] for i in made.ancestors(0, parent)]
            last = [*text, *ahead][-1]
            for token in tokens:
                assert any(
                    pair == (last, token) for pair in zip([*text, *ahead], [*text, *ahead, token][1:], strict=True)
                )


def test_most_nodes_is_never_exceeded() -> None:
    rng = random.Random(1)
    for options in ({"branches": 4}, {"branches": 16, "max_draft": 5}, {"branches": 2}):
        config = NgramConfig(row_cost=0.0, **options)
        for _ in range(50):
            text = [rng.randrange(20) for _ in range(500)]
            made = NgramDrafter(config).propose([Sequence(text)], [64])
            assert len(made) <= config.most_nodes <= MAX_NODES


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
    assert longest[store.followers(tokens, (), 1)[0][0]] == max(longest.values())


def test_memory_is_bounded_and_the_most_recent_is_kept() -> None:
    config = NgramConfig(max_ngram=2, max_entries=200)
    rng = random.Random(4)
    tokens = [rng.randrange(1000) for _ in range(5000)]
    tokens += tokens[-20:-10]
    store = NgramStore(config)
    store.index(tokens)
    assert len(store) <= 200
    assert store.followers(tokens, (), 1)[0][:2] == (tokens[-20], len(tokens) - 20)


def test_a_context_that_keeps_occurring_survives_any_number_of_others() -> None:
    config = NgramConfig(max_ngram=1, max_entries=20)
    tokens = [t for i in range(100, 400) for t in ((1, 2) if i % 3 == 0 else (i,))]
    store = NgramStore(config)
    store.index(tokens)
    assert store.followers([1], (), 1)[0][0] == 2


def test_followers_of_one_context_are_bounded() -> None:
    store = NgramStore(NgramConfig(max_ngram=1))
    tokens = [t for i in range(500) for t in (0, 1000 + i)] + [0, 7, 0, 7, 0]
    store.index(tokens)
    found = store.followers(tokens, (), 1000)
    assert len(found) == FOLLOWERS
    assert found[0][0] == 7
