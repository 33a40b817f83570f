"""The parts of the chain kernel against arithmetic that is exact, or in twice the precision."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from slipstream.core.dice import invert

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from slipstream.kernels import chain

rng = np.random.default_rng(0)


def quantised(rows: int, columns: int) -> chain.Matrix:
    values = rng.integers(-127, 128, (2, rows, columns)).astype(np.int8)
    return chain.matrix(values, rng.random((2, rows)).astype(np.float32))


@pytest.mark.parametrize("columns", [32, 256, 544, 2048])
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_products_are_the_exact_integers(rows: int, columns: int) -> None:
    matrix = quantised(12, columns)
    x = rng.integers(-matrix.most, matrix.most + 1, (rows, columns)).astype(np.int16)
    unit, y = np.ones(rows, np.float32), np.empty((rows, 12), np.float32)
    chain._multiply(matrix._replace(scale=np.ones_like(matrix.scale)), 1, x.reshape(-1), unit, rows, y)
    assert np.array_equal(y, (x.astype(np.int64) @ matrix.values[1].T.astype(np.int64)).astype(np.float32))


@pytest.mark.parametrize("columns", [32, 512, 544, 8192])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_greatest_sum_does_not_overflow(columns: int, sign: int) -> None:
    matrix = chain.matrix(np.full((1, 4, columns), 127, np.int8), np.ones((1, 4), np.float32))
    x, y = np.full(columns, sign * matrix.most, np.int16), np.empty((1, 4), np.float32)
    chain._multiply(matrix, 0, x, np.ones(1, np.float32), 1, y)
    assert y.tolist() == [[np.float32(sign * matrix.most * 127 * columns)] * 4]


def test_a_row_is_rounded_to_half_a_unit_and_its_greatest_value_is_kept() -> None:
    x, out = rng.standard_normal(640).astype(np.float32), np.empty(640, np.int16)
    unit = chain._quantise(x, 26000, out)
    assert np.abs(out).max() == 26000
    assert np.abs(x - out * np.float64(unit)).max() <= unit * 0.501
    assert chain._quantise(np.zeros(8, np.float32), 26000, out[:8]) >= 0
    assert not out[:8].any()


def test_exponentials() -> None:
    x = -rng.random(2000) * 700
    error = np.array([chain._exp_double(value) for value in x]) / np.exp(x) - 1
    assert np.abs(error).max() < 1e-15
    assert chain._exp_double(0.0) == 1
    assert chain._exp_double(-1e300) == 0
    small = (rng.random(2000).astype(np.float32) - np.float32(0.5)) * 160
    assert np.abs(np.array([chain._exp(value) for value in small]) / np.exp(small) - 1).max() < 1e-6


@pytest.mark.parametrize("heat", [1e-3, 1.0, 1.25, 1e30])
def test_a_law_is_the_softmax_in_float64(heat: float) -> None:
    logits, law = (rng.standard_normal(96) * 5).astype(np.float32), np.empty(90)
    chain._law(logits, heat, law)
    want = torch.softmax((torch.from_numpy(logits[:90]).double() - float(logits[:90].max())) * heat, -1)
    assert torch.allclose(torch.from_numpy(law), want, rtol=1e-13, atol=1e-300)


def test_the_first_id_whose_cumulated_law_exceeds_u_as_the_host_finds_it() -> None:
    for _ in range(200):
        law = rng.random(50) * (rng.random(50) < 0.4)
        law[7] += 0.1
        law /= law.sum()
        for u in (0.0, rng.random(), 1 - 2.0**-53):
            found = chain._first_above(law, u)
            assert law[found] > 0
            assert found == int(invert(torch.from_numpy(law)[None], torch.tensor([u], dtype=torch.float64)))


def test_of_equal_scores_the_first_wins_and_minus_infinity_forbids() -> None:
    logits, noise = np.zeros(6, np.float32), np.array([-np.inf, 0.0, 3.0, 3.0, 2.0, -1.0])
    assert chain._first_maximum(logits, 1.0, noise) == 2
