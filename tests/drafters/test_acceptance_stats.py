import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.drafters.acceptance_stats import FADE, DepthStats, MatchLengthStats, accepted_prefix


def test_accepted_prefix_counts_draft_tokens_that_agree_with_the_text() -> None:
    draft = Draft.chains([[9], [1, 2, 3]])
    assert accepted_prefix(draft, 1, [1, 2, 3, 7]) == (3, False)
    assert accepted_prefix(draft, 1, [1, 2, 7]) == (2, True)
    assert accepted_prefix(draft, 1, [7]) == (0, True)
    assert accepted_prefix(draft, 1, [1, 2]) == (2, False), "the text ended before the third was compared"
    assert accepted_prefix(Draft.empty(2), 1, [1]) == (0, False)


def test_in_a_tree_any_branch_may_be_accepted_but_no_node_that_is_not_acceptable() -> None:
    tree = Draft(torch.tensor([1, 2, 3, 4]), (-1, -1, 1, 1), (0, 4))
    assert accepted_prefix(tree, 0, [2, 4, 5]) == (2, False)
    assert accepted_prefix(tree, 0, [2, 5]) == (1, True)
    silent = Draft(torch.tensor([1, 2]), (-1, -1), (0, 2), acceptable=(False, True))
    assert accepted_prefix(silent, 0, [1]) == (0, True)


def test_a_lookups_draft_is_scored_once() -> None:
    match_stats = MatchLengthStats(0.05, longest=4)
    match_stats.remember(3, Draft.chains([[1, 2, 3]]), 0)
    match_stats.compare([1, 2, 9])
    assert (match_stats.accepted[3], match_stats.compared[3]) == (3 * FADE**3 + 2, 3 * FADE**3 + 3)
    match_stats.compare([1, 2, 9])
    assert (match_stats.accepted[3], match_stats.compared[3]) == (3 * FADE**3 + 2, 3 * FADE**3 + 3)
    match_stats.remember(99, Draft.chains([[1]]), 0)
    match_stats.compare([5])
    assert (match_stats.accepted[4], match_stats.compared[4]) == (4 * FADE, 4 * FADE + 1), (
        "longer matches share the last record"
    )


def test_a_longer_match_has_longer_drafts_before_anything_is_learnt() -> None:
    """0.75^10 and 0.8^13 are the last powers of at least 0.05; (2 + 3) / (2 + 4) allows for 16."""
    match_stats = MatchLengthStats(0.05, longest=16)
    assert [match_stats.depth(match) for match in (0, 1, 2)] == [10, 13, 16]
    assert match_stats.depth(16) == match_stats.depth(40) > match_stats.depth(8) > 16


def test_drafting_stops_when_drafts_are_always_rejected_and_resumes_when_they_are_accepted() -> None:
    match_stats = MatchLengthStats(row_cost=0.05, longest=3)
    full, longer = match_stats.depth(2), match_stats.depth(3)
    assert full >= 8
    for _ in range(400):
        depth = match_stats.depth(2)
        if depth:
            match_stats.learn(2, depth, 0)
    tries = 0
    for _ in range(100):
        depth = match_stats.depth(2)
        if depth:
            tries += 1
            match_stats.learn(2, depth, 0)
    assert 0 < tries < 60, "it keeps trying, but not in every step"
    assert match_stats.depth(3) == longer, "another length of match has its own record"
    for _ in range(200):
        match_stats.learn(2, 4, 4)
    assert match_stats.depth(2) > full


def test_depth_stats_begin_with_their_prior_and_learn_by_hand_computed_shares() -> None:
    """prior 0.5 with the weight of 2 draft tokens, nothing fades. After a step with two accepted and a third rejected,
    2 of 3 draft tokens are accepted: rate (2 + 1) / (3 + 2) = 0.6; depths 1 and 2: (1 + 2 * 0.6) / (1 + 2) = 2.2 / 3,
    depth 3: 1.2 / 3, depth 4: 0.6."""
    stats = DepthStats(deepest=8, prior=0.5, weight=2.0, fade=1.0)
    assert stats.acceptance_by_depth(3) == pytest.approx([0.5, 0.25, 0.125])
    stats.learn(2, rejected=True)
    first, second, third, fourth = stats.acceptance_by_depth(4)
    assert first == pytest.approx(2.2 / 3)
    assert second == pytest.approx((2.2 / 3) ** 2)
    assert third / second == pytest.approx(0.4)
    assert fourth / third == pytest.approx(0.6)


def test_a_step_without_a_comparison_changes_nothing() -> None:
    stats = DepthStats(4, 0.5, 2.0, 1.0)
    stats.learn(0, rejected=False)
    assert stats.rate == 0.5
    assert stats.streak == 0


def test_depths_after_the_last_share_its_record() -> None:
    stats = DepthStats(deepest=2, prior=0.5, weight=1.0, fade=1.0)
    stats.learn(4, rejected=True)
    assert stats.compared == [1, 4]
    assert stats.accepted == [1, 3]
    assert len(stats.acceptance_by_depth(5)) == 5


def test_old_steps_fade() -> None:
    stats = DepthStats(1, 0.5, 1.0, fade=0.5)
    stats.learn(1, rejected=False)
    stats.learn(0, rejected=True)
    assert stats.compared == [1.5]
    assert stats.accepted == [0.5]


def test_a_streak_too_unlikely_to_be_chance_resets_the_record() -> None:
    stats = DepthStats(4, 0.5, 2.0, fade=1.0)
    for index in range(49):
        stats.learn(index % 10 != 9, rejected=index % 10 == 9)  # nine in ten are accepted
    believed = stats.acceptance_by_depth(1)[0]
    assert believed == pytest.approx(0.9, abs=0.02)
    misses = 0
    while stats.compared[0] > 10:
        stats.learn(0, rejected=True)
        misses += 1
    assert misses == 3, "two in a row may be chance; the third is decisive"
    assert stats.compared[0] == 3
    assert stats.acceptance_by_depth(1)[0] < 0.5
    for _ in range(30):
        stats.learn(0, rejected=True)
    low = stats.acceptance_by_depth(1)[0]
    assert low < 0.1
    stats.learn(1, rejected=False)
    stats.learn(1, rejected=False)
    assert stats.acceptance_by_depth(1)[0] > 0.6, "and vice versa"
