"""A layer of a decoder over a paged cache: what a model and the heads that draft for it have in common.

R rows, d width, H query heads, Hk key/value heads, D head size, I inner width, V vocabulary, L layers, B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slipstream.kernels.arithmetic import gated, norm, turn
from slipstream.kernels.attention import attend
from slipstream.kernels.compiled import kernel
from slipstream.kernels.linear import Matrix, multiply


class Model(NamedTuple):
    """RMS norms, rotary positions, gated MLPs with silu."""

    embed: np.ndarray  # [V, d] in panels, of any kind but int8
    norms: np.ndarray  # float32 [2 L + 1, d]: of each layer before attention and before the MLP, then the final one
    inv_freq: np.ndarray  # float64 [D/2]
    turn_scale: float
    eps: np.float32
    heads: int
    windows: np.ndarray  # int64 [L]: see `attention.attend`
    head_norms: np.ndarray  # float32 [2 L, D]: RMS norms of query and of key heads, or empty
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    head: Matrix  # L = 1


class Cache(NamedTuple):
    """Paged keys [blocks, Hk, D, slots] and values [blocks, Hk, slots, D], float32, of each layer, and int64 tables
    [B, blocks] of who owns which block. Of keys, all slots are asked at once; of values, all D."""

    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    tables: np.ndarray


class Rows(NamedTuple):
    """Where R rows stand; int64 [R], but for `hidden`.

    sequence  row of the block tables
    slots     where the row's keys and values go
    position  of its rotation
    length    how many slots it looks at, its own being the last or, in a tree, among the last
    past      slots of its sequence that were there before, ...
    hidden    bool [R, n]: ... and which of those behind it does not see; n = 0 where every row sees its whole length
    """

    sequence: np.ndarray
    slots: np.ndarray
    position: np.ndarray
    length: np.ndarray
    past: np.ndarray
    hidden: np.ndarray


class Room(NamedTuple):
    """Rotations of R rows, cos and sin [R, D/2], and room for what a layer works out, one layer after another."""

    cos: np.ndarray
    sin: np.ndarray
    flat: np.ndarray  # [R, d]
    back: np.ndarray  # [R, padded d]
    qkv: np.ndarray  # [R, padded (H + 2 Hk) * D]
    mixed: np.ndarray  # [R, H * D]
    wide: np.ndarray  # [R, padded 2 I]
    slim: np.ndarray  # [R, I]


@kernel()
def copy(x, out):
    for i in range(out.shape[0]):
        out[i] = x[i]


@kernel()
def add(x, out):
    for i in range(out.shape[0]):
        out[i] += x[i]


@kernel()
def behind(rows, last):
    """One more row of each sequence b, behind its row last[b], which sees all before it."""
    count = last.shape[0]
    slots, position = np.empty(count, np.int64), np.empty(count, np.int64)
    for b in range(count):
        slots[b], position[b] = rows.slots[last[b]] + 1, rows.position[last[b]] + 1
    return Rows(np.arange(count), slots, position, slots + 1, slots, np.empty((count, 0), np.bool_))


@kernel()
def room(model, rows):
    count, size = rows.slots.shape[0], 2 * model.inv_freq.shape[0]
    cos, sin = np.empty((count, size // 2), np.float32), np.empty((count, size // 2), np.float32)
    for r in range(count):
        for j in range(size // 2):
            angle = rows.position[r] * model.inv_freq[j]
            cos[r, j], sin[r, j] = np.cos(angle) * model.turn_scale, np.sin(angle) * model.turn_scale
    return Room(
        cos,
        sin,
        np.empty((count, model.norms.shape[1]), np.float32),
        np.empty((count, model.down.values.shape[1]), np.float32),
        np.empty((count, model.qkv.values.shape[1]), np.float32),
        np.empty((count, model.heads * size), np.float32),
        np.empty((count, model.gate_up.values.shape[1]), np.float32),
        np.empty((count, model.down.values.shape[2]), np.float32),
    )


@kernel(inline="always")
def run_layer(model, cache, rows, layer, flat, going, x, room, threads):
    """What is behind the norm of a layer's input.

    flat [R, n]   what attention reads: keys and values of it go into the cache
    going [A]     increasing: the rows that go on from there; x [R, d], the residual stream, has them in x[:A]
                  afterwards, and x[A:] is lost
    """
    count, size = flat.shape[0], 2 * model.inv_freq.shape[0]
    keys, values = cache.keys[layer], cache.values[layer]
    heads, kv_heads, slots = model.heads, values.shape[1], values.shape[2]
    turned = (heads + kv_heads) * size
    multiply(model.qkv, layer, flat, count, room.qkv, threads)
    for r in range(count):
        row = room.qkv[r]
        for h in range(heads + kv_heads if model.head_norms.shape[0] > 0 else 0):
            own = row[h * size : (h + 1) * size]
            norm(own, model.head_norms[2 * layer if h < heads else 2 * layer + 1], model.eps, own)
        turn(row, heads + kv_heads, size, room.cos[r], room.sin[r])
        block, slot = cache.tables[rows.sequence[r], rows.slots[r] // slots], rows.slots[r] % slots
        for g in range(kv_heads):
            copy(row[(heads + g) * size :], keys[block, g, :, slot])
            copy(row[turned + g * size :], values[block, g, slot])
    on = going.shape[0]
    for a in range(on):
        if going[a] > a:
            copy(x[going[a]], x[a])
    attend(room.qkv, keys, values, cache.tables, rows, going, heads, model.windows[layer], room.mixed, threads)
    multiply(model.o, layer, room.mixed, on, room.back, threads)
    for a in range(on):
        add(room.back[a], x[a])
        norm(x[a], model.norms[2 * layer + 1], model.eps, room.flat[a])
    multiply(model.gate_up, layer, room.flat, on, room.wide, threads)
    for a in range(on):
        gated(room.wide[a], room.slim[a])
    multiply(model.down, layer, room.slim, on, room.back, threads)
    for a in range(on):
        add(room.back[a], x[a])
