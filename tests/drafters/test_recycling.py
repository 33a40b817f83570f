"""Token recycling: what the matrix learns, how a tree is filled from it, how large the tree is."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.recycling import REBUILD, RecyclingConfig, RecyclingDrafter, Shape, _Plan
from slipstream.llm import LLM
from slipstream.theory.trees import Tree
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

THE, CAT, DOG, CAR, SAT, RAN, IS = range(7)
V = 7


def matrix(rows: dict[int, list[int]], k: int = 3) -> np.ndarray:
    known = np.full((V + 1, k), -1, dtype=np.int32)
    for token, candidates in rows.items():
        known[token, : len(candidates)] = candidates
    return known


def test_the_example_of_the_docstring() -> None:
    known = matrix({THE: [CAT, DOG, CAR], CAT: [SAT, RAN, IS]})
    plan = _Plan(Tree.of_paths([(0,), (1,), (0, 0), (0, 1)]))
    assert plan.fill(known, THE) == ([CAT, DOG, SAT, RAN], [-1, -1, 0, 0])


def test_unknown_nodes_are_left_out_with_their_descendants() -> None:
    plan = _Plan(Tree.of_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)]))
    known = matrix({THE: [CAT, DOG], DOG: [RAN, IS], RAN: [THE]})
    assert plan.fill(known, THE) == ([CAT, DOG, RAN, IS, THE], [-1, -1, 1, 1, 2])
    assert plan.fill(known, SAT) == ([], [])
    assert _Plan(Tree((), ())).fill(known, THE) == ([], [])


def logits(*best: list[int]) -> TargetOut:
    """Rows with these most probable tokens, in order."""
    out = torch.zeros(len(best), V, dtype=torch.float64)
    for row, tokens in zip(out, best, strict=True):
        for place, token in enumerate(tokens):
            row[token] = 10.0 - place
    return TargetOut(out)


def test_every_row_is_learnt_even_of_rejected_draft_tokens_and_the_text_is_learnt_last() -> None:
    """THE is pending, CAT is accepted, DOG and a second THE below it are rejected: rows of all four tokens are written.
    THE has two rows; the one from the text is kept."""
    drafter = RecyclingDrafter(V, RecyclingConfig(candidates=2))
    other, seq = Sequence([SAT, SAT]), Sequence([IS, THE])
    drafter.propose([other, seq], [1, 1])
    draft = Draft(torch.tensor([CAT, DOG, THE]), [-1, -1, 1], [0, 0, 3])
    verdict = Verdict([[], [0]], [SAT, SAT], [None, None], [False, False])
    for b, each in enumerate((other, seq)):
        each.advance(verdict, draft, b)
    drafter.observe([other, seq], draft, logits([SAT, IS], [CAT, CAR], [SAT, RAN], [RAN, IS], [DOG, DOG]), verdict)
    known = drafter._states[seq.id].matrix
    assert known[THE].tolist() == [CAT, CAR]
    assert known[CAT].tolist() == [SAT, RAN]
    assert known[DOG].tolist() == [RAN, IS]
    assert (known[[CAR, SAT, RAN, IS, V]] == -1).all()
    assert drafter._states[other.id].matrix[SAT].tolist() == [SAT, IS], "each request has its own"


def test_requests_share_a_matrix_if_asked_to() -> None:
    for shared, drafted in ((False, []), (True, [CAT])):
        drafter = RecyclingDrafter(V, RecyclingConfig(nodes=1, shared=shared))
        one = Sequence([THE])
        drafter.propose([one], [1])
        verdict = Verdict([[]], [CAT], [None], [False])
        one.advance(verdict, Draft.empty(1), 0)
        drafter.observe([one], Draft.empty(1), logits([CAT, DOG]), verdict)
        drafter.release(one.id)
        assert drafter.propose([Sequence([THE])], [1]).ids == drafted


def test_the_tree_follows_what_is_counted() -> None:
    """If the second candidate is always right, the tree becomes a chain of second candidates. If none is, it shrinks to
    nothing, and grows again when the first is right."""
    shape = Shape(RecyclingConfig(nodes=8, max_draft=4))

    def after_steps(rank: int | None, n: int) -> Tree:
        for _ in range(n):
            shape.learn(rank)
            shape.plan(4)
        return shape._tree

    assert after_steps(1, 300).paths[:3] == ((1,), (1, 1), (1, 1, 1))
    assert len(after_steps(None, 600)) == 0
    assert after_steps(0, 200).paths[:2] == ((0,), (0, 0))


def test_without_a_row_cost_the_tree_stays() -> None:
    shape = Shape(RecyclingConfig(nodes=40, row_cost=0.0))
    before = shape._tree
    for _ in range(5 * REBUILD):
        shape.learn(None)
        shape.plan(6)
    assert shape._tree is before
    assert len(before) == 40
    assert before.height <= 6


def test_a_full_tree_is_as_deep_as_the_budget_and_max_draft_allow() -> None:
    target = ToyTarget(16, order=1, seed=1)
    llm = LLM(target, "recycling", draft_tokens=6, draft_options={"row_cost": 0.0, "nodes": 60})
    drafter = llm.drafter
    seq = llm.sequence([1, 2, 3], SamplingParams(max_tokens=60))
    for n, _ in enumerate(llm.decode([seq])):
        if n > 4 and seq.room > 8:
            for depth in range(1, 8):
                made = drafter.propose([seq], [depth])
                assert max(made.depths) == min(depth, 6)


def test_a_text_that_depends_on_one_token_is_drafted_right_once_it_was_seen() -> None:
    """A greedy text of a first-order distribution is a loop: from its second pass on every draft token of the first
    rank is accepted."""
    target = ToyTarget(16, order=1, seed=2)
    done = LLM(target, "recycling", draft_tokens=5).generate([1], SamplingParams(max_tokens=400))[0]
    assert done.token_ids == Oracle(ToyTarget(16, order=1, seed=2)).greedy([1], 400)
    assert done.stats.mean_acceptance_length is not None
    assert done.stats.mean_acceptance_length > 5
