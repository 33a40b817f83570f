"""Products with weights in blocks, against a simple model of their arithmetic, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.backends.native.kernels.formats import BLOCKS, Format
from slipstream.models.weight_blocks import Blocks
from tests.backends.native.products import Product, model_of_blocks

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 25, 40]


def random_blocks(seed: int, form: Format, outs: int, columns: int) -> Blocks:
    rng = np.random.default_rng(seed)
    low, high, kind = (-128, 128, np.int8) if form.bits == 8 else (0, 16, np.uint8)
    integers = rng.integers(low, high, (outs, columns)).astype(kind)
    scales, minima = rng.standard_normal((2, outs, columns // form.group)).astype(f"f{form.scales // 8}")
    return Blocks(form.bits, form.group, integers, scales, minima if form.minima else None)


@pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.name)
@pytest.mark.parametrize(("outs", "columns"), [(1, 32), (63, 64), (65, 96), (130, 576), (200, 160)])
def test_a_product_equals_the_model_of_its_blocks_bit_for_bit(form: Format, outs: int, columns: int) -> None:
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
