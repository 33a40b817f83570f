"""Stacked drafters: which members are asked, what is used, how their drafts are joined, and that the text and its
distribution do not depend on it."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter, DrafterTraits
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.hybrid import DraftPart, HybridConfig, HybridDrafter, join_drafts, make
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.registry import make_drafter
from slipstream.llm import LLM
from tests.core.fake_drafters import depths
from tests.drafters.makers import V, other, target
from tests.oracle import Oracle


def chains(rows: Seq[Seq[int]], q: float | None = None, vocab: int = V) -> Draft:
    """q: probability of each draft token under its distribution, the rest spread evenly."""
    flat, distributions = [token for row in rows for token in row], None
    if q is not None:
        distributions = torch.full((len(flat), vocab), (1 - q) / (vocab - 1), dtype=torch.float64)
        distributions[range(len(flat)), flat] = q
    return Draft.chains(rows, distributions)


class Fixed:
    """Proposes one chain, as long as allowed. Records its calls."""

    name = "fixed"

    def __init__(self, chain: Seq[int], q: float | None = None, taps: tuple[int, ...] = ()):
        self.chain, self.q, self.traits = list(chain), q, DrafterTraits(taps=taps)
        self.asked: list[list[int]] = []
        self.seen: list[Draft] = []
        self.released: list[int] = []

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        self.asked.append(depths(budgets))
        return chains([self.chain[:depth] for depth in self.asked[-1]], self.q)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        self.seen.append(draft)

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)


class Found(Fixed):
    """A lookup: `matches` by the sequence's number of tokens."""

    def __init__(self, chain: Seq[int], matches: dict[int, int]):
        super().__init__(chain)
        self.traits = DrafterTraits(lookup=True)
        self.matches, self.lengths = matches, dict[int, int]()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        self.lengths |= {seq.id: len(seq.tokens) for seq in seqs}
        return super().propose(seqs, budgets)

    def match_length(self, seq_id: int) -> int:
        return self.matches[self.lengths[seq_id]]

    def continue_from(self, seq: Sequence, drafted: Seq[int], budget: Budget) -> tuple[list[int], int]:
        return [], 0


def hybrid(*members: Drafter, **options: int) -> HybridDrafter:
    return HybridDrafter(members, V, HybridConfig(**options))


def test_a_long_match_overrides_the_neural_draft_which_is_then_not_run() -> None:
    """Each sequence of a batch is decided by itself; after a short match, the neural draft is used."""
    lookup, neural = Found([1, 2], {2: 4, 3: 1}), Fixed([4], q=0.6)
    stack, long, short = hybrid(lookup, neural), Sequence([0] * 2), Sequence([0] * 3)
    draft = stack.propose([long], [Budget(2)])
    assert (draft.ids, draft.is_chain, neural.asked) == ([1, 2], True, [])
    draft = stack.propose([long, short, Sequence([0] * 2)], [Budget(2), Budget(2), Budget(0)])
    assert [draft.ids[draft.splits[b] : draft.splits[b + 1]] for b in range(3)] == [[1, 2], [4], []]
    assert neural.asked == [[0, 2, 0]]


def test_the_first_lookup_is_used_if_the_neural_drafter_drafts_nothing() -> None:
    lookups = Found([1, 2], {1: 1}), Found([3], {1: 1})
    assert hybrid(*lookups, Fixed([])).propose([Sequence([0])], [Budget(2)]).ids == [1, 2]


def test_a_neural_draft_goes_no_deeper_than_its_own_limit() -> None:
    neural = Fixed([1] * 9)
    assert len(hybrid(neural, neural=3).propose([Sequence([0])], [Budget(9)])) == 3
    assert neural.asked == [[3]]


class Knowing(Found):
    """A lookup that always continues another drafter's tokens, with a match of 3."""

    def continue_from(self, seq: Sequence, drafted: Seq[int], budget: Budget) -> tuple[list[int], int]:
        self.heard = list(drafted)
        return [2, 3, 2, 3][: budget.depth], 3


