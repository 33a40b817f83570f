"""Counters and their invariants; each published definition holds."""

import json
import random

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.stats import PHASES, SpecStats
from slipstream.core.stop import stop
from slipstream.theory.closed_forms import expect_length


def advance(seq: Sequence, draft: Draft, path: list[int], following: int) -> None:
    """One step of a single sequence, stops included."""
    verdict = stop([seq], draft, Verdict([path], [following], [None], [False]))
    seq.advance(verdict, draft, 0)


def random_sequence(rng: random.Random, trees: bool, cap: int = 10**6) -> Sequence:
    seq = Sequence([0], SamplingParams(max_tokens=cap), frozenset({9}))
    for _ in range(rng.randint(1, 30)):
        n = rng.randint(0, 4)
        parents = [rng.randrange(-1, i) if trees else i - 1 for i in range(n)]
        tokens = [rng.choice([1, 1, 1, 1, 2, 3, 9]) for _ in range(n)]
        draft = Draft(torch.tensor(tokens, dtype=torch.int64), parents, (0, n))
        path: list[int] = []
        while (below := draft.children(0).get(path[-1] if path else -1)) and rng.random() < 0.6:
            path.append(rng.choice(below))
        advance(seq, draft, path, rng.choice([1, 1, 1, 9]))
        if seq.finish:
            break
    return seq


@pytest.mark.parametrize("trees", [False, True])
def test_the_invariants_hold_for_every_kind_of_step(trees: bool) -> None:
    ends = set()
    for seed in range(200):
        seq = random_sequence(random.Random(seed), trees, cap=random.Random(seed).choice((5, 20, 10**6)))
        s = seq.stats
        assert sum(s.histogram.values()) == s.steps
        assert sum(i * n for i, n in s.histogram.items()) == s.accepted == sum(seq.was_drafted())
        assert s.tokens == len(seq.output) == len(seq.was_drafted())
        ended_on_a_draft_token = bool(seq.finish and seq.was_drafted()[-1])
        assert s.tokens == s.accepted + s.steps - ended_on_a_draft_token
        assert s.accepted <= s.proposed
        assert s.mean_acceptance_length == s.tokens / s.steps
        assert sum(s.accepted_at.values()) == s.accepted
        assert all(s.accepted_at[d] <= s.drafted_at[d] for d in s.drafted_at)
        assert all(s.drafted_at[d] >= s.drafted_at[d + 1] for d in s.drafted_at)
        ends.add((seq.finish, ended_on_a_draft_token))
    assert len(ends) >= 4


def test_tau_is_one_plus_the_rates_by_position() -> None:
    """Steps of 3 draft tokens: (accepted 3, 0, 1, 3) give position rates 3/4, 2/4, 2/4, and tau 11/4."""
    seq = Sequence([0], SamplingParams(max_tokens=1000))
    for accepted in (3, 0, 1, 3):
        advance(seq, Draft.chains([[1, 2, 3]]), list(range(accepted)), 4)
    assert seq.stats.position_rates == [3 / 4, 2 / 4, 2 / 4]
    assert seq.stats.mean_acceptance_length == 11 / 4 == expect_length(seq.stats.position_rates)
    assert seq.stats.proposed == 12
    assert seq.stats.acceptance_rate == 7 / 12


def test_nodes_after_a_stop_are_not_counted_and_depths_of_a_tree_count_once() -> None:
    """[1, EOS, 2, 3], all accepted: tokens after EOS are not part of the text."""
    seq = Sequence([0], SamplingParams(), frozenset({9}))
    advance(seq, Draft.chains([[1, 9, 2, 3]]), [0, 1, 2, 3], 4)
    assert seq.output == [1, 9]
    assert (seq.stats.proposed, seq.stats.accepted, seq.stats.tokens) == (2, 2, 2)
    assert seq.stats.position_rates == [1, 1]
    assert seq.was_drafted() == [True, True]
    seq = Sequence([0], SamplingParams())
    tree = Draft(torch.tensor([1, 2, 3, 4, 5]), (-1, -1, 0, 0, 1), (0, 5))
    advance(seq, tree, [1, 4], 7)
    assert (seq.stats.proposed, seq.stats.accepted, seq.stats.tokens) == (5, 2, 3)
    assert seq.stats.position_rates == [1, 1]
    assert seq.was_drafted() == [True, True, False]


def test_steps_without_a_draft_are_counted_separately() -> None:
    """They lower tau; the acceptance rate and the rates by position count only the steps that drafted."""
    drafted, total = SpecStats(), SpecStats()
    for accepted in (0, 1, 3):
        drafted.count([1, 2, 3], accepted, accepted + 1)
        total.count([1, 2, 3], accepted, accepted + 1)
        total.count([], 0, 1)
    assert (drafted.undrafted, total.undrafted) == (0, 3)
    assert total.acceptance_rate == drafted.acceptance_rate == 4 / 9
    assert total.position_rates == drafted.position_rates
    assert total.mean_acceptance_length == 10 / 6
    assert drafted.mean_acceptance_length == 7 / 3
    assert total.histogram[0] == drafted.histogram[0] + 3


def test_nothing_counted_gives_no_rates() -> None:
    stats = SpecStats()
    assert stats.acceptance_rate is None
    assert stats.mean_acceptance_length is None
    assert stats.tokens_per_second is None
    assert stats.position_rates == []


def test_adding_up_equals_counting_together() -> None:
    a, b, both = SpecStats(), SpecStats(), SpecStats()
    for one, depths, accepted in ((a, [1, 2], 2), (a, [], 0), (b, [1, 2, 3], 1)):
        for stats in (one, both):
            stats.count(depths, accepted, accepted + 1)
            for phase in PHASES:
                stats.seconds[phase] += 0.25
            stats.drafter_faults += 1
    total, before = a + b, (a.steps, b.steps)
    assert total == both
    (a + b).count([1, 2], 2, 3)
    assert (a.steps, b.steps) == before, "the parts are not changed"
    assert total.tokens_per_second == 6 / 3.0


def test_as_dict_is_plain_json() -> None:
    stats = SpecStats()
    stats.count([1, 2], 1, 2)
    stats.count([1, 2], 2, 3)
    plain = json.loads(json.dumps(stats.as_dict()))
    assert plain["histogram"] == [0, 1, 1]
    assert plain["position_rates"] == [1.0, 0.5]
    assert plain["mean_acceptance_length"] == 2.5
