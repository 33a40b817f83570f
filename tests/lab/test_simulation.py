"""Drawn texts meet the closed forms within their standard errors; planning follows from the costs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slipstream.core.cost_curve import CostCurve
from slipstream.core.theory import best_gamma, geometric_rates, predict, speedup
from slipstream.core.trees import Tree, expected_tokens, optimal_tree
from slipstream.errors import ParameterError
from slipstream.lab.capacity import Serving, groups_needed
from slipstream.lab.hardware import PRESETS
from slipstream.lab.known_pairs import MODELS
from slipstream.lab.simulation import Setting, best_tree, compare_lengths, simulate_chain, simulate_tree, tree_speedup

FREE = Setting(0.05)
STEEP = Setting(0.05, CostCurve((1, 4, 8, 16), (1.0, 1.1, 1.3, 2.4)), host=0.02)
MEASURED = [0.7296, 0.5208, 0.3545]
SIGMAS = 4.5  # two-sided p < 7e-6 for each comparison, with a fixed seed


def near(sampled, value):
    return abs(sampled.value - value) <= SIGMAS * sampled.error


@pytest.mark.parametrize("setting", [FREE, STEEP])
@pytest.mark.parametrize("rates", [geometric_rates(0.8, 6), geometric_rates(0.3, 2), MEASURED])
def test_drawn_chains_meet_the_exact_expectation(rates, setting):
    """`predict` of a text one token longer, whose first token is the prefill's: short last rounds included."""
    drawn = simulate_chain(rates, setting, tokens=64, texts=3000)
    costs = setting.costs or CostCurve((1,), (1.0,))
    expected = predict(rates, costs, setting.c * len(rates), round_host=setting.host, tokens=65)
    assert near(drawn.speedup, expected.speedup)
    assert near(drawn.tau, 64 / expected.rounds)
    assert drawn.spread[0] < drawn.speedup.value < drawn.spread[2]
    assert sum(drawn.histogram) == pytest.approx(1)


def test_long_texts_meet_the_closed_form():
    drawn = simulate_chain(geometric_rates(0.7, 4), FREE, tokens=4000, texts=300)
    assert drawn.speedup.value == pytest.approx(speedup(0.7, 4, 0.05), rel=0.005)


def test_a_tree_that_is_a_chain_is_drawn_as_one():
    chain = Tree((-1, 0, 1), (0, 0, 0))
    for tokens in (3, 64):
        a = simulate_tree(chain, (0.6,), STEEP, tokens=tokens, texts=3000)
        b = simulate_chain(geometric_rates(0.6, 3), STEEP, tokens=tokens, texts=3000, seed=1)
        assert abs(a.speedup.value - b.speedup.value) <= SIGMAS * (a.speedup.error + b.speedup.error)


@pytest.mark.parametrize(
    ("nodes", "tokens"), [(1, 1), (2, 1.5), (3, 1.75), (4, 1.95), (6, 2.175), (8, 2.375), (12, 2.5875), (16, 2.75875)]
)
def test_drawn_trees_meet_the_published_optimal_ones(nodes, tokens):
    """Sequoia's recursion with child acceptance (.5, .2, .1); its count of nodes includes the root."""
    acceptance = (0.5, 0.2, 0.1)
    tree = optimal_tree(acceptance, nodes - 1)
    assert expected_tokens(tree, acceptance) == pytest.approx(tokens)
    drawn = simulate_tree(tree, acceptance, Setting(0.0), tokens=2000, texts=100)
    assert drawn.tau.value == pytest.approx(tokens, rel=0.01)


def test_trees_whose_acceptance_depends_on_the_depth_are_drawn_right():
    acceptance = ((0.6, 0.2), (0.3, 0.3), (0.0,))
    tree = optimal_tree(acceptance, 6)
    drawn = simulate_tree(tree, acceptance, FREE, tokens=2000, texts=200)
    assert drawn.speedup.value == pytest.approx(tree_speedup(tree, acceptance, FREE), rel=0.01)


def test_the_same_seed_draws_the_same_texts():
    a, b, c = (simulate_chain(MEASURED, FREE, texts=50, seed=seed) for seed in (3, 3, 4))
    assert a == b
    assert a != c


def test_acceptance_that_varies_between_texts_spreads_them():
    """Tau is convex in alpha but time is what adds up, so mixed requests gain less than their mean acceptance says."""
    same = simulate_chain(geometric_rates(0.7, 6), FREE, texts=2000)
    mixed = simulate_chain(geometric_rates(0.7, 6), FREE, texts=2000, spread=0.2)
    assert mixed.spread[2] - mixed.spread[0] > 3 * (same.spread[2] - same.spread[0])
    assert mixed.speedup.value < same.speedup.value - 5 * mixed.speedup.error


