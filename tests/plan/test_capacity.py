"""Plans for many users follow from the costs."""

from itertools import pairwise

import pytest

from slipstream.plan.capacity import Serving
from slipstream.plan.known_pairs import MODELS
from slipstream.plan.roofline import PRESETS
from slipstream.theory.forecast import Rates

PLAN = Serving(
    MODELS["Llama-3.1-70B"].size, MODELS["Llama-3.1-8B"].size, PRESETS["h100"].times(4),
    Rates.constant(0.8, longest=8), 1024,
)  # fmt: skip


def test_speculation_helps_few_users_and_is_switched_off_for_many():
    loads = [PLAN.load(batch) for batch in (1, 16, 64, 256, 1024)]
    assert loads[0].forecast.speedup > 1.8
    assert loads[-1].forecast.draft_tokens == 0
    assert loads[-1].forecast.speedup == 1
    assert all(a.forecast.draft_tokens >= b.forecast.draft_tokens for a, b in pairwise(loads))
    assert all(load.forecast.speedup >= 1 for load in loads)


def test_a_fixed_draft_length_costs_throughput_under_load():
    assert PLAN.load(1024, draft_tokens=4).forecast.speedup < 0.8


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
