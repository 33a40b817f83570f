"""Attention over a paged cache against float64."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from slipstream.kernels.attention import attend
from slipstream.kernels.decoder import Rows
from slipstream.targets.decoder.paged_cache import BLOCK

rng = np.random.default_rng(0)


@pytest.mark.parametrize("size", [16, 48, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (28, 2)])
@pytest.mark.parametrize("threads", [1, 2])
def test_each_row_sees_its_slots_and_no_other(size: int, heads: int, kv_heads: int, threads: int) -> None:
    """Two sequences, the second with a tree; what lies in no slot that is seen is NaN."""
    keys = np.full((9, kv_heads, size, BLOCK), np.nan, np.float32)
    values = np.full((9, kv_heads, BLOCK, size), np.nan, np.float32)
    tables, lengths = np.array([[4, 0, 7], [2, 8, 0]]), (70, 37)
    held = []
    for table, length in zip(tables, lengths, strict=True):
        k, v = (rng.standard_normal((length, kv_heads, size)).astype(np.float32) for _ in range(2))
        for t in range(length):
            block, slot = table[t // BLOCK], t % BLOCK
            keys[block, :, :, slot], values[block, :, slot] = k[t], v[t]
        held.append((k, v))
    hidden = np.zeros((4, 3), np.bool_)
    hidden[2], hidden[3] = (False, True, True), (False, True, False)
    length = np.array([70, 33, 37, 37])
    rows = Rows(np.array([0, 0, 1, 1]), length - 1, length - 1, length, np.array([69, 32, 34, 34]), hidden)
    q = rng.standard_normal((4, heads * size + 8)).astype(np.float32)
    place, out = np.array([0, 1, 2, 3]), np.empty((4, heads * size), np.float32)
    attend(q, keys, values, tables, rows, place, heads, 0, out, threads)
    for a in range(4):
        k, v = held[rows.sequence[a]]
        sees = np.arange(len(k)) < length[a]
        if a > 1:
            sees[34:37] &= ~hidden[a]
        for h in range(heads):
            g = h // (heads // kv_heads)
            own = q[a, h * size : (h + 1) * size].astype(np.float64)
            weights = np.exp(k[sees, g] @ own / np.sqrt(size))
            want = weights @ v[sees, g] / weights.sum()
            assert np.abs(out[a, h * size : (h + 1) * size] - want).max() < 1e-5


def test_only_the_rows_that_go_on_are_computed() -> None:
    keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 1, 16, BLOCK), (1, 1, BLOCK, 16)))
    one = np.array([1, 2, 3])
    rows = Rows(np.zeros(3, np.int64), one - 1, one - 1, one, np.zeros(3, np.int64), np.zeros((3, 0), np.bool_))
    q, whole, part = rng.standard_normal((3, 16)).astype(np.float32), *np.empty((2, 3, 16), np.float32)
    attend(q, keys, values, np.zeros((1, 1), np.int64), rows, np.arange(3), 1, 0, whole, 1)
    attend(q, keys, values, np.zeros((1, 1), np.int64), rows, np.array([2]), 1, 0, part, 1)
    assert np.array_equal(part[0], whole[2])