def test_lookup_tokens_are_appended_to_a_neural_chain_within_the_budget() -> None:
    lookup, neural = Knowing([1], {2: 0}), Fixed([4, 4, 4], q=0.6)
    seq = Sequence([0, 0], SamplingParams(temperature=1.0))
    draft = hybrid(lookup, neural, neural=2).propose([seq], [Budget(5)])
    assert lookup.heard == [4, 4]
    assert draft.ids == [4, 4, 2, 3, 2]
    assert draft.is_chain
    assert draft.q.amax(-1).tolist() == pytest.approx([0.6, 0.6, 1, 1, 1])
    for options, budget in (({"append_tokens": 0}, 5), ({"append_match": 4}, 5), ({}, 2)):
        assert hybrid(lookup, neural, neural=2, **options).propose([seq], [Budget(budget)]).ids == [4, 4]


def test_nothing_is_appended_while_chains_are_rejected() -> None:
    lookup, neural = Knowing([1], dict.fromkeys(range(99), 0)), Fixed([4, 4])
    stack, seq = hybrid(lookup, neural, neural=2), Sequence([0, 0])

    def step_of(*accepted: int) -> list[int]:
        draft = stack.propose([seq], [Budget(4)])
        verdict = Verdict([list(accepted)], [0], [None], [False])
        stack.observe([seq], draft, TargetOut(torch.zeros(len(draft) + 1, V), {}, [0, len(draft) + 1]), verdict)
        return draft.ids

    assert step_of() == [4, 4, 2, 3], "assumed to be accepted until rejected"
    for _ in range(8):
        step_of()
    assert step_of() == [4, 4]
    for _ in range(8):
        step_of(0, 1)
    assert step_of(0, 1) == [4, 4, 2, 3]


def test_nothing_is_appended_to_a_tree() -> None:
    class Tree(Fixed):
        def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
            return Draft(torch.tensor([4, 3]), [-1, -1], [0, 2])

    assert hybrid(Knowing([1], {2: 0}), Tree([])).propose([Sequence([0, 0])], [Budget(5)]).ids == [4, 3]


def test_a_neural_member_is_not_started_for_a_text_that_is_about_to_end() -> None:
    neural = Fixed([4, 4])
    stack = hybrid(neural, max_prefill_ratio=4.0)
    late = Sequence([0] * 9, SamplingParams(max_tokens=2))
    assert stack.propose([late], [Budget(1)]).ids == []
    seq = Sequence([0] * 8, SamplingParams(max_tokens=2))
    assert stack.propose([seq], [Budget(1)]).ids == [4]
    seq.tokens.append(4)
    assert stack.propose([seq], [Budget(1)]).ids == [4], "once it runs, it goes on"
    stack.release(seq.id)
    assert stack.propose([seq], [Budget(1)]).ids == []


def test_every_member_observes_the_verified_draft_and_is_released() -> None:
    first, second = Found([1], {1: 9}), Fixed([4])
    stack = hybrid(first, second)
    seq = Sequence([0])
    draft = stack.propose([seq], [Budget(1)])
    verdict = Verdict([[0]], [2], [None], [False])
    seq.advance(verdict, draft, 0)
    stack.observe([seq], draft, TargetOut(torch.zeros(2, V)), verdict)
    stack.release(seq.id)
    assert first.seen == second.seen == [draft]
    assert first.released == second.released == [seq.id]


def test_taps_are_those_of_all_members_each_once() -> None:
    assert hybrid(Fixed([], taps=(2, 7)), Fixed([], taps=(7, -1)), Fixed([])).traits.taps == (2, 7, -1)


