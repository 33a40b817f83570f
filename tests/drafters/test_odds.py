from __future__ import annotations

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.drafters.odds import FADE, Odds, Reach, accepted_prefix


def test_a_draft_fared_as_far_as_the_text_went_its_way() -> None:
    draft = Draft.chains([[9], [1, 2, 3]])
    assert accepted_prefix(draft, 1, [1, 2, 3, 7]) == (3, False)
    assert accepted_prefix(draft, 1, [1, 2, 7]) == (2, True)
    assert accepted_prefix(draft, 1, [7]) == (0, True)
    assert accepted_prefix(draft, 1, [1, 2]) == (2, False), "the text ended before the third was judged"
    assert accepted_prefix(Draft.empty(2), 1, [1]) == (0, False)


def test_in_a_tree_any_branch_may_stand_and_a_node_without_a_vote_may_not() -> None:
    tree = Draft(torch.tensor([1, 2, 3, 4]), (-1, -1, 1, 1), (0, 4))
    assert accepted_prefix(tree, 0, [2, 4, 5]) == (2, False)
    assert accepted_prefix(tree, 0, [2, 5]) == (1, True)
    silent = Draft(torch.tensor([1, 2]), (-1, -1), (0, 2), acceptable=(False, True))
    assert accepted_prefix(silent, 0, [1]) == (0, True)


def test_a_lookups_trial_is_judged_once() -> None:
    odds = Odds(0.05, longest=4)
    odds.try_out(3, Draft.chains([[1, 2, 3]]), 0)
    odds.judge([1, 2, 9])
    assert (odds.stood[3], odds.judged[3]) == (3 * FADE**3 + 2, 3 * FADE**3 + 3)
    odds.judge([1, 2, 9])
    assert (odds.stood[3], odds.judged[3]) == (3 * FADE**3 + 2, 3 * FADE**3 + 3)
    odds.try_out(99, Draft.chains([[1]]), 0)
    odds.judge([5])
    assert (odds.stood[4], odds.judged[4]) == (4 * FADE, 4 * FADE + 1), "longer matches share the last record"


def test_a_longer_match_is_trusted_deeper_before_anything_is_known() -> None:
    """0.75^10 and 0.8^13 are the last powers of at least 0.05; (2 + 3) / (2 + 4) allows for 16."""
    odds = Odds(0.05, longest=16)
    assert [odds.depth(match) for match in (0, 1, 2)] == [10, 13, 16]
    assert odds.depth(16) == odds.depth(40) > odds.depth(8) > 16


def test_drafting_stops_where_drafts_are_never_right_and_resumes_where_they_are() -> None:
    odds = Odds(row_cost=0.05, longest=3)
    full, longer = odds.depth(2), odds.depth(3)
    assert full >= 8
    for _ in range(400):
        depth = odds.depth(2)
        if depth:
            odds.learn(2, depth, 0)
    tries = 0
    for _ in range(100):
        depth = odds.depth(2)
        if depth:
            tries += 1
            odds.learn(2, depth, 0)
    assert 0 < tries < 60, "it goes on trying, but not every time"
    assert odds.depth(3) == longer, "another length of match has its own record"
    for _ in range(200):
        odds.learn(2, 4, 4)
    assert odds.depth(2) > full


def test_reach_begins_with_its_prior_and_learns_by_hand_computed_shares() -> None:
    """prior 0.5 worth 2 guesses, nothing fades. After one round of two that stood and a third that fell, 2 of 3 guesses
    stood: rate (2 + 1) / (3 + 2) = 0.6; depths 1 and 2: (1 + 2 * 0.6) / (1 + 2) = 2.2 / 3, depth 3: 1.2 / 3, depth 4:
    0.6."""
    reach = Reach(deepest=8, prior=0.5, weight=2.0, fade=1.0)
    assert reach.stands(3) == pytest.approx([0.5, 0.25, 0.125])
    reach.learn(2, fell=True)
    first, second, third, fourth = reach.stands(4)
    assert first == pytest.approx(2.2 / 3)
    assert second == pytest.approx((2.2 / 3) ** 2)
    assert third / second == pytest.approx(0.4)
    assert fourth / third == pytest.approx(0.6)


def test_a_round_that_was_not_judged_teaches_nothing() -> None:
    reach = Reach(4, 0.5, 2.0, 1.0)
    reach.learn(0, fell=False)
    assert reach.rate == 0.5
    assert reach.streak == 0


def test_depths_beyond_the_last_share_its_record() -> None:
    reach = Reach(deepest=2, prior=0.5, weight=1.0, fade=1.0)
    reach.learn(4, fell=True)
    assert reach.judged == [1, 4]
    assert reach.stood == [1, 3]
    assert len(reach.stands(5)) == 5


def test_old_rounds_fade() -> None:
    reach = Reach(1, 0.5, 1.0, fade=0.5)
    reach.learn(1, fell=False)
    reach.learn(0, fell=True)
    assert reach.judged == [1.5]
    assert reach.stood == [0.5]


def test_a_streak_too_unlikely_to_be_chance_begins_the_record_anew() -> None:
    reach = Reach(4, 0.5, 2.0, fade=1.0)
    for turn in range(49):
        reach.learn(turn % 10 != 9, fell=turn % 10 == 9)  # nine in ten stand
    believed = reach.stands(1)[0]
    assert believed == pytest.approx(0.9, abs=0.02)
    misses = 0
    while reach.judged[0] > 10:
        reach.learn(0, fell=True)
        misses += 1
    assert misses == 3, "two in a row may be chance; the third is decisive"
    assert reach.judged[0] == 3
    assert reach.stands(1)[0] < 0.5
    for _ in range(30):
        reach.learn(0, fell=True)
    low = reach.stands(1)[0]
    assert low < 0.1
    reach.learn(1, fell=False)
    reach.learn(1, fell=False)
    assert reach.stands(1)[0] > 0.6, "and the other way round"
