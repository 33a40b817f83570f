"""Tests of the promises that lookup drafters make. `test_lookups.py` runs them on the lookup drafters of the registry.

`LookupConformance` is for all lookup drafters. `CopyingConformance` is for drafters that continue a match in the
sequence (`Lookup`): whatever their data structure, they must make the same drafts.
"""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.registry import make_drafter
from slipstream.llm import LLM
from tests.drafters.conformance import size
from tests.targets.toy import ToyTarget

NO_MATCH = ([1, 2, 3, 4], [7])


@dataclass(frozen=True)
class LookupCase:
    """A lookup drafter under test. name: its name in the registry. eager: options with which drafts are not
    shortened."""

    name: str
    eager: dict[str, Any] = field(default_factory=lambda: {"row_cost": 0.0})

    def make(self, target: ToyTarget | None = None, **options: Any) -> Any:
        return make_drafter(self.name, target or ToyTarget(32), **options)

    def draft(self, tokens: Seq[int], depth: int = 8, **options: Any) -> Draft:
        """Return the draft of a new drafter for a text."""
        return self.make(ToyTarget(128), **self.eager | options).propose([Sequence(list(tokens))], [Budget(depth)])

    def chain(self, tokens: Seq[int], depth: int = 8, **options: Any) -> list[int]:
        draft = self.draft(tokens, depth, **options)
        assert draft.is_chain
        assert draft.q is None
        return draft.ids


class Counting(list[int]):
    """A list of tokens that counts how many tokens are read."""

    read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        item = super().__getitem__(key)
        self.read += len(item) if isinstance(key, slice) else 1
        return item

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.read += len(self)
        return super().__iter__()


class LookupConformance:
    """The tests for all lookup drafters. A subclass provides a fixture `case: LookupCase`."""

    @pytest.mark.parametrize("text", NO_MATCH, ids=str)
    def test_nothing_is_proposed_without_a_match(self, case: LookupCase, text: list[int]) -> None:
        draft = case.draft(text)
        assert not any(draft.acceptable if draft.acceptable is not None else draft.ids)

    def test_draft_tokens_are_on_the_targets_device(self, case: LookupCase) -> None:
        target = ToyTarget()
        target.device = torch.device("meta")
        assert case.make(target).propose([Sequence([1, 2, 1])], [Budget(2)]).tokens.device == target.device

    def test_a_sequence_without_drafts_costs_no_memory(self, case: LookupCase) -> None:
        target = ToyTarget()
        drafter = case.make(target)
        before, seq = size(drafter), Sequence([1, 2, 1, 2])
        LLM(target, drafter, draft_tokens=4).generate(seq.tokens, SamplingParams(max_tokens=8, draft_tokens=0))
        drafter.propose([seq], [Budget(0)])
        drafter.observe([seq], Draft.empty(1), TargetOut(torch.zeros(1, 8)), Verdict([[]], [1], [None], [False]))
        assert size(drafter) == before

    def test_few_tokens_are_proposed_if_they_are_always_rejected(self, case: LookupCase) -> None:
        """Every draft token for a uniform distribution over 128 tokens is rejected with probability 127/128."""
        rates = []
        for options in (case.eager, {}):
            target = ToyTarget(128, order=1, seed=1, sharpness=0.0)
            llm = LLM(target, case.make(target, **options), draft_tokens=8)
            stats = llm.generate([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=600, seed=1))[0].stats
            rates.append(stats.proposed / stats.steps)
        assert rates[0] > 6
        assert rates[1] < 1

    def test_a_loop_is_proposed_and_accepted(self, case: LookupCase) -> None:
        """At temperature 0, a target that depends on one token ends in a loop, so nearly all copied tokens are
        accepted."""
        target = ToyTarget(8, order=1, seed=1, sharpness=0.1)
        llm = LLM(target, case.make(target), draft_tokens=8)
        stats = llm.generate([1, 2, 3], SamplingParams(max_tokens=300))[0].stats
        assert stats.mean_acceptance_length > 3.5
        assert stats.acceptance_rate > 0.9 or not llm.drafter.traits.lookup

    def test_a_step_reads_only_the_new_tokens(self, case: LookupCase) -> None:
        rng, reads = random.Random(2), []
        for length in (1000, 30_000):
            drafter, seq = case.make(ToyTarget(64)), Sequence([0])
            tokens = seq.tokens = Counting(rng.randrange(64) for _ in range(length))
            drafter.propose([seq], [Budget(4)])
            tokens.read = 0
            for _ in range(20):
                tokens += [rng.randrange(64) for _ in range(3)]
                drafter.propose([seq], [Budget(4)])
            reads.append(tokens.read)
        assert max(reads) < 20 * 150


