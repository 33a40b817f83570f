"""Attention over a paged cache against float64."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from slipstream.kernels.attention import attend
from slipstream.kernels.layer import Rows
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


@pytest.mark.parametrize("window", [1, 2, 3, 9, 33, 41, 42, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_window_counts_positions(window: int, threads: int) -> None:
    """A prompt of 50 tokens, and two siblings behind a root: the second one's slot is not its position."""
    heads, size, place = 2, 16, np.arange(53)
    keys = rng.standard_normal((4, heads, size, BLOCK)).astype(np.float32)
    values = rng.standard_normal((4, heads, BLOCK, size)).astype(np.float32)
    tables, past = np.array([[3, 1], [0, 2]]), np.array([0] * 50 + [40] * 3)
    position = np.array([*range(50), 40, 41, 41])
    hidden = np.zeros((53, 50), np.bool_)
    hidden[50, 1:3], hidden[51, 2], hidden[52, 1] = True, True, True
    slots = np.array([*range(50), 40, 41, 42])
    rows = Rows(np.array([0] * 50 + [1] * 3), slots, position, np.array([*range(1, 51), 43, 43, 43]), past, hidden)
    q, out = rng.standard_normal((53, heads * size)).astype(np.float32), np.empty((53, heads * size), np.float32)
    attend(q, keys, values, tables, rows, place, heads, window, out, threads)
    for a in range(53):
        at = np.arange(rows.length[a])
        where = np.where(at < past[a], at, position[np.minimum(at - past[a] + (50 if a >= 50 else 0), 52)])
        sees = (position[a] - where < window) & ~((at >= past[a]) & hidden[a, np.maximum(at - past[a], 0)])
        blocks = tables[rows.sequence[a]][at // BLOCK]
        for h in range(heads):
            k, v = keys[blocks, h, :, at % BLOCK][sees], values[blocks, h, at % BLOCK][sees]
            weights = np.exp(k @ q[a, h * size : (h + 1) * size].astype(np.float64) / np.sqrt(size))
            want = weights @ v / weights.sum()
            assert np.abs(out[a, h * size : (h + 1) * size] - want).max() < 1e-5


def test_a_row_is_the_same_bit_for_bit_whatever_rows_are_beside_it() -> None:
    keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 32, BLOCK), (3, 2, BLOCK, 32)))
    one, tables = np.arange(60, 77), np.array([[2, 0, 1]])
    rows = Rows(np.zeros(17, np.int64), one, one, one + 1, np.full(17, 60), np.zeros((17, 0), np.bool_))
    q, out = rng.standard_normal((17, 6 * 32)).astype(np.float32), np.empty((17, 6 * 32), np.float32)
    attend(q, keys, values, tables, rows, np.arange(17), 6, 0, out, 2)
    for a in range(17):
        alone = np.empty((1, 6 * 32), np.float32)
        attend(q, keys, values, tables, rows, np.array([a]), 6, 0, alone, 1)
        assert np.array_equal(alone[0], out[a])
