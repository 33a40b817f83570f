"""What is computed row by row, against float64."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from slipstream.core.dice import invert

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from slipstream.kernels import arithmetic

rng = np.random.default_rng(0)


def test_a_row_is_rounded_to_half_a_unit_and_its_greatest_value_is_kept() -> None:
    x, out = rng.standard_normal(640).astype(np.float32), np.empty(640, np.int16)
    unit = arithmetic.quantise(x, 26000, out)
    assert np.abs(out).max() == 26000
    assert np.abs(x - out * np.float64(unit)).max() <= unit * 0.501
    assert arithmetic.quantise(np.zeros(8, np.float32), 26000, out[:8]) >= 0
    assert not out[:8].any()


@pytest.mark.parametrize("n", [1, 7, 16, 250])
def test_the_greatest_and_the_farthest_value(n: int) -> None:
    x = (rng.standard_normal(300) * 10).astype(np.float32)
    for values in (x, -np.abs(x), np.abs(x), np.full(300, -0.0, np.float32), np.where(x > 9, np.inf, x)):
        values = values.astype(np.float32)
        assert arithmetic.greatest(values, n) == values[:n].max()
        assert arithmetic.farthest(values[:n]) == np.abs(values[:n]).max()
    x[n - 1] = np.nan
    assert np.isnan(arithmetic.farthest(x[:n]))


def test_exponentials() -> None:
    x = -rng.random(2000) * 700
    error = np.array([arithmetic.exp_double(value) for value in x]) / np.exp(x) - 1
    assert np.abs(error).max() < 1e-15
    assert arithmetic.exp_double(0.0) == 1
    assert arithmetic.exp_double(-1e300) == 0
    small = (rng.random(2000).astype(np.float32) - np.float32(0.5)) * 160
    assert np.abs(np.array([arithmetic.exp(value) for value in small]) / np.exp(small) - 1).max() < 1e-6


def test_norm_and_whether_a_row_is_finite() -> None:
    x, weight = rng.standard_normal(96).astype(np.float32), rng.random(96).astype(np.float32)
    out = np.empty(96, np.float32)
    assert arithmetic.norm(x, weight, np.float32(1e-5), out)
    wide = x.astype(np.float64)
    assert np.abs(out - weight * wide / np.sqrt((wide**2).mean() + 1e-5)).max() < 1e-6
    for strange in (np.nan, np.inf, -np.inf):
        x[7] = strange
        assert not arithmetic.norm(x, weight, np.float32(1e-5), out)


def test_gated_is_silu_of_the_gate_times_up() -> None:
    x, out = (rng.standard_normal(128) * 8).astype(np.float32), np.empty(64, np.float32)
    arithmetic.gated(x, out)
    gate, up = torch.from_numpy(x).double().chunk(2)
    assert torch.allclose(torch.from_numpy(out).double(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heat", [1e-3, 1.0, 1.25, 1e30])
def test_a_law_is_the_softmax_in_float64(heat: float) -> None:
    logits, law = (rng.standard_normal(96) * 5).astype(np.float32), np.empty(90)
    arithmetic.softmax(logits, heat, law)
    want = torch.softmax((torch.from_numpy(logits[:90]).double() - float(logits[:90].max())) * heat, -1)
    assert torch.allclose(torch.from_numpy(law), want, rtol=1e-13, atol=1e-300)


def test_the_first_id_whose_cumulated_law_exceeds_u_as_the_host_finds_it() -> None:
    for _ in range(200):
        law = rng.random(50) * (rng.random(50) < 0.4)
        law[7] += 0.1
        law /= law.sum()
        for u in (0.0, rng.random(), 1 - 2.0**-53):
            found = arithmetic.first_above(law, u)
            assert law[found] > 0
            assert found == int(invert(torch.from_numpy(law)[None], torch.tensor([u], dtype=torch.float64)))


def test_of_equal_scores_the_first_wins_and_minus_infinity_forbids() -> None:
    logits, noise = np.zeros(6, np.float32), np.array([-np.inf, 0.0, 3.0, 3.0, 2.0, -1.0])
    assert arithmetic.first_maximum(logits, 1.0, noise) == 2
