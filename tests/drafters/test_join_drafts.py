"""Joining drafts: structure by hand, and the output's distribution by enumeration with fractions."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.rules import RULES
from slipstream.drafters.hybrid import Part, join_drafts
from tests.core.exact import completed, pack, target_distribution, weighed
from tests.core.worlds import Shape, WeightedDraft, every_draft, point, random_world


def chain(*tokens: int, q: float | None = None, vocab: int = 6) -> Draft:
    """q: probability of each draft token under its distribution, the rest spread evenly."""
    distributions = None
    if q is not None:
        distributions = torch.full((len(tokens), vocab), (1 - q) / (vocab - 1), dtype=torch.float64)
        distributions[range(len(tokens)), list(tokens)] = q
    return Draft.chains([list(tokens)], distributions)


def nodes(draft: Draft, b: int = 0) -> list[tuple[int, int]]:
    """(token, parent) of each draft token."""
    return [(draft.ids[i], draft.parents[i]) for i in draft.nodes(b)]


def test_each_sequence_has_its_own_part() -> None:
    two = Draft.chains([[1, 2], [3]])
    sampled = Draft.chains([[], [4]], torch.tensor([[0, 0, 0, 0.5, 0.5, 0]], dtype=torch.float64))
    draft = join_drafts([Part(Draft.chains([[1], [], []])), None, Part(Draft.chains([[], [], [5]]))], 6)
    assert [nodes(draft, b) for b in range(3)] == [[(1, -1)], [], [(5, -1)]]
    assert draft.q is None
    draft = join_drafts([Part(two), Part(sampled)], 6)
    draft.check([2, 2], 6, 8)
    assert [nodes(draft, b) for b in range(2)] == [[(1, -1), (2, 0)], [(4, -1)]]
    assert draft.q.tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0.5, 0.5, 0]]


def test_tokens_after_a_chain_are_point_masses_and_name_their_drafter() -> None:
    base = chain(1, 2, q=0.5)
    draft = join_drafts([Part(base, "model", (3, 2), "lookup")], 6)
    draft.check([4], 6, 8)
    assert nodes(draft) == [(1, -1), (2, 0), (3, 1), (2, 2)]
    assert draft.by == ["model", "model", "lookup", "lookup"]
    assert base.q is not None
    assert torch.equal(draft.q[:2], base.q)
    assert draft.q[2:].tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]]


def test_a_draft_that_is_the_only_one_is_not_changed() -> None:
    two = Draft.chains([[1, 2], [3], []])
    assert join_drafts([Part(two), Part(two), None], 6) is two
    assert join_drafts([None, Part(two), None], 6) is not two
    assert len(join_drafts([None, None], 6)) == 0
    named = join_drafts([Part(two, "lookup"), Part(two, "lookup"), None], 6)
    assert (named.ids, named.by) == ([1, 2, 3], ["lookup"] * 3)
    assert named.tokens is two.tokens
    inner = replace(two, by=["x", "y", "z"])
    assert join_drafts([Part(inner, "stack"), None, None], 6).by == ["x", "y"]


def test_nodes_that_are_not_acceptable_stay_so() -> None:
    window = Draft(torch.tensor([1, 2]), (-1, -1), (0, 2, 2), acceptable=(False, True))
    draft = join_drafts([Part(window), Part(Draft.chains([[], [3]]))], 6)
    assert nodes(draft) == [(1, -1), (2, -1)]
    assert draft.acceptable == [False, True, True]


# --- the distribution -------------------------------------------------------------------------------------------------


def continued(weighted: WeightedDraft, then: Sequence[int]) -> WeightedDraft:
    """A sampled chain and the tokens that a lookup appends to it, joined by production code, in the form of the
    enumeration."""
    world = weighted.world
    draft, _ = pack([weighted])
    if draft.q is None:
        draft = replace(draft, q=torch.eye(world.vocab, dtype=torch.float64)[draft.tokens])
    whole = join_drafts([Part(draft, then=then)], world.vocab)
    base = len(weighted.tokens)
    q = [*weighted.q, *(point(world.vocab, token) for token in then)]
    again = WeightedDraft(
        world, Shape(tuple(whole.parents), weighted.shape.kinds + "p" * len(then)), whole.ids, q, weighted.weight
    )
    packed, _ = pack([again])
    assert whole.ids[:base] == weighted.tokens
    assert whole.q is not None
    if packed.q is not None:
        assert torch.equal(packed.q, whole.q)
    return again


@pytest.mark.parametrize("kinds", ["s", "ss"])
@pytest.mark.parametrize("pattern", [(0,), (1, 0), (0, 1, 1)], ids=str)
def test_a_chain_that_a_lookup_continues_keeps_the_targets_distribution(kinds: str, pattern: tuple[int, ...]) -> None:
    """For all chains that can be drawn. What is appended depends on the last token of the chain, as a lookup's does."""
    for vocab, seed in ((2, 1), (3, 2), (3, 3)):
        world = random_world(seed, vocab)
        drafts = [
            continued(weighted, [(token + weighted.tokens[-1]) % vocab for token in pattern])
            for weighted in every_draft(world, Shape.chain(kinds))
        ]
        length = 1 + max(draft.shape.height for draft in drafts)
        assert completed(world, weighed(RULES["rejection"], drafts), length) == target_distribution(world, length)
