"""The suffix tree and its drafter: what is counted, matched, guessed, remembered and forgotten."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.hybrid import Lookup
from slipstream.drafters.suffix import SuffixConfig, SuffixDrafter
from slipstream.drafters.suffix_tree import FANOUT, Node, Store, SuffixTree
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.targets.toy import ToyTarget
from tests.drafters.soak import PIECE, held, stream
from tests.end_to_end.exact import Oracle

A, B, C, D, W, X, Y, Z = range(8)


def draft(tokens: Iterable[int], depth: int = 8, **options: object) -> Draft:
    options = {"row_cost": 0.0, "spec_factor": 100.0, **options}
    return SuffixDrafter(SuffixConfig(**options)).propose([Sequence(list(tokens))], [depth])  # type: ignore[arg-type]


def chain(tokens: Iterable[int], depth: int = 8, **options: object) -> list[int]:
    made = draft(tokens, depth, **options)
    assert made.is_chain
    assert made.q is None
    return made.ids


def places(text: list[int], string: list[int]) -> list[int]:
    return [i for i in range(len(text) - len(string) + 1) if text[i : i + len(string)] == string]


# --- the tree --------------------------------------------------------------------------------------------------------


def every(tree: SuffixTree, node: Node) -> Iterable[tuple[list[int], int]]:
    """(string, count) of every node and leaf."""
    for token, child in node.children.items():
        if isinstance(child, Node):
            assert tree.text[child.base + node.end] == token
            yield tree.text[child.base : child.base + child.end], child.count
            yield from every(tree, child)
        else:
            assert tree.text[child + node.end] == token
            yield tree.text[child : child + node.end + 1], 1


def test_counts_matches_and_look_ups_equal_a_search_of_the_text() -> None:
    """Texts over few tokens, grown in pieces, trees of several depths: every count, every end that occurred before,
    and whether a string is found."""
    rng = random.Random(0)
    for _ in range(150):
        size, depth = rng.choice([1, 2, 3, 8]), rng.choice([2, 3, 5, 12])
        text = [rng.randrange(size) for _ in range(rng.randrange(2, 80))]
        tree, done = SuffixTree(depth), 0
        while done < len(text):
            piece = text[done : done + rng.randrange(1, 5)]
            tree.extend(piece)
            done += len(piece)
            so_far = text[:done]
            before = [m for m in range(1, min(depth, done)) if len(places(so_far, so_far[-m:])) > 1]
            assert [m for m, node in enumerate(tree.ends) if node is not None] == [0, *before]
            assert tree.before()[0] == len(before)
        for string, count in every(tree, tree.root):
            assert count == len(places(text, string)), string
        for _ in range(20):
            string = [rng.randrange(size) for _ in range(rng.randrange(1, depth + 1))]
            assert (tree.locate(string) is not None) == bool(places(text, string))
        tail = [rng.randrange(size) for _ in range(20)]
        longest = max([m for m in range(1, min(20, depth - 1) + 1) if places(text, tail[-m:])], default=0)
        assert tree.longest(tail)[0] == longest
        assert tree.longest(tail, longest)[0] == longest


def test_a_string_keeps_its_most_frequent_followers() -> None:
    tree = SuffixTree(4)
    tree.extend([t for i in range(300) for t in (0, 100 + i, *((0, 7) if i % 10 == 0 else ()))])
    node = tree.root.children[0]
    assert isinstance(node, Node)
    assert len(node.children) == FANOUT
    seven = node.children[7]
    assert isinstance(seven, Node)
    assert seven.count == 30
    assert 399 in node.children, "of those that occurred once, the oldest goes"
    assert 101 not in node.children


def test_the_store_forgets_the_oldest_half() -> None:
    store = Store(depth=6, max_tokens=100)
    store.extend([1000, 1001, 1002])
    store.extend(list(range(60)))
    assert store.longest([1000, 1001], own=False)[1] == 2
    store.extend(list(range(60, 100)))
    assert store.longest([1000, 1001], own=False)[1] == 0, "it stood in the half that had to go"
    assert store.longest([60, 61], own=False)[1] == 2
    assert len(store) <= 100


# --- drafts ----------------------------------------------------------------------------------------------------------


def test_the_example_of_the_docstring() -> None:
    text = [A, B, C, Y, A, B, D, Z, A, B, C, W, X, A, B]
    made = draft(text, 4, branches=2, spec_factor=2.0)
    assert (made.ids, list(made.parents)) == ([C, D, W, Y], [-1, -1, 0, 0])


def test_the_longest_match_wins() -> None:
    #  "2 3" was followed by 4 three times, "1 2 3" by 5 once
    assert chain([2, 3, 4, 2, 3, 4, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], 1) == [5]


def test_the_most_frequent_follower_wins_then_the_later_one() -> None:
    assert chain([1, 5, 1, 5, 1, 6, 1], 1) == [5]
    assert chain([1, 5, 1, 6, 1], 1) == [6]


def test_the_draft_grows_with_the_match() -> None:
    """spec_factor * match + spec_offset guesses, at least one."""
    text = list(range(10, 60))
    for match in range(1, 8):
        tail = text[20 - match : 20]
        for factor, offset in ((1.0, 0.0), (2.0, 1.0), (0.5, 0.0), (1.0, -3.0)):
            wanted = max(1, min(16, int(factor * match + offset)))
            ids = chain([*text, 5, *tail], 64, spec_factor=factor, spec_offset=offset)
            assert ids == text[20 : 20 + wanted]
    assert chain([*text, 5, *text[10:20]], 64, max_draft=3) == text[20:23]
    assert chain([*text, 5, *text[10:20]], 2) == text[20:22]


def test_guesses_end_where_the_frequencies_do_not_bear() -> None:
    """a is followed by b 3 of 4 times, b by c 2 of 3 times: 3/4, then 1/2."""
    text = [A, B, C, Y, A, B, C, Z, A, B, D, X, A, W, 9, A]
    assert chain(text, 2, min_prob=0.45) == [B, C]
    assert chain(text, 2, min_prob=0.55) == [B]
    assert chain(text, 2, min_prob=0.8) == []


def test_a_match_shorter_than_min_match_is_let_go() -> None:
    assert chain([1, 2, 3, 9, 3], min_match=2) == []
    assert chain([1, 2, 3, 9, 3], 2) == [9, 3]
    assert chain([1, 2, 3, 4]) == []
    assert chain([7]) == []


@pytest.mark.parametrize("period", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [2, 3, 24])
def test_a_loop_is_followed_round_and_round(period: int, depth: int) -> None:
    loop = list(range(period))
    for rounds in (1, 2, 20):
        text = [9, *loop * rounds, *loop[:1]]
        assert chain(text, 7, max_depth=depth) == [loop[(1 + i) % period] for i in range(7)]


def test_trees_are_well_formed_and_grow_the_likeliest_first() -> None:
    rng = random.Random(1)
    for _ in range(200):
        text = [rng.randrange(4) for _ in range(rng.randrange(2, 80))]
        made = draft(text, 6, branches=3, max_depth=rng.choice([3, 5, 24]), min_prob=0.0)
        made.check([6], 4, MAX_NODES)
        assert len(made) <= 6
        for parent, below in made.children(0).items():
            tokens = [made.ids[i] for i in below]
            assert len(set(tokens)) == len(tokens) <= 3
            path = [*text, *(made.ids[i] for i in made.ancestors(0, parent))]
            if parent < 0:  # siblings stand in the order of how often they followed the longest match
                match = max(m for m in range(1, len(text)) if len(places(text, text[-m:])) > 1)
                counts = [len(places(text, [*path[-min(match, 2) :], t])) for t in tokens]
                if match <= 2:
                    assert counts == sorted(counts, reverse=True)
            assert all(places([*text, *made.ids], [path[-1], t]) or len(path) > len(text) for t in tokens)


# --- the drafter -----------------------------------------------------------------------------------------------------


def test_it_is_a_lookup_that_tells_its_match() -> None:
    drafter, seq = SuffixDrafter(), Sequence([1, 2, 3, 9, 1, 2, 3])
    assert isinstance(drafter, Lookup)
    drafter.propose([seq], [4])
    assert drafter.match_length(seq.id) == 3
    assert drafter.match_length(10**9) == 0


@pytest.mark.parametrize("options", [{}, {"branches": 3}, {"max_tokens": 24}, {"across": True}], ids=str)
def test_every_output_length_up_to_and_beyond_the_draft_length(options: dict[str, object]) -> None:
    """transformers 46993: lookup overran max_new_tokens. Greedy text, exactly that long, for 1..K + 2."""
    truth, prompt = Oracle(ToyTarget(4, order=2, seed=3)), [0, 1, 2, 0, 1, 2, 0]
    for n in range(1, 10):
        llm = LLM(ToyTarget(4, order=2, seed=3), "suffix", draft_tokens=7, draft_options=options)
        done = llm.generate([prompt] * 2, SamplingParams(max_tokens=n))
        assert [d.token_ids for d in done] == [truth.greedy(prompt, n)] * 2


def finished(drafter: SuffixDrafter, prompt: list[int], output: list[int]) -> None:
    seq = Sequence(prompt)
    seq.tokens += output
    drafter.propose([seq], [1])
    seq.finish = "length"
    drafter.release(seq.id)


def test_outputs_of_finished_requests_are_remembered_if_asked_for() -> None:
    new = Sequence([50, 11, 12])
    for across, ids in ((False, []), (True, [13, 14])):
        drafter = SuffixDrafter(SuffixConfig(across=across, row_cost=0.0))
        finished(drafter, [1, 2], [10, 11, 12, 13, 14])
        assert drafter.propose([new], [8]).ids == ids, "it ends where that output ended"
        drafter.release(new.id)
        finished(drafter, [3, 4], [11, 12, 20])
        assert len(drafter.propose([Sequence([1, 2])], [8])) == 0, "prompts are not remembered"
    drafter = SuffixDrafter(SuffixConfig(across=True, past_prompts=True))
    finished(drafter, [1, 2, 3], [4])
    assert drafter.propose([Sequence([1, 2])], [8]).ids == [3, 4]


def test_a_request_that_did_not_finish_is_not_remembered() -> None:
    """It may be preempted and go on: its text would count twice."""
    drafter = SuffixDrafter(SuffixConfig(across=True))
    seq = Sequence([1])
    seq.tokens += [2, 3, 4]
    drafter.propose([seq], [1])
    drafter.release(seq.id)
    assert len(drafter.past) == 0


def test_the_tree_that_scores_higher_is_taken() -> None:
    """The own text says 5 or 6 after "1", one time each; finished requests said 7 after "3 1", each time."""
    drafter = SuffixDrafter(SuffixConfig(across=True, row_cost=0.0))
    for _ in range(3):
        finished(drafter, [0], [3, 1, 7, 8])
    assert drafter.propose([Sequence([1, 5, 1, 6, 3, 1])], [2]).ids == [7, 8]
    assert drafter.propose([Sequence([4, 3, 1, 9, 9, 4, 3, 1])], [2]).ids == [9, 9], "the own match is as good: it wins"


def test_finished_requests_are_forgotten_oldest_first() -> None:
    drafter = SuffixDrafter(SuffixConfig(across=True, past_tokens=60))
    finished(drafter, [0], [1, 2, 3])
    finished(drafter, [0], list(range(100, 128)))
    assert drafter.propose([Sequence([1, 2])], [1]).ids == [3]
    finished(drafter, [0], list(range(200, 240)))
    assert len(drafter.propose([Sequence([1, 2])], [1])) == 0
    assert drafter.propose([Sequence([9, 210])], [1]).ids == [211]
    assert len(drafter.past) <= 60


def test_rows_are_saved_on_text_that_does_not_repeat_itself() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=400, seed=1)
    rows = []
    for cost in (0.0, 0.1):
        target = ToyTarget(64, order=1, seed=1, sharpness=0.1)
        options = {"row_cost": cost, "spec_factor": 8.0}
        done = LLM(target, "suffix", draft_tokens=8, draft_options=options).generate([1, 2, 3], params)[0]
        rows.append(done.stats.proposed / done.stats.rounds)
    assert rows[0] > 4
    assert rows[1] < 1


def test_memory_is_bounded_over_a_million_tokens() -> None:
    """Tokens and bytes held do not grow once the bound is reached. A piece fills the younger tree to the brim."""
    store, sizes = Store(depth=24, max_tokens=PIECE // 4), []
    for piece in stream():
        store.extend(piece)
        assert len(store) <= PIECE // 4
        sizes.append(held(store))
    assert max(sizes) < 300 * len(store)
    assert max(sizes[2:]) < 1.05 * max(sizes[:2])


@pytest.mark.parametrize(
    "options",
    [
        {"max_depth": 1},
        {"min_match": 0},
        {"min_match": 24},
        {"max_draft": 0},
        {"max_draft": MAX_NODES + 1},
        {"spec_factor": -1.0},
        {"spec_offset": float("nan")},
        {"min_prob": 1.5},
        {"branches": 0},
        {"branches": FANOUT + 1},
        {"row_cost": 0.8},
        {"max_tokens": 1},
        {"past_tokens": 0},
    ],
    ids=str,
)
def test_impossible_values_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ParameterError) as caught:
        SuffixConfig(**options)  # type: ignore[arg-type]
    assert any(name in str(caught.value) for name in options)


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ParameterError, match="did you mean 'spec_factor'"):
        LLM(ToyTarget(), "suffix", draft_options={"spec_faktor": 3})


def test_guesses_lie_where_the_target_wants_them() -> None:
    drafter = SuffixDrafter(device="meta")
    assert drafter.propose([Sequence([1, 2, 1])], [2]).tokens.device == torch.device("meta")
