"""The sums over positions that `verify` tests have the distributions that they are compared with."""

import numpy as np
import pytest
from scipy.stats import binom, kstest

from slipstream.core.params import SamplingParams
from slipstream.verify import outcomes
from slipstream.verify.outcomes import BEST, BINS, EDGES, END, FAVOURED, PAIR, PENALISED, Evidence, Sum, ranks, sets
from slipstream.verify.reference import distribution

P = np.array([0.4, 0.3, 0.2, 0.0925, 0.007, 0.0005, 0.0])


def named(params: SamplingParams, p=P, favoured=None, edge=True, output=()) -> dict[str, list[int]]:
    token_sets = sets(p, favoured, (params, [1, 2], output, frozenset({3, 99})), edge)
    return {name: ids.tolist() for name, ids in token_sets}


def test_the_exact_test_is_binomial_and_that_of_many_positions_normal():
    total = Sum(9, [0.2] * 100)
    assert total.p == pytest.approx(2 * binom.cdf(9, 100, 0.2))
    assert Sum(9, [0.2] * 3).p is None
    assert Sum(400, [0.2] * 2000).p == pytest.approx(1.0)
    assert Sum(360, [0.2] * 2000).p == pytest.approx(2 * binom.cdf(360, 2000, 0.2), rel=0.1)


def test_tokens_are_sorted_into_sets_by_the_targets_probability():
    token_sets = named(SamplingParams(temperature=1.0), favoured=np.array([2]))
    assert token_sets == {
        FAVOURED: [2], BEST: [0], "below 1 %": [4, 5], "below 0.1 %": [5], "below 0.01 %": [], END: [3],
    }  # fmt: skip


@pytest.mark.parametrize(("name", "value", "last"), [("top_k", 3, 2), ("top_p", 0.65, 1), ("min_p", 0.2, 3)])
def test_the_last_token_that_a_filter_keeps_is_an_outcome_of_its_own(name, value, last):
    params = SamplingParams(temperature=1.0, **{name: value})
    with np.errstate(divide="ignore"):
        p = distribution(np.log(P), (params, [], [], frozenset()))
    assert named(params, p)[EDGES[name]] == [last]
    assert EDGES[name] not in named(params, p, edge=False), "where rounding decides at the edge, it is not tested"


def test_with_penalties_the_tokens_that_they_reach_are_an_outcome():
    assert sorted(named(SamplingParams(temperature=1.0, presence_penalty=0.5), output=[5])[PENALISED]) == [1, 2, 5]


def test_ranks_of_a_right_sampler_are_uniform_and_independent():
    rng = np.random.default_rng(0)
    drawn = [ranks(P, int(token), rng.random()) for token in rng.choice(len(P), 4000, p=P)]
    for order in zip(*drawn, strict=True):
        assert kstest(order, "uniform").pvalue > 0.01
    row = Evidence()
    for (u, v), (_, other) in zip(drawn[::2], drawn[1::2], strict=True):
        row.token(u, v, [])
        row.pair(v, other)
    result = outcomes.judge("any", row)
    assert result.ranks > 0.01
    assert min(result.outcomes[PAIR], result.outcomes["ids"]) > 0.01
    assert row.positions == 2000


def test_a_random_number_that_is_used_twice_shows_in_the_order_of_ids():
    rng, row = np.random.default_rng(1), Evidence()
    for number in rng.random(500):
        token = int(np.searchsorted(P.cumsum(), number))
        _, v = ranks(P, token, rng.random())
        row.pair(v, v)
    assert outcomes.judge("any", row).outcomes[PAIR] < 1e-12


def test_an_impossible_token_needs_no_further_evidence():
    assert outcomes.judge("any", Evidence(np.full(BINS, 50), forbidden=1)).p == 0.0
