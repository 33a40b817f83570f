"""Matrix products in every format, against simple models of their arithmetic: bit for bit where the order is fixed."""

import numpy as np
import pytest
import torch

from slipstream.backends.native.native_backend import MOST_COLUMNS
from tests.backends.native.models import needs_bfloat16
from tests.backends.native.products import ROWS, Product, as_bfloat16, model

EXACT = ["float32", "float16", "bfloat16", "int8_pairs", "int8_quads", "int8_quads_twice"]
INTEGERS = EXACT[3:]
ALL = [*EXACT, pytest.param("bfloat16_pairs", marks=needs_bfloat16)]


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(seed: int, outs: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(random(seed, outs, columns))


@pytest.mark.parametrize("form", EXACT)
@pytest.mark.parametrize(("outs", "columns"), [(1, 1), (63, 66), (64, 64), (65, 127), (130, 3), (200, 193)])
def test_a_product_equals_the_model_of_its_format_bit_for_bit(form: str, outs: int, columns: int) -> None:
    weight, x, bias = weights(1, outs, columns), random(2, 40, columns), random(3, outs)
    x[5], x[9] = 0, x[9] * 1e-20
    x[11] *= np.float32(1e20)
    product, want = Product(weight, form, torch.from_numpy(bias)), model(form, weight, x, bias)
    for rows in ROWS:
        assert np.array_equal(product(x[:rows]), want[:rows])
        assert np.array_equal(product(x[-rows:]), want[-rows:])


@pytest.mark.parametrize("form", EXACT)
def test_a_product_is_added_in_one_more_float32_sum(form: str) -> None:
    weight, x, onto = weights(4, 100, 70), random(5, 6, 70), random(6, 6, 100)
    bias = random(7, 100)
    want = onto + model(form, weight, x, bias)
    assert np.array_equal(Product(weight, form, torch.from_numpy(bias))(x, onto=onto), want)


@pytest.mark.parametrize("form", INTEGERS)
@pytest.mark.parametrize("columns", [14336, 14337, 28673])
def test_long_sums_of_integers_are_exact(form: str, columns: int) -> None:
    weight, x = weights(8, 70, columns), random(9, 13, columns)
    want, product = model(form, weight, x, np.zeros(70, np.float32)), Product(weight, form)
    for rows in (1, 2, 13):
        assert np.array_equal(product(x[:rows]), want[:rows])


@pytest.mark.parametrize("form", INTEGERS)
@pytest.mark.parametrize("columns", [64, 14336, MOST_COLUMNS])
def test_the_largest_sum_of_integers_does_not_overflow(form: str, columns: int) -> None:
    weight = torch.ones(4, columns)
    weight[1] = -1
    weight[2, ::2] = -1
    x = np.ones((3, columns), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    want = model(form, weight, x, np.zeros(4, np.float32))
    assert np.array_equal(Product(weight, form)(x), want)
    exact = x.astype(np.float64) @ weight.numpy().T
    assert np.abs(want - exact).max() <= 1e-5 * columns


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize(("outs", "columns"), [(130, 96), (400, 257), (1000, 70)])
def test_a_row_is_the_same_bit_for_bit_for_any_batch_and_number_of_threads(form: str, outs: int, columns: int) -> None:
    product, x = Product(weights(10, outs, columns), form), random(11, 120, columns)
    alone = np.concatenate([product(x[r : r + 1]) for r in range(120)])
    for rows in (2, 3, 4, 6, 8, 9, 12, 13, 17, 40, 49, 97, 120):
        for threads in (1, 2, 3, 5):
            assert np.array_equal(product(x[:rows], threads), alone[:rows])


@pytest.mark.parametrize("form", ["float16", "bfloat16"])
def test_every_value_of_16_bits_is_converted_exactly(form: str) -> None:
    """Denormal and largest numbers, too."""
    every = torch.arange(2**16).to(torch.uint16).view(getattr(torch, form))
    every = every[torch.isfinite(every)].float()
    table = every[: len(every) // 8 * 8].reshape(-1, 8)
    output = Product(table, form)(np.eye(8, dtype=np.float32))
    assert np.array_equal(output, table.numpy().T)


@needs_bfloat16
@pytest.mark.parametrize(("outs", "columns"), [(1, 1), (63, 66), (130, 3), (70, 127), (65, 4096)])
def test_products_of_bfloat16_round_both_factors_and_sum_in_float32(outs: int, columns: int) -> None:
    """Each product of two bfloat16 numbers is exact in float32, so sums alone have rounding errors."""
    weight, x = weights(14, outs, columns), random(15, 40, columns)
    product = Product(weight, "bfloat16_pairs")
    w, rows = as_bfloat16(weight.numpy()).astype(np.float64), as_bfloat16(x).astype(np.float64)
    for count in ROWS:
        bound = (columns + 1) * 2.0**-24 * (np.abs(rows[:count]) @ np.abs(w.T)) + 1e-37
        assert bool((np.abs(product(x[:count]) - rows[:count] @ w.T) <= bound).all())


@needs_bfloat16
def test_products_of_bfloat16_are_exact_where_the_sums_are() -> None:
    rng = np.random.default_rng(16)
    w, x = rng.integers(-15, 16, (70, 301)), rng.integers(-15, 16, (23, 301))
    product = Product(torch.from_numpy(w).float() / 8, "bfloat16_pairs")
    assert np.array_equal(product(x.astype(np.float32) * 4), (x @ w.T / 2).astype(np.float32))


@needs_bfloat16
def test_activations_are_rounded_to_the_nearest_bfloat16_ties_to_even() -> None:
    x = np.array([1, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8, 3e38, 1e-30], np.float32)
    assert np.array_equal(Product(torch.eye(7), "bfloat16_pairs")(x[None])[0], as_bfloat16(x))


@pytest.mark.parametrize("form", ALL)
def test_a_row_that_is_not_finite_does_not_change_other_rows(form: str) -> None:
    product, x = Product(weights(19, 70, 130), form), random(20, 9, 130)
    want = product(x)
    for strange in (np.nan, np.inf, -np.inf):
        x[4, 77] = strange
        output = product(x)
        assert not np.isfinite(output[4]).any()
        assert np.array_equal(np.delete(output, 4, 0), np.delete(want, 4, 0))


def test_activations_halfway_between_two_integers_are_rounded_up() -> None:
    x = np.repeat(np.arange(-8, 8, dtype=np.float32) + np.float32(0.5), 8)[None]  # two groups
    x[:, ::64] = [127, -127]
    output = Product(torch.eye(128), "int8_quads")(x)[0]
    assert np.abs(output - np.floor(x[0] + 0.5)).max() < 1e-4
