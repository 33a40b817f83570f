"""Products with weights in blocks, against a simple model of their arithmetic, bit for bit."""

import itertools

import numpy as np
import pytest
import torch

from slipstream.backends.native.kernels.formats import BLOCKS, Format
from slipstream.models.weight_blocks import READERS, Blocks, Scales, stacked
from tests.backends.native.products import Product, model_of_blocks
from tests.models.gguf_files import SIZES, random_bytes

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 25, 40]


def random_blocks(seed: int, form: Format, outs: int, columns: int) -> Blocks:
    rng = np.random.default_rng(seed)
    low, high, kind = (-128, 128, np.int8) if form.bits == 8 else (0, 16, np.uint8)
    integers = rng.integers(low, high, (outs, columns)).astype(kind)

    def scales() -> Scales:
        values = rng.standard_normal((outs, columns // form.span)).astype(np.float16)
        factors = rng.integers(-128, 128, (outs, columns // form.group)).astype(np.int8)
        return Scales(values, factors if form.span > form.group else None)

    return Blocks(form.bits, form.group, integers, scales(), scales() if form.minima else None)


@pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.name)
@pytest.mark.parametrize(("outs", "spans"), [(1, 1), (63, 2), (65, 3), (130, 18), (200, 5)])
def test_a_product_equals_the_model_of_its_blocks_bit_for_bit(form: Format, outs: int, spans: int) -> None:
    columns = form.span * min(spans, 1024 // form.span)
    rng = np.random.default_rng(2)
    weight, x, bias = (
        random_blocks(1, form, outs, columns),
        rng.standard_normal((40, columns)),
        rng.standard_normal(outs),
    )
    x[5], x[9] = 0, x[9] * 1e-20
    x, bias = x.astype(np.float32), bias.astype(np.float32)
    product, want = Product(weight, bias=torch.from_numpy(bias)), model_of_blocks(weight, x, bias)
    for rows in ROWS:
        assert np.array_equal(product(x[:rows]), want[:rows])
        assert np.array_equal(product(x[-rows:], threads=2), want[-rows:])


@pytest.mark.parametrize(
    ("name", "bits"),
    [("Q4_0", 5), ("Q4_1", 5), ("Q5_1", 9), ("Q8_0", 8.5), ("Q4_K", 4.625), ("Q5_K", 8.625), ("Q6_K", 8.5625)],
)
def test_bits_of_a_weight_in_memory(name: str, bits: float) -> None:
    matrix = Product(READERS[name](random_bytes(name, 64, 512 // SIZES[name][0]))).matrix[0]
    assert 8 * matrix["out_bytes"] / matrix["columns"] == bits


@pytest.mark.parametrize("names", list(itertools.combinations_with_replacement(READERS, 2)), ids="-".join)
def test_matrices_of_two_kinds_are_one_matrix_of_the_same_weights(names: tuple[str, str]) -> None:
    parts = [READERS[name](random_bytes(name, 32, 512 // SIZES[name][0], i, 0.1)) for i, name in enumerate(names)]
    joined, columns = stacked(parts), np.arange(0, 512, 37)
    assert np.array_equal(joined.floats(), np.concatenate([part.floats() for part in parts]))
    output, want = Product(joined)(np.eye(512, dtype=np.float32)[columns]), joined.floats()[:, columns].T
    assert np.allclose(output, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
