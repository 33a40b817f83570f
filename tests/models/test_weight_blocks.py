"""Blocks of GGUF files are read exactly as the package gguf reads them."""

import numpy as np
import pytest

from slipstream.models.weight_blocks import READERS, stacked
from tests.models.random_blocks import SIZES, random_bytes


@pytest.mark.parametrize("name", READERS)
def test_blocks_hold_the_weights_of_the_file_exactly(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    raw = random_bytes(name, 7, 3)
    found = READERS[name](raw)
    want = gguf.quants.dequantize(raw.reshape(7, -1), gguf.GGMLQuantizationType[name])
    assert found.shape == want.shape
    assert np.allclose(found.floats(), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    assert found.integers.min() >= (0 if found.bits == 4 else -128)
    assert found.integers.max() < (16 if found.bits == 4 else 128)
    assert found.scales.floats(found.group, want.shape[1]).shape == (7, want.shape[1] // found.group)


def test_stacked_matrices_hold_the_same_weights() -> None:
    for names in (("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q4_1", "Q8_0"), ("Q8_0", "Q5_0")):
        parts = [READERS[name](random_bytes(name, 4, 512 // SIZES[name][0], seed)) for seed, name in enumerate(names)]
        assert np.array_equal(stacked(parts).floats(), np.concatenate([part.floats() for part in parts]))
