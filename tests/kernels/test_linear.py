"""Matrices in every way that weights are kept: against arithmetic that is exact, or in twice the precision."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from numba import njit

from slipstream.kernels import linear
from slipstream.kernels.linear import Matrix, look_up, multiply
from slipstream.targets.decoder.native_weights import bits_of

rng = np.random.default_rng(0)


@njit
def product(matrix, layer, x, rows, y, threads):  # type: ignore[no-untyped-def]
    multiply(matrix, layer, x, rows, y, threads)


def multiplied(matrix: Matrix, layer: int, x: np.ndarray, threads: int = 1) -> np.ndarray:
    y = np.full((len(x), matrix.values.shape[1]), np.nan, np.float32)
    product(matrix, layer, x, len(x), y, threads)
    return y


def floats(weights: Tensor, dtype: torch.dtype) -> Matrix:
    """weights [L, out, in]"""
    values = np.stack([linear.panels(bits_of(dtype)(each)) for each in weights])
    return Matrix(values, np.empty((0, 0), np.float32), 0)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 11, 12, 31])
@pytest.mark.parametrize("threads", [1, 2])
def test_weights_of_16_bits_are_used_as_they_are_and_products_summed_in_float32(
    dtype: torch.dtype, rows: int, threads: int
) -> None:
    weights = torch.from_numpy(rng.standard_normal((2, 90, 48))).to(dtype)
    x = rng.standard_normal((rows, 48)).astype(np.float32)
    y = multiplied(floats(weights.float(), dtype), 1, x, threads)
    exact = weights[1].double().numpy().T
    want, size = x.astype(np.float64) @ exact, np.abs(x.astype(np.float64)) @ np.abs(exact)
    assert bool((np.abs(y[:, :90] - want) <= 48 * 2.0**-24 * size).all())  # Higham 2002, section 3.1
    assert not y[:, 90:].any()  # what fills up


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_comes_out_the_same_bit_for_bit_in_any_company(dtype: torch.dtype) -> None:
    matrix = floats(torch.from_numpy(rng.standard_normal((1, 200, 64))).float(), dtype)
    x = rng.standard_normal((40, 64)).astype(np.float32)
    alone = np.concatenate([multiplied(matrix, 0, x[r : r + 1]) for r in range(40)])
    for rows in (2, 4, 6, 8, 9, 12, 17, 40):
        for threads in (1, 2):
            assert np.array_equal(multiplied(matrix, 0, x[:rows], threads), alone[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_embedding_in_panels(dtype: torch.dtype) -> None:
    table = torch.from_numpy(rng.standard_normal((70, 24))).to(dtype).float()
    x = np.empty((4, 24), np.float32)
    look_up(linear.panels(bits_of(dtype)(table)), np.array([0, 69, 16, 15]), x)
    assert np.array_equal(x, table[[0, 69, 16, 15]].numpy())


def test_every_value_of_16_bits_is_widened_exactly() -> None:
    """Denormal and greatest numbers, too."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(2**16).to(torch.uint16).view(dtype)
        every = every[torch.isfinite(every)].float()
        every = every[: len(every) // 16 * 16].reshape(-1, 16)
        x = np.empty(every.shape, np.float32)
        look_up(linear.panels(bits_of(dtype)(every)), np.arange(len(every)), x)
        assert np.array_equal(x, every.numpy())


def quantised(rows: int, columns: int) -> Matrix:
    values = rng.integers(-127, 128, (2, rows, columns)).astype(np.int8)
    return linear.rounded(values, rng.random((2, rows)).astype(np.float32))


@pytest.mark.parametrize("columns", [32, 256, 544, 2048])
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_sums_of_int8_are_the_exact_integers(rows: int, columns: int) -> None:
    matrix = quantised(12, columns)
    x = rng.integers(-matrix.most, matrix.most + 1, (rows, columns)).astype(np.int16)
    y = np.empty((rows, 64), np.int32)
    linear._integers(matrix.values, 1, x, rows, y, 0, 64)
    assert np.array_equal(y, x.astype(np.int64) @ matrix.values[1].T.astype(np.int64))


@pytest.mark.parametrize("columns", [32, 512, 544, 8192])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_greatest_sum_of_int8_does_not_overflow(columns: int, sign: int) -> None:
    matrix = linear.rounded(np.full((1, 4, columns), 127, np.int8), np.ones((1, 4), np.float32))
    x, y = np.full((1, columns), sign * matrix.most, np.int16), np.empty((1, 64), np.int32)
    linear._integers(matrix.values, 0, x, 1, y, 0, 64)
    assert y[0, :4].tolist() == [sign * matrix.most * 127 * columns] * 4


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_int8_is_the_product_with_the_rounded_weights(rows: int) -> None:
    matrix = quantised(100, 640)
    x = rng.standard_normal((rows, 640)).astype(np.float32)
    want = x.astype(np.float64) @ (matrix.values[1] * matrix.scale[1][:, None].astype(np.float64)).T
    got = multiplied(matrix, 1, x)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    assert all(np.array_equal(got[r], multiplied(matrix, 1, x[r : r + 1])[0]) for r in range(rows))
