"""Attention over a paged cache against float64."""

import numpy as np
import pytest
from numba import njit

from slipstream.backends.native.kernels import addresses, matrices, records
from slipstream.backends.native.kernels.matrices import attention_scratch, group_rows
from slipstream.backends.native.kernels.memory import address_of
from slipstream.backends.native.threads import pool
from slipstream.kv.blocks import BLOCK

rng = np.random.default_rng(0)


@njit(nogil=True)
def _attend(boards, models, layers, caches, rows, active, starts, q, scratch, out, threads):  # type: ignore[no-untyped-def]
    board, model = boards[0], models[0]
    board.threads = threads
    board.attend.scratch, board.attend.scratch_bytes = address_of(scratch), scratch.shape[1]
    bundles, longest = group_rows(rows[0], active, model.heads // model.kv_heads, starts)
    matrices.attend(
        board, model, layers[0], caches[0], np.int64(0), rows[0], active, starts, bundles, longest, address_of(q),
        q.shape[1], address_of(out), out.shape[1],
    )  # fmt: skip


@njit
def _room(size, width):  # type: ignore[no-untyped-def]
    return attention_scratch(size, width)


class Cache:
    """Keys [L, Hk, D] and values of some sequences; all other slots are NaN."""

    def __init__(self, texts: list[tuple[np.ndarray, np.ndarray]], half: bool = False):
        kv_heads, size = texts[0][0].shape[1:]
        needed = [-(-len(k) // BLOCK) for k, _ in texts]
        kind = np.float16 if half else np.float32
        self.keys = np.full((sum(needed) + 2, kv_heads, size, BLOCK), np.nan, kind)
        self.values = np.full((sum(needed) + 2, kv_heads, BLOCK, size), np.nan, kind)
        free = rng.permutation(sum(needed) + 2)
        self.tables = np.zeros((len(texts), max(needed)), np.int64)
        for table, (k, v), count in zip(self.tables, texts, needed, strict=True):
            table[:count], free = free[:count], free[count:]
            for t in range(len(k)):
                self.keys[table[t // BLOCK], :, :, t % BLOCK] = k[t]
                self.values[table[t // BLOCK], :, t % BLOCK] = v[t]
        self.layers = np.array([[self.keys.ctypes.data, self.values.ctypes.data]])
        self.record = np.zeros(1, records.CACHE)
        record = self.record[0]
        record["layers"], record["tables"], record["stride"] = (
            self.layers.ctypes.data,
            self.tables.ctypes.data,
            max(needed),
        )
        record["slots"], record["half"] = BLOCK, half
        record["scores"], record["mix"] = addresses.attention_tile_addresses(half)


def attend(
    cache: Cache, at: np.ndarray, hidden: np.ndarray, q: np.ndarray, heads: int, window: int = 0, threads: int = 1
) -> np.ndarray:
    """Output [R, H * D] of all rows; q [R, >= H * D]."""
    kv_heads, size = cache.keys.shape[1:3]
    model, layer, rows = (np.zeros(1, kind) for kind in (records.MODEL, records.LAYER, records.ROWS))
    model[0]["heads"], model[0]["kv_heads"], model[0]["size"] = heads, kv_heads, size
    layer[0]["window"] = window
    rows[0]["at"], rows[0]["count"] = at.ctypes.data, len(at)
    rows[0]["hidden"], rows[0]["stride"] = hidden.ctypes.data, hidden.shape[1]
    place = np.arange(len(at))
    out = np.full((len(place), heads * size), np.nan, np.float32)
    width = -(-int(at["length"].max()) // BLOCK) * BLOCK
    scratch = np.empty((2 * pool(threads).size, _room(size, width)), np.uint8)
    starts = np.empty(len(place) + 1, np.int64)
    args = (model, layer, cache.record, rows, place, starts, q, scratch, out)
    pool(threads).run(_attend, *args, threads=threads)
    return out


def rows_of(*given: tuple[int, int, int, int, int]) -> np.ndarray:
    """ROW [R] of (sequence, slot, position, length, past)."""
    at = np.zeros(len(given), records.ROW)
    for row, values in zip(at, given, strict=True):
        for name, value in zip(("sequence", "slot", "position", "length", "past"), values, strict=True):
            row[name] = value
    return at


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, sees: np.ndarray) -> np.ndarray:
    """One query head over the slots that it sees."""
    scores = k[sees] @ q.astype(np.float64) / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights @ v[sees] / weights.sum()


NO_TREE = np.zeros((64, 0), np.bool_)


@pytest.mark.parametrize("size", [16, 48, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (28, 2)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("half", [False, True])
def test_each_row_sees_its_slots_and_no_other(size: int, heads: int, kv_heads: int, threads: int, half: bool) -> None:
    """Two sequences, the second with a tree."""
    texts = [(normal(length, kv_heads, size), normal(length, kv_heads, size)) for length in (70, 37)]
    if half:
        texts = [(k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32)) for k, v in texts]
    hidden = np.zeros((4, 3), np.bool_)
    hidden[2], hidden[3] = (False, True, True), (False, True, False)
    at = rows_of((0, 69, 69, 70, 69), (1, 32, 32, 33, 32), (1, 34, 34, 37, 34), (1, 36, 35, 37, 34))
    q = normal(4, heads * size + 8)
    out = attend(Cache(texts, half), at, hidden, q, heads, threads=threads)
    for a in range(4):
        k, v = texts[at[a]["sequence"]]
        sees = np.arange(len(k)) < at[a]["length"]
        if a > 1:
            sees[34:37] &= ~hidden[a]
        for h in range(heads):
            part, g = slice(h * size, (h + 1) * size), h // (heads // kv_heads)
            assert np.abs(out[a, part] - exact(q[a, part], k[:, g], v[:, g], sees)).max() < 1e-5


@pytest.mark.parametrize("window", [1, 2, 3, 9, 33, 41, 42, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_window_counts_positions(window: int, threads: int) -> None:
    """A prompt of 50 tokens, and two siblings below a root: the second one's slot is not its position."""
    heads, size = 2, 16
    texts = [(normal(length, heads, size), normal(length, heads, size)) for length in (50, 43)]
    position = np.array([*range(50), 40, 41, 41])
    prompt = [(0, n, n, n + 1, 0) for n in range(50)]
    at = rows_of(*prompt, (1, 40, 40, 43, 40), (1, 41, 41, 43, 40), (1, 42, 41, 43, 40))
    hidden = np.zeros((53, 50), np.bool_)
    hidden[50, 1:3], hidden[51, 2], hidden[52, 1] = True, True, True
    q = normal(53, heads * size)
    out = attend(Cache(texts), at, hidden, q, heads, window, threads)
    for a in range(53):
        slots, past = np.arange(at[a]["length"]), at[a]["past"]
        first = 0 if a < 50 else 50  # row of the sequence in this pass
        where = np.where(slots < past, slots, position[np.minimum(slots - past + first, 52)])
        sees = (position[a] - where < window) & ~((slots >= past) & hidden[a, np.maximum(slots - past, 0)])
        k, v = (x[: len(slots)] for x in texts[at[a]["sequence"]])
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            assert np.abs(out[a, part] - exact(q[a, part], k[:, h], v[:, h], sees)).max() < 1e-5
