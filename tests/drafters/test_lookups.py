"""The suites of `lookup_conformance.py` for the registry's drafters without a model, tables of refused options and of
memory, and what n-grams match and forget."""

import functools
import gc
import itertools
import random
import sys
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.lookups import MOST_INDEXED
from slipstream.drafters.ngram import FOLLOWERS, NgramConfig, NgramStore
from tests.drafters.lookup_conformance import CopyingConformance, LookupCase, LookupConformance
from tests.drafters.makers import LOOKUPS
from tests.targets.toy import ToyTarget

CASES = {name: LookupCase(name) for name in LOOKUPS}
COPYING = [name for name, case in CASES.items() if case.make().traits.lookup]


class TestLookups(LookupConformance):
    @pytest.fixture(params=CASES)
    def case(self, request: pytest.FixtureRequest) -> LookupCase:
        return CASES[request.param]


class TestCopying(CopyingConformance):
    @pytest.fixture(params=COPYING)
    def case(self, request: pytest.FixtureRequest) -> LookupCase:
        return CASES[request.param]


def test_a_loop_that_begins_in_another_drafters_draft_is_followed_by_n_grams() -> None:
    """The suffix tree follows only loops that it holds."""
    lookup, seq = CASES["ngram"].make(row_cost=0.0), Sequence([9, 9, 1, 2, 3, 1, 2])
    lookup.propose([seq], [Budget(2)])
    assert lookup.continue_from(seq, [3, 1], Budget(5))[0] == [2, 3, 1, 2, 3]


@pytest.mark.parametrize("name", COPYING)
@pytest.mark.parametrize("row_cost", [0.11, 0.15, 0.3])
def test_a_draft_ends_where_a_token_is_less_likely_than_a_row_costs(name: str, row_cost: float) -> None:
    """Before anything is learned, the d-th token after a match of m is accepted with the product of
    (m + i) / (m + i + 2) for i < d: m (m + 1) / ((m + d) (m + d + 1)). A sequence may have a cost of its own."""
    text = list(range(10, 60))
    for match in range(1, 6):
        worth = [d for d in range(1, 30) if match * (match + 1) / ((match + d) * (match + d + 1)) >= row_cost]
        seq, following = Sequence([*text, 5, *text[20 - match : 20]]), text[20 : 20 + len(worth)]
        assert CASES[name].make(ToyTarget(128), row_cost=row_cost).propose([seq], [Budget(64)]).ids == following
        drafter, priced = CASES[name].make(ToyTarget(128), row_cost=0.7), Budget(64, (row_cost,))
        assert drafter.propose([seq], [priced]).ids == following


@pytest.mark.parametrize("name", COPYING)
def test_a_step_indexes_few_tokens_of_a_long_prediction_and_drafts_from_them(name: str) -> None:
    text = np.random.default_rng(0).permutation(5000).tolist()
    drafter, seq = CASES[name].make(ToyTarget(5000), row_cost=0.0), Sequence([9, 9], prediction=text)
    known = [0]
    for _ in range(20):
        assert drafter.propose([seq], [Budget(8)]).ids == text[len(seq.output) :][:8]
        seq.tokens.append(text[len(seq.output)])
        known.append(drafter._states[seq.id].indexed)
    assert max(after - before for before, after in itertools.pairwise(known)) == MOST_INDEXED


def test_other_requests_teach_only_sequences_whose_rows_have_a_measured_cost() -> None:
    """Otherwise a seed would not repeat its text after other requests."""
    drafter = CASES["suffix"].make(ToyTarget(128), row_cost=0.5)
    for _ in range(30):
        past = Sequence([1, 2, 3, 9, 1])
        drafter.propose([past], [Budget(4)])
        drafter.observe([past], Draft.empty(1), TargetOut(torch.zeros(1, 128)), Verdict([[]], [2], [None], [False]))
        drafter.release(past.id)
    new, measured = Sequence([1, 2, 3, 9, 1]), Sequence([1, 2, 3, 9, 1])
    assert drafter.propose([new], [Budget(4)]).ids == []
    assert drafter.propose([measured], [Budget(4, (0.5,))]).ids == [2]


MILLION = 1 << 20
PIECE = 1 << 17


