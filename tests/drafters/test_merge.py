"""Merging drafts: structure by hand, and the output's distribution by enumeration with fractions."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.drafters.merge import Part, merge
from tests.core.exact import completed, pack, target_distribution, weighed
from tests.core.worlds import Shape, WeightedDraft, World, every_draft, point, probs, random_world, steady

HOT, COLD = SamplingParams(temperature=1.0), SamplingParams()


def seqs(n: int = 1, params: SamplingParams = HOT) -> list[Sequence]:
    return [Sequence([0], params) for _ in range(n)]


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


def test_common_prefixes_are_shared_and_the_rest_branches_off() -> None:
    made = merge(seqs(), [[Part(chain(1, 2, 3)), Part(chain(1, 4, 3))]], 6)
    made.check([3], 6, 8)
    assert nodes(made) == [(1, -1), (2, 0), (3, 1), (4, 0), (3, 3)]
    assert made.q is None


def test_point_masses_merged_with_sampled_draft_tokens_have_one_hot_distributions() -> None:
    base = chain(1, 2, q=0.5)
    made = merge(seqs(), [[Part(chain(3, 2)), Part(base)]], 6)
    made.check([2], 6, 8)
    assert nodes(made) == [(1, -1), (2, 0), (3, -1), (2, 2)], "the sampled draft comes first"
    assert made.q is not None
    assert base.q is not None
    assert torch.equal(made.q[:2], base.q)
    assert made.q[2:].tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]]


def test_of_two_sampled_drafts_only_the_first_is_taken() -> None:
    """Both were drawn with the same numbers of the sequence's stream."""
    first, second = chain(1, q=0.5), chain(2, q=0.5)
    assert nodes(merge(seqs(), [[Part(first), Part(second), Part(chain(4))]], 6)) == [(1, -1), (4, -1)]
    cold = merge(seqs(params=COLD), [[Part(first), Part(second)]], 6)
    assert nodes(cold) == [(1, -1), (2, -1)], "at temperature 0 nothing is drawn"


def test_a_distribution_that_is_a_point_mass_counts_as_deterministic() -> None:
    drawn = Part(chain(1, q=0.9))
    for certain in (chain(2, q=1.0), chain(2)):
        assert nodes(merge(seqs(), [[Part(certain), drawn]], 6)) == [(1, -1), (2, -1)]
        assert nodes(merge(seqs(), [[drawn, Part(certain)]], 6)) == [(1, -1), (2, -1)]


def test_depth_and_nodes_limit_what_is_added_and_never_the_base_nodes() -> None:
    base, other = chain(1, 2, 3), chain(4, 5, 4)
    assert nodes(merge(seqs(), [[Part(base, nodes=0), Part(other, nodes=2)]], 6)) == [
        (1, -1), (2, 0), (3, 1), (4, -1), (5, 3),
    ]  # fmt: skip
    shared = merge(seqs(), [[Part(base), Part(chain(1, 2, 5, 5), nodes=1)]], 6)
    assert nodes(shared)[3:] == [(5, 1)], "what is shared does not count"


def test_equal_siblings_of_one_draft_stay_separate() -> None:
    """Siblings sampled with replacement may be equal; each is verified separately."""
    twins = Draft(torch.tensor([1, 1]), (-1, -1), (0, 2), torch.full((2, 6), 1 / 6, dtype=torch.float64))
    made = merge(seqs(), [[Part(twins), Part(chain(1, 3))]], 6)
    assert nodes(made) == [(1, -1), (1, -1), (3, 0)]


def test_sequences_keep_their_own_parts() -> None:
    two = Draft.chains([[1, 2], [3]])
    sampled = Draft.chains([[], [4]], torch.tensor([[0, 0, 0, 0.5, 0.5, 0]], dtype=torch.float64))
    made = merge(seqs(3), [[Part(Draft.chains([[1], [], []]))], [], [Part(Draft.chains([[], [], [5]]))]], 6)
    assert [nodes(made, b) for b in range(3)] == [[(1, -1)], [], [(5, -1)]]
    made = merge(seqs(2), [[Part(two)], [Part(sampled), Part(two)]], 6)
    made.check([2, 2], 6, 8)
    assert [nodes(made, b) for b in range(2)] == [[(1, -1), (2, 0)], [(4, -1), (3, -1)]]


def test_a_draft_without_additions_is_not_changed() -> None:
    two = Draft.chains([[1, 2], [3], []])
    assert merge(seqs(3), [[Part(two)], [Part(two)], []], 6) is two
    assert merge(seqs(3), [[], [Part(two)], []], 6) is not two
    assert len(merge(seqs(2), [[], []], 6)) == 0


