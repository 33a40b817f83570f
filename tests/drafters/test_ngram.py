"""The n-gram drafter: what it matches, what it copies, how it branches, what it remembers, when it keeps quiet."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.ngram import FOLLOWERS, NgramConfig, NgramDrafter, NgramStore
from slipstream.drafters.odds import Odds
from slipstream.drafters.registry import make_drafter
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.targets.toy import ToyTarget
from tests.drafters.soak import held, stream

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


def test_the_longest_match_wins() -> None:
    #  "2 3" was followed by 4 three times, "1 2 3" by 5 once
    assert chain([2, 3, 4, 2, 3, 4, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], depth=1) == [5]
    assert chain([2, 3, 4, 2, 3, 4, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], depth=1, max_ngram=2) == [4]


def test_the_most_counted_follower_wins_then_the_most_recent() -> None:
    assert chain([1, 5, 1, 5, 1, 6, 1], depth=1, max_ngram=1) == [5]
    assert chain([1, 5, 1, 6, 1], depth=1, max_ngram=1) == [6]


def test_nothing_is_guessed_where_nothing_matches() -> None:
    assert chain([1, 2, 3, 4]) == []
    assert chain([1, 2, 3, 9, 3], min_ngram=2) == []
    assert chain([1, 2, 3, 9, 3], depth=2) == [9, 3]
    assert chain([7]) == []


def test_a_match_is_copied_on_up_to_the_budget_and_the_limit_of_the_configuration() -> None:
    text = [*range(10, 30), 10, 11]
    for depth in range(1, 19):
        assert chain(text, depth) == list(range(12, 12 + min(depth, 16)))
    assert chain(text, 8, max_draft=3) == [12, 13, 14]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_is_followed_round_and_round(period: int) -> None:
    loop = list(range(period))
    assert chain([9, *loop, *loop[:1]], 7, max_ngram=3) == [loop[(1 + i) % period] for i in range(7)]


def test_branches_at_every_fork_are_distinct_and_hang_where_they_were_seen() -> None:
    """Each branch continues the text by something that did follow, in the text, what it hangs below."""
    rng = random.Random(0)
    for _ in range(200):
        text = [rng.randrange(4) for _ in range(60)]
        made = draft(text, depth=6, branches=3, forks=3, max_ngram=3, row_cost=0.0)
        made.check([6], 4, MAX_NODES)
        children = made.children(0)
        for parent, below in children.items():
            tokens = [made.ids[i] for i in below]
            assert len(set(tokens)) == len(tokens) <= 3
            ahead = [made.ids[i] for i in made.ancestors(0, parent)]
            last = [*text, *ahead][-1]
            if len(below) > 1:
                assert len(ahead) < 3, "alternatives behind the last fork"
            for token in tokens:
                assert any(
                    pair == (last, token) for pair in zip([*text, *ahead], [*text, *ahead, token][1:], strict=True)
                )


def test_most_nodes_is_never_exceeded() -> None:
    rng = random.Random(1)
    for options in ({"branches": 4, "forks": 5}, {"branches": 16, "forks": 2, "max_draft": 5}, {"branches": 2}):
        config = NgramConfig(row_cost=0.0, **options)
        for _ in range(50):
            text = [rng.randrange(20) for _ in range(500)]
            made = NgramDrafter(config).propose([Sequence(text)], [64])
            assert len(made) <= config.most_nodes <= MAX_NODES


class Counting(list[int]):
    """A list that counts how many of its elements are read."""

    read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        Counting.read += len(found) if isinstance(key, slice) else 1
        return found


def test_the_past_is_never_read_again() -> None:
    """What a step reads depends on what it gained, not on how long the sequence is."""
    rng = random.Random(2)
    reads = []
    for length in (100, 10_000):
        tokens = Counting(rng.randrange(50) for _ in range(length))
        store = NgramStore(NgramConfig())
        store.index(tokens)
        Counting.read = 0
        for _ in range(20):
            list.extend(tokens, [rng.randrange(50) for _ in range(3)])
            store.index(tokens)
        reads.append(Counting.read)
        assert store.indexed == len(tokens)
    assert max(reads) <= 20 * (3 + 5 + 3 * 5)


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


def test_memory_is_bounded_and_the_recent_is_what_stays() -> None:
    config = NgramConfig(max_ngram=2, max_entries=200)
    rng = random.Random(4)
    tokens = [rng.randrange(1000) for _ in range(5000)]
    tokens += tokens[-20:-10]
    store = NgramStore(config)
    store.index(tokens)
    assert len(store) <= 200
    assert store.followers(tokens, (), 1)[0][:2] == (tokens[-20], len(tokens) - 20)


def test_memory_is_bounded_over_a_million_tokens() -> None:
    """Contexts and bytes held do not grow once the bound is reached, whatever the text."""
    store, sizes, text = NgramStore(NgramConfig(max_ngram=2, max_entries=1 << 15)), list[int](), list[int]()
    for piece in stream():
        text += piece
        store.index(text)
        assert len(store) <= 1 << 15
        sizes.append(held(store))
    assert max(sizes) < (1 << 15) * 500
    assert max(sizes[2:]) < 1.5 * max(sizes[:2])


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


def test_fillers_count_what_the_target_found_likely() -> None:
    """The target's logits say 8 and 9 after 3; the text never went there, so only the fillers can know."""
    drafter = NgramDrafter(NgramConfig(max_ngram=1, fillers=2, branches=3))
    seq = Sequence([1, 2, 3])
    seq.advance(Verdict([[]], [4], [None], [False]), Draft.empty(1), 0)
    logits = torch.zeros(1, 10, dtype=torch.float64)
    logits[0, 8], logits[0, 9] = 2.0, 1.0
    drafter.observe([seq], Draft.empty(1), TargetOut(logits), Verdict([[]], [4], [None], [False]))
    seq.tokens.append(3)
    made = drafter.propose([seq], [1])
    assert made.ids[0] == 4, "what stood in the text is the more recent of equals"
    assert set(made.ids) == {4, 8, 9}