class CopyingConformance:
    """The tests for drafters that copy. A subclass provides a fixture `case: LookupCase` of a `Lookup`."""

    def test_the_longest_match_wins(self, case: LookupCase) -> None:
        """In the text, "2 3" is followed by 4 three times, and "1 2 3" by 5 once."""
        assert case.chain([2, 3, 4, 2, 3, 4, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], 1) == [5]

    def test_of_equal_matches_the_latest_wins(self, case: LookupCase) -> None:
        assert case.chain([1, 5, 1, 6, 1], 1) == [6]

    def test_the_most_frequent_follower_wins(self, case: LookupCase) -> None:
        assert case.chain([1, 5, 1, 5, 1, 6, 1], 1) == [5]

    def test_a_match_shorter_than_its_least_length_is_not_used(self, case: LookupCase) -> None:
        least = {"ngram": "min_ngram", "suffix": "min_match"}[case.name]
        assert case.chain([1, 2, 3, 9, 3], **{least: 2}) == []

    def test_a_match_of_one_token_is_continued(self, case: LookupCase) -> None:
        assert case.chain([1, 2, 3, 9, 3], 2) == [9, 3]

    def test_a_match_is_copied_up_to_the_budget(self, case: LookupCase) -> None:
        for depth in range(1, 19):
            assert case.chain([*range(10, 60), 5, *range(10, 20)], depth) == list(range(20, 20 + depth))

    @pytest.mark.parametrize("period", [1, 2, 3, 5])
    @pytest.mark.parametrize("times", [1, 2, 20])
    def test_a_loop_is_followed_for_any_number_of_repeats(self, case: LookupCase, period: int, times: int) -> None:
        loop = list(range(period))
        assert case.chain([9, *loop * times, *loop[:1]], 7) == [loop[(1 + i) % period] for i in range(7)]

    def test_a_sequence_that_joins_late_gets_the_same_drafts(self, case: LookupCase) -> None:
        """The tokens were added one by one, with or without a draft for each, or all at once."""
        rng = random.Random(3)
        text = [rng.randrange(6) for _ in range(300)]
        early, seq = case.make(**case.eager), Sequence(text[:1])
        for end in range(1, len(text), 3):
            seq.tokens = text[:end]
            early.propose([seq], [Budget(4)])
            assert early.propose([seq], [Budget(8)]).ids == case.draft(seq.tokens).ids

    def test_knows_the_length_of_its_match(self, case: LookupCase) -> None:
        lookup = case.make()
        assert lookup.traits.lookup
        seq = Sequence([9, 1, 2, 3, 4, 5, 8, 2, 3, 4])
        assert lookup.propose([seq], [Budget(2)]).ids[:1] == [5]
        assert lookup.match_length(seq.id) == 3
        assert lookup.match_length(10**9) == 0

    def test_continues_the_text_and_another_drafters_draft(self, case: LookupCase) -> None:
        lookup, seq = case.make(), Sequence([9, 1, 2, 3, 4, 5, 8, 1])
        lookup.propose([seq], [Budget(2)])
        assert lookup.continue_from(seq, [2, 3], Budget(2)) == ([4, 5], 3)
        assert lookup.continue_from(seq, [7, 3], Budget(2)) == ([4, 5], 1), "a match within the other's draft"
        assert lookup.continue_from(seq, [6], Budget(2))[0] == []
        assert lookup.propose([seq], [Budget(1)]).ids == [2], "it was not learnt"

    @pytest.mark.parametrize(("repeats", "accepted"), [(True, True), (False, True), (False, False)])
    def test_scores_what_it_drafts_after_others_if_these_are_accepted(
        self, case: LookupCase, repeats: bool, accepted: bool
    ) -> None:
        rng, lookup, lengths = random.Random(4), case.make(row_cost=0.3), []
        text = [i % 6 if repeats else rng.randrange(32) for i in range(2000)]
        seq = Sequence(text[:12], SamplingParams(max_tokens=2000))
        while len(seq.tokens) < len(text) - 3:
            *drafted, following = text[len(seq.tokens) :][:3]
            lengths.append(len(lookup.continue_from(seq, drafted if accepted else [40, drafted[1]], Budget(16))[0]))
            foreign, verdict = Draft.chains([drafted]), Verdict([[0, 1]], [following], [None], [False])
            seq.advance(verdict, foreign, 0)
            lookup.observe([seq], foreign, TargetOut(torch.zeros(3, 32)), verdict)
        late = sum(lengths[-300:]) / 300
        if repeats:
            assert late >= 1
        elif accepted:
            assert late < 0.1
        else:
            assert late == pytest.approx(sum(lengths[60:360]) / 300, abs=0.25), "nothing was learned"

    def test_a_row_after_others_pays_with_the_chance_that_these_are_accepted(self, case: LookupCase) -> None:
        lookup, seq = case.make(ToyTarget(128)), Sequence([*range(60), 61, *range(20)])
        lengths = list[int]()
        for cost, reached in ((0.2, 1.0), (0.1, 0.5), (0.4, 1.0), (0.1, 0.25), (0.2, 0.25)):
            found, _ = lookup.continue_from(seq, [20, 21], Budget(40, (cost,), reached=reached))
            lengths.append(len(found))
        assert lengths[0] == lengths[1] > lengths[2] == lengths[3] > lengths[4]

    @pytest.mark.parametrize("repeats", [True, False])
    def test_scores_its_own_proposals_even_if_others_were_verified(self, case: LookupCase, repeats: bool) -> None:
        """Each step verifies the draft of another drafter, which is accepted completely. The tokens of the lookup's own
        proposal count as right if they agree with the text, otherwise as wrong."""
        rng, lookup, lengths = random.Random(4), case.make(row_cost=0.5), []
        text = [i % 6 if repeats else rng.randrange(32) for i in range(2000)]
        seq = Sequence(text[:12], SamplingParams(max_tokens=2000))
        while len(seq.tokens) < len(text) - 3:
            lengths.append(len(lookup.propose([seq], [Budget(16)])))
            *drafted, following = text[len(seq.tokens) :][:3]
            foreign, verdict = Draft.chains([drafted]), Verdict([[0, 1]], [following], [None], [False])
            seq.advance(verdict, foreign, 0)
            lookup.observe([seq], foreign, TargetOut(torch.zeros(3, 32)), verdict)
        first, late = next(filter(None, lengths)), sum(lengths[-300:]) / 300
        assert first < 12
        assert late >= max(6, first) if repeats else late < 0.5