def test_a_stack_of_chains_drafts_chains_and_one_of_lookups_ends_them_itself() -> None:
    lookups = [make_drafter(name, target()) for name in ("suffix", "ngram")]
    chain = make_drafter("model", target(), model=other())
    stacks = {"lookups": lookups, "with a model": [*lookups, chain], "with a tree": [*lookups, Fixed([])]}
    traits = {name: hybrid(*members).traits for name, members in stacks.items()}
    assert {name: (each.chains_only, each.prices_rows) for name, each in traits.items()} == {
        "lookups": (True, True), "with a model": (True, True), "with a tree": (False, False),
    }  # fmt: skip


def test_each_members_kv_is_correct_when_others_drafted() -> None:
    """`ToyTarget` checks the KV slots of the draft model at every run; alternating members leave it gaps."""
    alternating = Found([0, 1, 2, 3], {n: 9 * (n // 3 % 2) for n in range(100)})
    stack = HybridDrafter([alternating, ModelDrafter(other(), V)], V)
    done = LLM(target(), stack, draft_tokens=4).generate([0, 1], SamplingParams(max_tokens=80))[0]
    assert done.token_ids == Oracle(target()).greedy([0, 1], 80)
    assert not done.stats.drafter_faults


def test_without_members_it_is_lookup_before_what_ships_for_the_target() -> None:
    for model, names in ((None, ["suffix"]), (other(), ["suffix", "model"])):
        assert [member.name for member in make(target(), model=model).members] == names


def nodes(draft: Draft, b: int = 0) -> list[tuple[int, int]]:
    """(token, parent) of each draft token."""
    return [(draft.ids[i], draft.parents[i]) for i in draft.nodes(b)]


def test_each_sequence_has_its_own_part() -> None:
    two = Draft.chains([[1, 2], [3]])
    sampled = Draft.chains([[], [4]], torch.tensor([[0, 0, 0, 0.5, 0.5, 0]], dtype=torch.float64))
    draft = join_drafts([DraftPart(Draft.chains([[1], [], []])), None, DraftPart(Draft.chains([[], [], [5]]))], 6)
    assert [nodes(draft, b) for b in range(3)] == [[(1, -1)], [], [(5, -1)]]
    assert draft.q is None
    draft = join_drafts([DraftPart(two), DraftPart(sampled)], 6)
    draft.check([2, 2], 6, 8)
    assert [nodes(draft, b) for b in range(2)] == [[(1, -1), (2, 0)], [(4, -1)]]
    assert draft.q.tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0.5, 0.5, 0]]


def test_tokens_after_a_chain_are_point_masses_and_name_their_drafter() -> None:
    base = chains([[1, 2]], 0.5, 6)
    draft = join_drafts([DraftPart(base, "model", (3, 2), "lookup")], 6)
    draft.check([4], 6, 8)
    assert nodes(draft) == [(1, -1), (2, 0), (3, 1), (2, 2)]
    assert draft.by == ["model", "model", "lookup", "lookup"]
    assert torch.equal(draft.q[:2], base.q)
    assert draft.q[2:].tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]]


def test_a_draft_that_is_the_only_one_is_not_changed() -> None:
    two = Draft.chains([[1, 2], [3], []])
    assert join_drafts([DraftPart(two), DraftPart(two), None], 6) is two
    assert join_drafts([None, DraftPart(two), None], 6) is not two
    assert len(join_drafts([None, None], 6)) == 0
    named = join_drafts([DraftPart(two, "lookup"), DraftPart(two, "lookup"), None], 6)
    assert (named.ids, named.by) == ([1, 2, 3], ["lookup"] * 3)
    assert named.tokens is two.tokens
    inner = replace(two, by=["x", "y", "z"])
    assert join_drafts([DraftPart(inner, "stack"), None, None], 6).by == ["x", "y"]


def test_nodes_that_are_not_acceptable_stay_so() -> None:
    window = Draft(torch.tensor([1, 2]), (-1, -1), (0, 2, 2), acceptable=(False, True))
    draft = join_drafts([DraftPart(window), DraftPart(Draft.chains([[], [3]]))], 6)
    assert nodes(draft) == [(1, -1), (2, -1)]
    assert draft.acceptable == [False, True, True]