def test_drafting_stops_where_guesses_are_never_right_and_resumes_where_they_are() -> None:
    odds = Odds(row_cost=0.05, longest=3)
    full, longer = odds.depth(2), odds.depth(3)
    assert full >= 8
    for _ in range(400):
        depth = odds.depth(2)
        if depth:
            odds.learn(2, depth, 0)
    tries = 0
    for _ in range(100):
        depth = odds.depth(2)
        if depth:
            tries += 1
            odds.learn(2, depth, 0)
    assert 0 < tries < 60, "it goes on trying, but not every time"
    assert odds.depth(3) == longer, "another length of match has its own record"
    for _ in range(200):
        odds.learn(2, 4, 4)
    assert odds.depth(2) > full


def test_rows_are_saved_on_text_that_does_not_repeat_itself() -> None:
    """A target near the uniform law: almost every guess fails, so few are made. A greedy loop is copied whole."""
    params = SamplingParams(temperature=1.0, max_tokens=600, seed=1)
    rows = []
    for cost in (0.0, 0.1):
        target = ToyTarget(64, order=1, seed=1, sharpness=0.1)
        llm = LLM(target, "ngram", draft_tokens=8, draft_options={"row_cost": cost})
        done = llm.generate([1, 2, 3], params)[0]
        rows.append(done.stats.proposed / done.stats.rounds)
    assert rows[0] > 6
    assert rows[1] < 1
    target = ToyTarget(8, order=1, seed=1, sharpness=0.1)
    done = LLM(target, "ngram", draft_tokens=8).generate([1, 2, 3], SamplingParams(max_tokens=300))[0]
    assert done.stats.acceptance_rate is not None
    assert done.stats.acceptance_rate > 0.9


def test_a_sequence_that_is_not_drafted_for_costs_nothing() -> None:
    drafter = NgramDrafter()
    LLM(ToyTarget(), drafter).generate([1, 2, 1, 2], SamplingParams(max_tokens=8, draft_tokens=0))
    seq = Sequence([1, 2, 1, 2])
    drafter.propose([seq], [0])
    drafter.observe([seq], Draft.empty(1), TargetOut(torch.zeros(1, 8)), Verdict([[]], [1], [None], [False]))
    assert not drafter._states


@pytest.mark.parametrize(
    "options",
    [
        {"max_ngram": 0},
        {"min_ngram": 0},
        {"max_ngram": 2, "min_ngram": 3},
        {"branches": 0},
        {"branches": FOLLOWERS + 1},
        {"forks": 0},
        {"max_draft": 0},
        {"max_draft": MAX_NODES + 1},
        {"max_draft": 64, "branches": 8, "forks": 16},
        {"fillers": -1},
        {"row_cost": 0.8},
        {"row_cost": -0.1},
        {"max_entries": 1},
        {"max_ngram": 2.5},
    ],
    ids=str,
)
def test_impossible_values_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ParameterError) as caught:
        NgramConfig(**options)  # type: ignore[arg-type]
    assert any(name in str(caught.value) for name in options)


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ParameterError, match="did you mean 'max_ngram'"):
        LLM(ToyTarget(), "ngram", draft_options={"max_ngrams": 3})


def test_guesses_lie_where_the_target_wants_them() -> None:
    target = ToyTarget()
    target.device = torch.device("meta")
    drafter = make_drafter("ngram", target)
    assert drafter.propose([Sequence([1, 2, 1])], [2]).tokens.device == target.device
