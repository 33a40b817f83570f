"""The suffix tree and its drafter: what is counted, matched, drafted, remembered and forgotten."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence as Seq

import pytest

from slipstream.core.drafter import Budget, Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.registry import make_drafter
from slipstream.drafters.suffix import SuffixConfig, SuffixDrafter
from slipstream.drafters.suffix_tree import FANOUT, Node, Store, SuffixTree
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.llm import LLM
from tests.drafters.lookup_conformance import LookupCase
from tests.enumeration import Branch, enumerate_runs
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

SUFFIX = LookupCase("suffix")
A, B, C, D, W, X, Y, Z = range(8)


def places(text: list[int], string: list[int]) -> list[int]:
    return [i for i in range(len(text) - len(string) + 1) if text[i : i + len(string)] == string]


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
    """Texts over few tokens, extended in pieces, trees of several depths: every count, every suffix that occurred
    before, and whether a string is found."""
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
    assert len(node.children) == FANOUT
    seven = node.children[7]
    assert seven.count == 30
    assert 399 in node.children, "of those that occurred once, the oldest is dropped"
    assert 101 not in node.children


def test_the_store_drops_the_oldest_half() -> None:
    store = Store(depth=6, max_tokens=100)
    store.extend([1000, 1001, 1002])
    store.extend(list(range(60)))
    assert store.longest([1000, 1001], at_end=False)[1] == 2
    store.extend(list(range(60, 100)))
    assert store.longest([1000, 1001], at_end=False)[1] == 0, "it was in the half that was dropped"
    assert store.longest([60, 61], at_end=False)[1] == 2
    assert len(store) <= 100


def test_the_example_of_the_docstring() -> None:
    text = [A, B, C, Y, A, B, D, Z, A, B, C, W, X, A, B]
    assert SUFFIX.chain(text, 2) == [C, W]


def test_a_draft_ends_where_its_tokens_are_too_seldom() -> None:
    """a is followed by b 3 of 4 times, b by c 2 of 3 times. After a match of one token 1/3 is accepted, of two 1/2: so
    3/4 * 1/3 = 1/4, then 1/4 * 2/3 * 1/2 = 1/12."""
    text = [A, B, C, Y, A, B, C, Z, A, B, D, X, A, W, 9, A]
    assert SUFFIX.chain(text, 2, row_cost=0.08) == [B, C]
    assert SUFFIX.chain(text, 2, row_cost=0.09) == [B]
    assert SUFFIX.chain(text, 2, row_cost=0.24) == [B]
    assert SUFFIX.chain(text, 2, row_cost=0.26) == []


@pytest.mark.parametrize("period", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [2, 3])
def test_a_loop_is_followed_for_any_depth_of_the_tree(period: int, depth: int) -> None:
    loop = list(range(period))
    for repeats in (1, 2, 20):
        text = [9, *loop * repeats, *loop[:1]]
        assert SUFFIX.chain(text, 7, max_depth=depth) == [loop[(1 + i) % period] for i in range(7)]


def finished(drafter: SuffixDrafter, prompt: list[int], output: list[int]) -> None:
    seq = Sequence(prompt)
    seq.tokens += output
    drafter.propose([seq], [Budget(1)])
    seq.finish = "length"
    drafter.release(seq.id)


def test_outputs_of_finished_requests_are_remembered_if_set() -> None:
    new = Sequence([50, 11, 12])
    for across, ids in ((False, []), (True, [13, 14])):
        drafter = SuffixDrafter(SuffixConfig(across=across, row_cost=0.0))
        finished(drafter, [1, 2], [10, 11, 12, 13, 14])
        assert drafter.propose([new], [Budget(8)]).ids == ids, "it ends where that output ended"
        drafter.release(new.id)
        finished(drafter, [3, 4], [11, 12, 20])
        assert len(drafter.propose([Sequence([1, 2])], [Budget(8)])) == 0, "prompts are not remembered"


def test_a_request_that_did_not_finish_is_not_remembered() -> None:
    """It may have been preempted and continue: its text would count twice."""
    drafter = SuffixDrafter(SuffixConfig(across=True))
    seq = Sequence([1])
    seq.tokens += [2, 3, 4]
    drafter.propose([seq], [Budget(1)])
    drafter.release(seq.id)
    assert len(drafter.past) == 0


def test_the_tree_that_scores_higher_is_taken() -> None:
    """In the own text, 5 and 6 follow "1" once each; in finished requests, 7 always follows "3 1"."""
    drafter = SuffixDrafter(SuffixConfig(across=True, row_cost=0.0))
    for _ in range(3):
        finished(drafter, [0], [3, 1, 7, 8])
    assert drafter.propose([Sequence([1, 5, 1, 6, 3, 1])], [Budget(2)]).ids == [7, 8]
    assert drafter.propose([Sequence([4, 3, 1, 9, 9, 4, 3, 1])], [Budget(2)]).ids == [9, 9], (
        "the own match is equally good: it wins"
    )


def test_finished_requests_are_forgotten_oldest_first() -> None:
    drafter = SuffixDrafter(SuffixConfig(across=True, past_tokens=60))
    finished(drafter, [0], [1, 2, 3])
    finished(drafter, [0], list(range(100, 128)))
    assert drafter.propose([Sequence([1, 2])], [Budget(1)]).ids == [3]
    finished(drafter, [0], list(range(200, 240)))
    assert len(drafter.propose([Sequence([1, 2])], [Budget(1)])) == 0
    assert drafter.propose([Sequence([9, 210])], [Budget(1)]).ids == [211]
    assert len(drafter.past) <= 60


# --- what is remembered is independent of the numbers with which verification decides, for equal seeds too ------------


V, PROMPT, TEXT = 5, [0, 1, 2, 0], [0, 1, 0, 0]
PARAMS = SamplingParams(temperature=1.0, max_tokens=4)


CARRYING: dict[str, Callable[[Target], Drafter]] = {
    "suffix": lambda target: make_drafter("suffix", target, across=True, min_match=1, row_cost=0.0),
    "hybrid": lambda target: make_drafter(
        "hybrid", target, members=[make_drafter("ngram", target), make_drafter("suffix", target, across=True)]
    ),
}


def target() -> ToyTarget:
    return ToyTarget(V, order=2, seed=21, sharpness=1.0)


class Priced(DraftLengths):
    """Chosen lengths, in a world where rows have this cost."""

    def choose(self, ids: Seq[int], limits: Seq[int], prompt_rows: int = 0, forced: int = 0) -> list[Budget]:
        return [Budget(min(limit, self.most), (0.45,)) for limit in limits]


def error_of_seconds(name: str, chosen: bool) -> float:
    """Largest error of the probability of a text of a request that follows one of the same seed, by enumeration of all
    numbers of both. chosen: a lookup where rows have a measured cost learns from the first where to end a draft."""
    model = ToyTarget(2, order=2, seed=21, sharpness=1.0)

    def run(branches: Seq[Branch]) -> list[Sequence]:
        seconds = list[Sequence]()
        for branch in branches:
            drafter = make_drafter(name, model) if chosen else CARRYING[name](model)
            llm = LLM(model, drafter, draft_tokens=Priced(3) if chosen else 3)
            for _ in range(2):
                seq = Sequence(TEXT, PARAMS, stream=branch)
                for _ in llm.decode([seq]):
                    pass
            seconds.append(seq)
        return seconds

    (texts,) = enumerate_runs(run, Branch())
    assert texts.accepted > 0.25
    return texts.error(Oracle(model), TEXT, PARAMS)


@pytest.mark.parametrize(("name", "chosen"), [("suffix", False), ("ngram", True)])
def test_requests_that_repeat_a_seed_have_the_targets_distribution_each(name, chosen, monkeypatch):
    assert error_of_seconds(name, chosen) < 1e-9
    monkeypatch.setattr("slipstream.engine.engine._nonces", itertools.repeat(0))
    assert error_of_seconds(name, chosen) > 0.05, "control: with the same random numbers for both requests"


@pytest.mark.parametrize("name", CARRYING)
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_each_request_for_a_drafter_that_remembers_has_random_numbers_of_its_own(name: str, rule: str) -> None:
    """Also within a batch. Under `coupled` the text is a function of target and seed, so there the seed is all."""
    model = target()
    llm = LLM(model, CARRYING[name](model), rule=rule, draft_tokens=4)
    assert llm.drafter.traits.remembers
    seqs = [llm.sequence(PROMPT, SamplingParams(temperature=1.0, seed=3, max_tokens=2)) for _ in range(3)]
    steps = llm.decode(seqs)
    next(steps)
    first = {tuple(seq.random.uniforms(1, 7, 4)) for seq in seqs}
    assert len(first) == (1 if rule == "coupled" else 3)
    steps.close()