@functools.cache
def stream() -> list[list[int]]:
    """A million tokens and a few, in pieces of `PIECE`, alternately like source text (frequent tokens, repeated
    idioms, passages copied from earlier text) and uniform over 8192."""
    rng = np.random.default_rng(1)
    idioms = [rng.integers(0, 400, size).tolist() for size in rng.integers(3, 12, 200)]
    pieces: list[list[int]] = []
    for number in range(MILLION // PIECE):
        if number % 2:
            pieces.append(rng.integers(0, 8192, PIECE).tolist())
            continue
        out: list[int] = []
        words = np.minimum(rng.zipf(1.4, PIECE), 8000).tolist()
        choices, at = rng.random(PIECE).tolist(), 0
        while len(out) < PIECE:
            choice = choices[at]
            if choice < 0.1:
                out += idioms[int(choice * 10 * len(idioms))]
            elif choice < 0.12 and len(out) > 100:
                begin = int((choice - 0.1) * 50 * (len(out) - 60))
                out += out[begin : begin + 60]
            else:
                out.append(words[at])
            at += 1
        pieces.append(out[:PIECE])
    return pieces


def held(thing: object, besides: object = None) -> int:
    """Bytes of `thing` and of everything that only it holds: what the garbage collector finds from there, and the
    integers and tuples in it, shared ones once. `besides` and what only it holds are not counted."""
    seen = {id(besides)}
    todo, size = [thing], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        todo += gc.get_referents(one)
    return size


BOUNDS: dict[str, tuple[dict[str, Any], int, float]] = {
    # options that bound it, most bytes held, growth allowed after the first two pieces
    "ngram": ({"max_ngram": 2, "max_entries": PIECE // 4}, 500 * PIECE // 4, 1.5),
    "suffix": ({"max_tokens": PIECE // 4}, 300 * PIECE // 4, 1.05),
    "lookahead": ({"pool": PIECE // 64}, 600 * PIECE // 64, 1.3),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_memory_is_bounded_over_a_million_tokens(name: str) -> None:
    """The bytes held for one sequence stop growing once the bound is reached, for any text."""
    options, most, growth = BOUNDS[name]
    drafter, seq, sizes = CASES[name].make(ToyTarget(8192, order=1), **options), Sequence([0]), list[int]()
    for piece in stream():
        seq.tokens += piece
        drafter.propose([seq], [Budget(1)])
        sizes.append(held(drafter._states, besides=seq))
    assert max(sizes) < most
    assert max(sizes[2:]) <= growth * max(sizes[:2])


THE, CAT, SAT, RAN, DOT = range(5)
NGRAM = LookupCase("ngram")


def test_the_example_of_the_docstring() -> None:
    text = [THE, CAT, SAT, DOT, THE, CAT, RAN, DOT, THE, CAT]
    assert NGRAM.chain(text, 3, row_cost=0.05) == [RAN, DOT, THE]


def test_no_match_is_longer_than_max_ngram() -> None:
    #  "2 3" was followed by 4 three times, "1 2 3" by 5 once
    assert NGRAM.chain([2, 3, 4, 2, 3, 4, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], depth=1, max_ngram=2) == [4]


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
    assert longest[follower[0]] == max(longest.values())


def test_memory_is_bounded_and_the_most_recent_is_kept() -> None:
    config = NgramConfig(max_ngram=2, max_entries=200)
    rng = random.Random(4)
    tokens = [rng.randrange(1000) for _ in range(5000)]
    tokens += tokens[-20:-10]
    store = NgramStore(config)
    store.index(tokens)
    assert len(store) <= 200
    assert store.follower(tokens) == (tokens[-20], len(tokens) - 20, 2, 1.0)


def test_a_context_that_keeps_occurring_survives_any_number_of_others() -> None:
    config = NgramConfig(max_ngram=1, max_entries=20)
    tokens = [t for i in range(100, 400) for t in ((1, 2) if i % 3 == 0 else (i,))]
    store = NgramStore(config)
    store.index(tokens)
    follower = store.follower([1])
    assert follower[0] == 2


def test_followers_of_one_context_are_bounded() -> None:
    store = NgramStore(NgramConfig(max_ngram=1))
    tokens = [t for i in range(500) for t in (0, 1000 + i)] + [0, 7, 0, 7, 0]
    store.index(tokens)
    entry = store._young[0,]
    assert len(entry) == FOLLOWERS
    follower = store.follower(tokens)
    assert follower[:3] == (7, len(tokens) - 2, 1)