def test_nodes_that_are_not_acceptable_stay_so_and_are_not_shared() -> None:
    window = Draft(torch.tensor([1, 2]), (-1, -1), (0, 2), acceptable=(False, True))
    made = merge(seqs(), [[Part(window), Part(chain(1, 3))]], 6)
    assert nodes(made) == [(1, -1), (2, -1), (1, -1), (3, 2)]
    assert made.acceptable == [False, True, True, True]


# --- the distribution -------------------------------------------------------------------------------------------------


def joined(made: WeightedDraft, lookups: list[list[int]]) -> WeightedDraft:
    """A sampled draft merged with the chains of lookups by production code, in the form of the enumeration."""
    world = made.world
    draft, _ = pack([made])
    if draft.q is None:
        draft = replace(draft, q=torch.eye(world.vocab, dtype=torch.float64)[draft.tokens])
    parts = [Part(draft), *(Part(Draft.chains([tokens])) for tokens in lookups)]
    merged = merge(seqs(), [parts], world.vocab)
    base = len(made.tokens)
    assert merged.ids[:base] == made.tokens
    kinds = made.shape.kinds + "p" * (len(merged) - base)
    q = [*made.q, *(point(world.vocab, token) for token in merged.ids[base:])]
    again = WeightedDraft(world, Shape(tuple(merged.parents), kinds), merged.ids, q, made.weight)
    packed, _ = pack([again])
    assert merged.q is not None
    if packed.q is not None:
        assert torch.equal(packed.q, merged.q)
    return again


BASES = [
    Shape.chain("s"),
    Shape.chain("ss"),
    Shape((-1, -1), "ww"),
    Shape((-1, -1, 0), "wws"),
    Shape((-1, 0, 0), "sww"),
]


def emitted(world: World, shape: Shape, lookups: list[list[int]]) -> None:
    drafts = [joined(made, lookups) for made in every_draft(world, shape)]
    length = 1 + max(draft.shape.height for draft in drafts)
    assert completed(world, weighed(RULES["rejection"], drafts), length) == target_distribution(world, length)


@pytest.mark.parametrize("shape", BASES, ids=str)
@pytest.mark.parametrize("lookups", [[[0]], [[1, 0]], [[0, 1, 1]], [[0, 1], [1, 0]]], ids=str)
def test_a_merged_draft_keeps_the_targets_distribution(shape: Shape, lookups: list[list[int]]) -> None:
    """For all draft tokens that can be drawn: the lookup's path is shared as far as they agree with it, and branches
    off from there."""
    for vocab, seed in ((2, 1), (3, 2), (3, 3)):
        emitted(random_world(seed, vocab), shape, lookups)


def test_control_two_drafts_drawn_with_one_number_are_not_lossless() -> None:
    """Why only one sampled draft is used: siblings sampled with the same random number are dependent, so the q of the
    second is not its distribution given the first."""
    world = steady(probs(1, 1, 1), probs(6, 1, 1))
    first, second = probs(6, 1, 1), probs(1, 1, 6)
    shape, length = Shape((-1, -1), "ss"), 2

    def emit(pairs: dict[tuple[int, int], Fraction]) -> dict[tuple[int, ...], Fraction]:
        drafts = [WeightedDraft(world, shape, [*pair], [first, second], weight) for pair, weight in pairs.items()]
        return completed(world, weighed(RULES["rejection"], drafts), length)

    apart = {(i, j): first[i] * second[j] for i in range(3) for j in range(3)}
    assert emit(apart) == target_distribution(world, length)
    eighth = Fraction(1, 8)  # by inversion of one uniform: its eighths pick 0 0 0 0 0 0 1 2 and 0 1 2 2 2 2 2 2
    same = {(0, 0): eighth, (0, 1): eighth, (0, 2): 4 * eighth, (1, 2): eighth, (2, 2): eighth}
    assert emit(same) != target_distribution(world, length)


def test_a_merged_draft_names_the_drafter_of_each_node_and_of_a_shared_one_the_first() -> None:
    parts = [Part(chain(1, 2), name="model"), Part(chain(1, 2, 3), name="lookup"), Part(chain(5))]
    made = merge(seqs(), [parts], 6)
    assert nodes(made) == [(1, -1), (2, 0), (3, 1), (5, -1)]
    assert made.by == ["model", "model", "lookup", ""]
    two = Draft.chains([[1, 2], [3]])
    alone = merge(seqs(2), [[Part(two, name="lookup")], [Part(two, name="lookup")]], 6)
    assert (alone.ids, alone.by) == ([1, 2, 3], ["lookup"] * 3)
    assert alone.tokens is two.tokens
    inner = two.proposed_by(["x", "y", "z"])
    assert merge(seqs(2), [[Part(inner, name="stack")], []], 6).by == ["x", "y"]