def test_an_exact_drafter_and_a_hopeless_one():
    exact = simulate_chain([1.0] * 4, Setting(0.0), tokens=100, texts=5)
    assert exact.speedup.value == pytest.approx(100 / 20)
    assert exact.histogram[4] == 1
    hopeless = simulate_chain([0.0, 0.0], FREE, tokens=50, texts=5)
    assert hopeless.speedup.value < 1
    assert hopeless.histogram == (1.0, 0.0, 0.0)


def test_the_best_tree_is_the_best_of_all_shapes_that_were_looked_at():
    acceptance = (0.6, 0.15, 0.05)
    tree, gain = best_tree(acceptance, STEEP, most=15)
    assert gain == pytest.approx(tree_speedup(tree, acceptance, STEEP))
    others = [optimal_tree(acceptance, n, d) for n in range(1, 16) for d in range(1, 9)]
    assert gain == pytest.approx(max(tree_speedup(t, acceptance, STEEP) for t in others if len(t)))


def test_the_best_tree_of_one_choice_is_the_best_chain():
    setting = Setting(0.1, CostCurve.flat(0.02))
    tree, gain = best_tree((0.7,), setting)
    gamma = best_gamma(0.7, 0.1, costs=setting.costs)
    assert (len(tree), tree.height) == (gamma, gamma)
    assert gain == pytest.approx(speedup(0.7, gamma, 0.1, setting.costs))


def test_no_tree_pays_where_guesses_are_dear():
    assert best_tree((0.3, 0.1), Setting(2.0)) == (Tree((), ()), 1.0)


def test_rows_set_the_closed_form_beside_what_was_drawn():
    rows = compare_lengths(geometric_rates(0.8, 8), [1, 4, 8], FREE, tokens=128, texts=400, seed=0)
    for row in rows:
        assert row.speedup == pytest.approx(speedup(0.8, row.gamma, 0.05))
        assert row.break_even is not None
        assert row.drawn.speedup.value == pytest.approx(row.speedup, rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rates": []}, {"rates": [1.2]}, {"rates": [0.5, 0.6]}, {"texts": 1}, {"tokens": 0}, {"spread": 0.5},
        {"spread": -0.1}, {"rates": [1.0], "spread": 0.1},
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(ParameterError):
        simulate_chain(**{"rates": [0.8, 0.6], "setting": FREE} | wrong)


@pytest.mark.parametrize("wrong", [{"c": -1}, {"batch": 0}, {"host": float("nan")}])
def test_impossible_costs_are_refused(wrong):
    with pytest.raises(ParameterError):
        Setting(**wrong)


# --- planning ------------------------------------------------------------------------------------------------------

PLAN = Serving(
    MODELS["Llama-3.1-70B"].size,
    MODELS["Llama-3.1-8B"].size,
    PRESETS["h100"].times(4),
    tuple(geometric_rates(0.8, 8)),
    1024,
)


def test_speculation_helps_few_users_and_is_switched_off_for_many():
    loads = [PLAN.load(batch) for batch in (1, 16, 64, 256, 1024)]
    assert loads[0].speedup > 1.8
    assert loads[-1].draft_tokens == 0
    assert loads[-1].speedup == 1
    assert all(a.draft_tokens >= b.draft_tokens for a, b in pairwise(loads))
    assert all(load.speedup >= 1 for load in loads)


def test_a_fixed_draft_length_costs_throughput_under_load():
    assert PLAN.load(1024, draft_tokens=4).speedup < 0.8


def test_throughput_and_latency_of_a_load_agree():
    load = PLAN.load(16).as_dict()
    assert load["tokens_per_second"] == pytest.approx(16 * load["tokens_per_second_per_user"])
    assert load["speedup"] == pytest.approx(load["plain_seconds"] / load["seconds"])


def test_users_at_a_bound_are_as_many_as_the_bound_and_memory_allow():
    for bound in (0.012, 0.02, 0.03):
        for speculative in (False, True):
            n = PLAN.users(bound, speculative)
            seconds = [getattr(PLAN.load(b), "seconds" if speculative else "plain_seconds") for b in (max(n, 1), n + 1)]
            assert n == 0 or seconds[0] <= bound
            assert seconds[1] > bound or not PLAN.fits(n + 1, speculative)
    assert PLAN.users(0.012) > 0
    assert PLAN.users(0.012, speculative=False) == 0
    assert PLAN.users(1e-6) == 0


def test_without_a_bound_memory_decides_and_the_draft_takes_its_share():
    plain, speculative = PLAN.users(None, False), PLAN.users(None, True)
    assert plain > speculative > 0
    assert PLAN.fits(speculative)
    assert not PLAN.fits(speculative + 1)


def test_groups_for_thousands_of_users():
    assert groups_needed(5000, 278) == 18
    assert groups_needed(278, 278) == 1
    assert groups_needed(5000, 0) is None


def test_serving_refuses_rates_that_cannot_be():
    with pytest.raises(ParameterError, match="rates fall with the position"):
        Serving(PLAN.target, PLAN.draft, PLAN.hardware, (0.5, 0.9))
