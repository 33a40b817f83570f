"""Presets are the vendors' figures; the roofline reproduces measured speeds; plans for many users follow from it."""

from itertools import pairwise

import pytest

from slipstream.errors import ParameterError
from slipstream.measure.known_pairs import MODELS
from slipstream.measure.roofline import (
    PRESETS,
    Hardware,
    ModelSize,
    Serving,
    compute_pair_costs,
    count_devices,
    find_hardware,
    make_cost_curve,
    time_forward,
)
from slipstream.theory.forecast import Rates, forecast

LLAMA_7B, LLAMA_70B = MODELS["Llama-2-7B"].size, MODELS["Llama-2-70B"].size
A100, H100 = PRESETS["a100"], PRESETS["h100"]
RIDGE = H100.flops * H100.computing / (H100.bandwidth * H100.reading)
"""Rows from which a dense 16-bit layer is compute-bound there instead of memory-bound."""


@pytest.mark.parametrize(
    ("model", "devices", "tokens_per_second"),
    [
        (LLAMA_7B, 1, 104.9), (LLAMA_7B, 2, 168.84), (LLAMA_7B, 4, 254.02), (LLAMA_7B, 8, 328.43),
        (LLAMA_70B, 2, 21.32), (LLAMA_70B, 4, 38.01), (LLAMA_70B, 8, 62.50),
    ],
)  # fmt: skip
def test_the_roofline_reproduces_the_measured_speeds_of_gpt_fast(model, devices, tokens_per_second):
    """README of gpt-fast: A100-80GB, 16 bits, batch 1, a prompt of 5 tokens and 200 new ones."""
    predicted = 1 / time_forward(model, A100.times(devices), rows=1, sequences=1, context=100)
    assert predicted == pytest.approx(tokens_per_second, rel=0.06)


def test_presets_are_found_in_any_spelling():
    for name, key in (("H100", "h100"), ("RTX 4090", "rtx4090"), ("rtx-3090", "rtx3090"), ("4090", "rtx4090"),
                      ("NVIDIA GeForce RTX 3090", "rtx3090"), ("nvidia a100", "a100")):  # fmt: skip
        assert find_hardware(name) is PRESETS[key]
    with pytest.raises(ParameterError, match="did you mean 'h200'"):
        find_hardware("h20")
    assert all(preset.source for preset in PRESETS.values())


@pytest.mark.parametrize("change", [{"bandwidth": 0}, {"flops": float("nan")}, {"reading": 1.5}, {"devices": 0}])
def test_impossible_hardware_is_refused(change):
    with pytest.raises(ParameterError):
        Hardware(**{"name": "x", "bandwidth": 1e9, "flops": 1e12, "memory": 1e9} | change)


def test_a_dense_model_is_memory_bound_below_the_ridge_and_compute_bound_above():
    """Below the ridge rows are almost free; far above it the cost is proportional to rows."""
    model = ModelSize.like_llama(70e9)
    few, many = int(RIDGE * 0.9), int(RIDGE * 4)
    assert time_forward(model, H100, few) == pytest.approx(time_forward(model, H100, 1))
    assert time_forward(model, H100, 2 * many) - H100.overhead == pytest.approx(
        2 * (time_forward(model, H100, many) - H100.overhead)
    )


@pytest.mark.parametrize(("batch", "speedup"), [(128, 1.16), (256, 0.98)])
def test_attention_and_matrix_products_each_read_or_compute(batch, speedup):
    """70B + 8B on 8 x H100 (SXM: 3.35 TB/s at 74 %, 989 TFLOP/s at 60 %), 16-bit weights and cache, 4096 tokens of
    context, K=3, 80 % of the draft tokens accepted. One maximum over both parts would give 1.35 and 1.15: the cache's
    reading would hide the products' computing."""
    pair = MODELS["Llama-3.1-70B"].size, MODELS["Llama-3.1-8B"].size
    predicted = forecast(Rates.constant(0.8), compute_pair_costs(*pair, H100.times(8), batch, 4096), 3)
    assert round(predicted.speedup, 2) == speedup


