"""`Draft` and `Verdict`: the worked example; invalid drafts are refused."""

import math
from dataclasses import replace

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.errors import DraftError

CAT, DOG, SAT, RAN = 0, 1, 2, 3
EXAMPLE = Draft(torch.tensor([CAT, DOG, SAT, RAN, SAT]), (-1, -1, 0, 0, 1), (0, 5))
BATCH = Draft(torch.tensor([1, 2, 3, 4, 5, 6]), (-1, 0, -1, -1, 0, 0), (0, 2, 2, 6))


def test_the_example_of_the_docstring_and_a_ragged_batch_count_nodes_from_each_sequence() -> None:
    assert EXAMPLE.batch == 1
    assert len(EXAMPLE) == 5
    assert EXAMPLE.depths == [1, 1, 2, 2, 2]
    assert EXAMPLE.children(0) == {-1: [0, 1], 0: [2, 3], 1: [4]}
    assert EXAMPLE.ancestors(0, 4) == [1, 4]
    assert not EXAMPLE.is_chain
    assert [list(BATCH.nodes(b)) for b in range(3)] == [[0, 1], [], [2, 3, 4, 5]]
    assert BATCH.depths == [1, 2, 1, 1, 2, 2]
    assert BATCH.children(2) == {-1: [0, 1], 0: [2, 3]}
    assert BATCH.children(1) == {}
    assert BATCH.ancestors(2, 3) == [0, 3]
    assert BATCH.ancestors(2, -1) == []


def test_drafts_of_chains_of_nothing_and_of_ids_that_the_host_knows() -> None:
    draft = Draft.chains([[5, 6], [], [7]])
    assert draft.ids == [5, 6, 7]
    assert list(draft.parents) == [-1, 0, -1]
    assert list(draft.splits) == [0, 2, 2, 3]
    assert draft.is_chain
    empty = Draft.empty(3)
    assert (empty.batch, len(empty), empty.ids, empty.is_chain) == (3, 0, [], True)
    empty.check([0, 0, 0], 10, 256)
    draft = Draft.of(EXAMPLE.ids, EXAMPLE.parents, EXAMPLE.splits, acceptable=[True] * 5)
    assert torch.equal(draft.tokens, EXAMPLE.tokens)
    assert (draft.ids, draft.parents, draft.splits) == (EXAMPLE.ids, EXAMPLE.parents, EXAMPLE.splits)
    assert draft.acceptable == [True] * 5
    assert replace(draft, tokens=draft.tokens + 1).ids == [CAT + 1, DOG + 1, SAT + 1, RAN + 1, SAT + 1]
    assert Draft.of([], [], [0, 0, 0]) is Draft.empty(2, "cpu")


def test_a_draft_lists_acceptable_children_and_a_verdict_what_each_sequence_gains() -> None:
    draft = replace(EXAMPLE, acceptable=[False, True, True, True, False])
    assert draft.children(0) == {-1: [1], 0: [2, 3]}
    verdict = Verdict([[0, 1], [], [0]], [7, 8, 9], [None] * 3, [False, False, True])
    assert [verdict.run(BATCH, b) for b in range(3)] == [[1, 2, 7], [8], [3, 9]]
    assert [verdict.count_accepted(b) for b in range(3)] == [2, 0, 2]


def q_rows(n: int, vocab: int = 4) -> torch.Tensor:
    return torch.full((n, vocab), 1 / vocab, dtype=torch.float64)


GOOD = Draft(torch.tensor([0, 1, 2]), (-1, 0, -1), (0, 2, 3), q_rows(3), (True, True, False))


def test_a_good_draft_passes() -> None:
    GOOD.check([2, 1], 4, 256)
    EXAMPLE.check([2], 4, 5)


BAD: dict[str, dict] = {
    "parents that come later": {"parents": (-1, 1, -1)}, "a parent that is the node itself": {"parents": (0, 0, -1)},
    "a parent below the root": {"parents": (-2, 0, -1)}, "a parent in another sequence": {"parents": (-1, 0, 0)},
    "splits that do not start at 0": {"splits": (1, 2, 3)}, "splits that do not end at N": {"splits": (0, 2, 2)},
    "splits that fall": {"splits": (0, 4, 3)}, "splits for another batch": {"splits": (0, 1, 2, 3)},
    "an id outside the vocabulary": {"tokens": torch.tensor([0, 1, 4])},
    "a negative id": {"tokens": torch.tensor([0, -1, 2])}, "too few tokens": {"tokens": torch.tensor([0, 1])},
    "tokens of two dimensions": {"tokens": torch.tensor([[0, 1, 2]])},
    "tokens that are not int64": {"tokens": torch.tensor([0, 1, 2], dtype=torch.int32)},
    "q of another length": {"q": q_rows(2)}, "q of another vocabulary": {"q": q_rows(3, 5)},
    "q of integers": {"q": torch.tensor([[1, 0, 0, 0]] * 3)},
    "q in another precision than distributions have": {"q": q_rows(3).float()},
    "q that holds NaN": {"q": q_rows(3).index_fill(0, torch.tensor([1]), math.nan)},
    "q with one NaN": {"q": torch.tensor([[0.4, 0.3, 0.3, math.nan]] * 3, dtype=torch.float64)},
    "q that is negative": {"q": torch.tensor([[0.5, 0.5, 0.5, -0.5]] * 3, dtype=torch.float64)},
    "q that does not sum to one": {"q": q_rows(3) * 0.9},
    "q that could not have drawn the draft token": {"q": torch.tensor([[0.0, 0.5, 0.5, 0.0]] * 3, dtype=torch.float64)},
    "acceptable of another length": {"acceptable": (True, True)},
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_an_invalid_draft_is_refused(fault: str) -> None:
    with pytest.raises(DraftError):
        replace(GOOD, **BAD[fault]).check([2, 1], 4, 256)


def test_a_draft_that_exceeds_its_budget_is_refused() -> None:
    with pytest.raises(DraftError, match="deeper"):
        GOOD.check([1, 1], 4, 256)
    with pytest.raises(DraftError, match="deeper"):
        GOOD.check([2, 0], 4, 256)
    with pytest.raises(DraftError, match="at most 1"):
        GOOD.check([2, 1], 4, 1)


NAMED = replace(EXAMPLE, by=["a", "b", "a", "c", ""])


def test_the_drafters_of_nodes_go_with_them() -> None:
    assert NAMED.pad(1).by == NAMED.pad(1).part([1, 0]).by == NAMED.by
    assert EXAMPLE.with_name("x").by == ["x"] * 5
    assert NAMED.with_name("x").by == ["a", "b", "a", "c", "x"]
    with pytest.raises(DraftError):
        replace(EXAMPLE, by=["a"]).check([2], 10, 256)


@pytest.mark.parametrize(
    ("draft", "path", "following", "cut", "names"),
    [
        (NAMED, [0, 3], 7, False, ["a", "c", None]), (NAMED, [1, 4], 7, False, ["b", "", None]),
        (NAMED, [], 7, False, [None]), (NAMED, [0], RAN, True, ["a", "c"]), (NAMED, [], DOG, True, ["b"]),
        (EXAMPLE, [0, 3], 7, False, ["", "", None]), (EXAMPLE, [0], RAN, True, ["", ""]),
    ],
)  # fmt: skip
def test_each_token_gained_has_the_name_of_who_proposed_it(draft, path, following, cut, names):
    verdict = Verdict([path], [following], [None], [cut])
    assert verdict.proposers(draft, 0) == names
    assert len(names) == len(verdict.run(draft, 0))
