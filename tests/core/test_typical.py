"""Typical acceptance: lossy, by how much, and labelled as lossy; greedy at temperature 0."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from slipstream.core.dice import Dice
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.rules import DELTA, EPSILON, RULES, threshold, verify
from slipstream.llm import LLM
from tests.core.exact import outcomes_of, rows_of
from tests.core.worlds import Shape, probs, steady
from tests.drafters.scripted_drafters import ScriptedDrafter
from tests.targets.toy import ToyTarget

TYPICAL = RULES["typical"]
P = probs(5, 3, 2)


def dice(batch: int = 1, seed: int = 0) -> Dice:
    return Dice([Stream(seed + b) for b in range(batch)], [0] * batch, [16] * batch)


def test_the_threshold_is_the_smaller_of_epsilon_and_delta_times_exp_minus_entropy() -> None:
    p = rows_of([0.5, 0.3, 0.2], [0.25, 0.25, 0.25], [1.0, 0.0, 0.0])
    p[1] = 1 / 3
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    assert threshold(p).tolist() == pytest.approx([0.09, 0.09, 0.09])
    assert threshold(p, epsilon=0.3, delta=0.09).tolist() == pytest.approx([0.09 * math.exp(-entropy), 0.03, 0.09])
    assert round(float(threshold(p, epsilon=0.3, delta=0.09)[0]), 3) == 0.032
    flat = torch.full((1, 100), 0.01, dtype=torch.float64)
    assert float(threshold(flat)[0]) == pytest.approx(0.003)  # a flat distribution has a low threshold


@pytest.mark.parametrize(("epsilon", "delta"), [(EPSILON, DELTA), (DELTA, EPSILON)])
def test_a_flat_distribution_accepts_any_draft_and_the_error_reaches_its_bound(epsilon: float, delta: float) -> None:
    """p = (.5, .3, .2): the least likely token is above the threshold, for either order of the two constants. A
    drafter that always proposes it moves the distribution by a total variation of .8."""
    assert float(threshold(rows_of([0.5, 0.3, 0.2]), epsilon, delta)[0]) < 0.2
    world = replace(steady(P, P), fixed=lambda text, node: 2)
    outcomes = outcomes_of(TYPICAL, world, Shape.chain("p"))
    assert {o.tokens[0] for o in outcomes} == {2}
    assert sum(o.weight for o in outcomes if o.accepted) == 1
    assert 1 - P[2] == Fraction(8, 10)


def test_the_longest_path_is_accepted_and_among_equals_the_most_probable() -> None:
    #        0 ── 2 ── 4
    #  root ─┤    └── 5
    #        1 ── 3
    tree = Draft(torch.tensor([0, 1, 0, 1, 1, 2]), (-1, -1, 0, 1, 2, 2), (0, 6))
    p = [0.6, 0.38, 0.02]
    distributions = rows_of(p, p, p, [0.1, 0.3, 0.6], p, p, p)
    assert verify(tree, distributions, TYPICAL, dice()).path == [[0, 2, 5]]  # .6 beats .3 below node 2
    distributions[3] = torch.tensor([0.98, 0.01, 0.01])  # nothing below node 2 passes: two paths of length two remain
    assert verify(tree, distributions, TYPICAL, dice()).path == [[0, 2]]
    distributions[0] = torch.tensor([0.08, 0.9, 0.02])  # node 0 no longer passes, and with it all below
    assert verify(tree, distributions, TYPICAL, dice()).path == [[1, 3]]


def test_no_unacceptable_node_is_accepted_and_the_token_after_the_path_has_the_distribution_there() -> None:
    outcomes = outcomes_of(TYPICAL, replace(steady(P, P), fixed=lambda text, node: 1), Shape.chain("pp"))
    assert {o.tokens: o.weight for o in outcomes} == {(1, 1, t): p for t, p in enumerate(P)}
    tree = Draft(torch.tensor([0, 1, 1]), (-1, -1, 0), (0, 3), acceptable=[False, True, True])
    p = [0.6, 0.4]
    assert verify(tree, rows_of(p, p, p, p), TYPICAL, dice()).path == [[1]]


def test_it_is_labelled_lossy_wherever_it_shows() -> None:
    target = ToyTarget(5, seed=1)
    plain = LLM(target, draft_tokens=4).generate([[0, 1]], SamplingParams(max_tokens=12))[0]
    drafter = ScriptedDrafter({(0, 1): plain.token_ids}, 5)
    done = LLM(target, drafter, rule="typical", draft_tokens=4).generate([[0, 1]], SamplingParams(max_tokens=12))[0]
    assert done.token_ids == plain.token_ids
    assert done.stats.accepted == done.stats.proposed
    assert (plain.lossless, done.lossless) == (True, False)
