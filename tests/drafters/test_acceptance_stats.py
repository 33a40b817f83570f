import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.drafters.acceptance_stats import FADE, RULE_WEIGHT, DepthStats, MatchLengthStats, count_accepted


def test_accepted_prefix_counts_draft_tokens_that_agree_with_the_text() -> None:
    draft = Draft.chains([[9], [1, 2, 3]])
    assert count_accepted(draft, 1, [1, 2, 3, 7]) == (3, False)
    assert count_accepted(draft, 1, [1, 2, 7]) == (2, True)
    assert count_accepted(draft, 1, [7]) == (0, True)
    assert count_accepted(draft, 1, [1, 2]) == (2, False), "the text ended before the third was compared"
    assert count_accepted(Draft.empty(2), 1, [1]) == (0, False)


def test_in_a_tree_any_branch_may_be_accepted_but_no_node_that_is_not_acceptable() -> None:
    tree = Draft(torch.tensor([1, 2, 3, 4]), (-1, -1, 1, 1), (0, 4))
    assert count_accepted(tree, 0, [2, 4, 5]) == (2, False)
    assert count_accepted(tree, 0, [2, 5]) == (1, True)
    silent = Draft(torch.tensor([1, 2]), (-1, -1), (0, 2), acceptable=(False, True))
    assert count_accepted(silent, 0, [1]) == (0, True)


def test_the_worth_of_a_match_starts_from_a_rule_and_is_learned_by_its_length() -> None:
    stats = MatchLengthStats()
    assert [stats.rate(match) for match in (1, 2, 6)] == [1 / 3, 1 / 2, 3 / 4]
    longest = len(stats.rule) - 1
    assert stats.rate(longest) == stats.rate(99)
    stats.learn(2, True)
    stats.learn(2, False)
    assert stats.rate(2) == (RULE_WEIGHT / 2 + FADE) / (RULE_WEIGHT + FADE + 1)
    assert stats.rate(1) == 1 / 3, "another length of match has its own record"
    for _ in range(1000):
        stats.learn(99, True)
    assert stats.rate(longest) > 0.99


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