def test_sequences_read_their_caches_and_more_rows_more_experts_which_verification_pays():
    one = time_forward(LLAMA_7B, A100, 1, 1, 1000)
    eight = time_forward(LLAMA_7B, A100, 8, 8, 1000)
    assert LLAMA_7B.kv_bytes == 2 * 32 * 4096 * 2
    assert eight - one == pytest.approx(7 * 1000 * LLAMA_7B.kv_bytes / (A100.bandwidth * A100.reading))
    # 2 of 8 experts: one row reads two, many rows all eight; the rest is always read once.
    model = MODELS["Mixtral-8x7B"].size
    assert model.weights_read(1) == pytest.approx(model.step)
    shared = model.step - model.mixtures / 4
    assert model.weights_read(2) == pytest.approx(shared + model.mixtures * 7 / 16)
    assert model.weights_read(1000) == pytest.approx(shared + model.mixtures)
    assert LLAMA_7B.weights_read(1000) == LLAMA_7B.step
    mixture, dense = MODELS["Mixtral-8x7B"].size, LLAMA_70B
    eight, one = (make_cost_curve(mixture, H100.times(2))(rows) for rows in (8, 1))
    assert eight / one > 2.5
    eight, one = (make_cost_curve(dense, H100.times(4))(rows) for rows in (8, 1))
    assert eight / one < 1.02


def test_devices_follow_from_memory_read_faster_but_exchange_and_a_small_draft_stays_on_one():
    alone, four = (time_forward(LLAMA_70B, H100.times(n), 1) for n in (1, 4))
    assert alone / 4 < four < alone / 2
    slow = Hardware("PCIe", 1e12, 1e14, 24e9, link=1e9)
    assert time_forward(LLAMA_7B, slow.times(4), 512) > time_forward(LLAMA_7B, slow, 512)
    costs = compute_pair_costs(LLAMA_70B, MODELS["GPT-2"].size, H100.times(8))
    assert costs.draft_devices == 1
    draft = time_forward(MODELS["GPT-2"].size, H100, 1, 1)
    assert costs.c == pytest.approx(draft / costs.target(1))
    assert compute_pair_costs(LLAMA_70B, LLAMA_7B, H100.times(4)).draft_devices == 4
    assert count_devices((LLAMA_7B,), A100) == 1
    assert count_devices((LLAMA_70B, LLAMA_7B), H100) == 4
    assert count_devices((LLAMA_70B.at(4), LLAMA_7B.at(4)), H100) == 1
    assert count_devices((LLAMA_7B,), A100, batch=64, context=4096) == 4
    assert count_devices((ModelSize.like_llama(1e14),), H100) is None


def test_a_size_alone_becomes_a_plausible_shape_and_bits_scale_weights_and_cache():
    seven = ModelSize.like_llama(7e9)
    assert (seven.layers, seven.width) == (33, 33 * 128)
    assert 60 < ModelSize.like_llama(70e9).layers < 90
    small = LLAMA_7B.at(4, 8)
    assert small.weight_bytes == LLAMA_7B.weight_bytes / 4
    assert small.kv_bytes == LLAMA_7B.kv_bytes / 2
    with pytest.raises(ParameterError, match="bits is 0"):
        LLAMA_7B.at(0)


PLAN = Serving(
    MODELS["Llama-3.1-70B"].size, MODELS["Llama-3.1-8B"].size, PRESETS["h100"].times(4),
    Rates.constant(0.8, longest=8), 1024,
)  # fmt: skip


def test_speculation_is_switched_off_for_many_users_where_a_fixed_length_costs_throughput():
    loads = [PLAN.load(batch) for batch in (1, 16, 64, 256, 1024)]
    assert loads[0]["speedup"] > 1.8
    assert loads[-1]["draft_tokens"] == 0
    assert loads[-1]["speedup"] == 1
    assert all(a["draft_tokens"] >= b["draft_tokens"] for a, b in pairwise(loads))
    assert all(load["speedup"] >= 1 for load in loads)
    assert PLAN.load(1024, draft_tokens=4)["speedup"] < 0.8
    load = PLAN.load(16)
    assert load["tokens_per_second"] == pytest.approx(16 * load["tokens_per_second_per_user"])
    assert load["speedup"] == pytest.approx(load["plain_seconds"] / load["seconds"])


def test_users_are_as_many_as_a_bound_if_any_and_memory_beside_the_draft_allow():
    for bound in (0.012, 0.02, 0.03):
        for speculative in (False, True):
            n = PLAN.users(bound, speculative)
            seconds = [PLAN.load(b)["seconds" if speculative else "plain_seconds"] for b in (max(n, 1), n + 1)]
            assert n == 0 or seconds[0] <= bound
            assert seconds[1] > bound or not PLAN.fits(n + 1, speculative)
    assert PLAN.users(0.012) > 0
    assert PLAN.users(0.012, speculative=False) == 0
    assert PLAN.users(1e-6) == 0
    plain, speculative = PLAN.users(None, False), PLAN.users(None, True)
    assert plain > speculative > 0
    assert PLAN.fits(speculative)
    assert not PLAN.fits(speculative + 1)
