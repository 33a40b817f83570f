"""`PagedCache`: keys and values in blocks, of which each sequence owns as many as it needs."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import TargetError

BLOCK = 32
"""Slots in a block; OpenVINO's CPU plugin allows no other size."""


class PagedCache:
    """The KV of every sequence: for each layer two arrays [blocks, Hk, BLOCK, D] float32, and who owns which block.

    Memory is taken from the system when a block is first written, so a large capacity costs address space only;
    the arrays grow by doubling, one layer after another.

    key_columns  lay keys out as [blocks, Hk, D, BLOCK] in memory; `keys` are then views of that, shaped as ever.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, key_columns: bool = False):
        self.shape, self._key_columns = (kv_heads, BLOCK, head_dim), key_columns
        self.block_bytes = 2 * layers * kv_heads * BLOCK * head_dim * 4
        self.tables: dict[int, list[int]] = {}
        self.version = 0  # changes whenever a table does
        self.generation = 0  # changes whenever the arrays do
        self.capacity = 0
        self._free: list[int] = []
        self._used = 0  # blocks ever handed out
        self.keys: list[np.ndarray] = [self._array(0, key_columns) for _ in range(layers)]
        self.values: list[np.ndarray] = [self._array(0) for _ in range(layers)]

    def _array(self, blocks: int, columns: bool = False) -> np.ndarray:
        if not columns:
            return np.empty((blocks, *self.shape), np.float32)
        kv_heads, slots, head_dim = self.shape
        return np.empty((blocks, kv_heads, head_dim, slots), np.float32).transpose(0, 1, 3, 2)

    def reserve(self, seq_id: int, slots: int) -> None:
        """Make sure that a sequence owns blocks for `slots` slots. Raises TargetError where memory is out."""
        table = self.tables.get(seq_id)
        if table is None:
            table = self.tables[seq_id] = []
            self.version += 1
        missing = -(-slots // BLOCK) - len(table)
        if missing <= 0:
            return
        while len(self._free) < missing and self._used < self.capacity:
            self._free.append(self._used)
            self._used += 1
        if len(self._free) < missing:
            self._grow(self.capacity + missing - len(self._free))
            return self.reserve(seq_id, slots)
        table.extend(self._free.pop(0) for _ in range(missing))
        self.version += 1
        return None

    def _grow(self, least: int) -> None:
        """Room for at least `least` blocks, content kept."""
        capacity = max(least, 2 * self.capacity, 16)
        for arrays, columns in ((self.keys, self._key_columns), (self.values, False)):
            for i, old in enumerate(arrays):
                try:
                    new = self._array(capacity, columns)
                except MemoryError as error:
                    raise TargetError(
                        f"no memory for {capacity} KV blocks of {self.block_bytes} bytes: {error}",
                        why="the running sequences do not fit",
                        fix="run fewer or shorter sequences",
                    ) from error
                if self._used:
                    new[: self._used] = old[: self._used]
                arrays[i] = new
        self.capacity = capacity
        self.generation += 1

    def release(self, seq_id: int) -> None:
        """Free the blocks of a sequence; unknown ids are ignored."""
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self._free.extend(table)
            self.version += 1

    def move(self, seq_id: int, src: Seq[int], dst: Seq[int]) -> None:
        """Copy slots `src` of a sequence to `dst` in every layer; all are read before any is written."""
        if not len(src) or list(src) == list(dst):
            return
        from_block, from_slot = self._places(seq_id, src)
        to_block, to_slot = self._places(seq_id, dst)
        for data in (*self.keys, *self.values):  # [blocks, Hk, BLOCK, D]
            data[to_block, :, to_slot] = data[from_block, :, from_slot]

    def read(self, seq_id: int, length: int) -> Tensor:
        """Copy of the first `length` slots of a sequence, [L, 2, Hk, length, D]."""
        block, slot = self._places(seq_id, range(length))
        layers = [
            torch.stack([torch.from_numpy(t[block, :, slot]) for t in pair])  # [2, length, Hk, D]
            for pair in zip(self.keys, self.values, strict=True)
        ]
        return torch.stack(layers).transpose(2, 3).contiguous()

    def slot(self, seq_id: int, slot: int) -> list[np.ndarray]:
        """Copy of one slot: keys of every layer, then values, each [Hk, D]."""
        block, place = self._places(seq_id, (slot,))
        return [t[block[0], :, place[0]].copy() for t in (*self.keys, *self.values)]

    def write(self, seq_id: int, slot: int, content: Seq[np.ndarray]) -> None:
        """Put back what `slot` returned."""
        block, place = self._places(seq_id, (slot,))
        for data, part in zip((*self.keys, *self.values), content, strict=True):
            data[block[0], :, place[0]] = part

    def _places(self, seq_id: int, slots: Seq[int]) -> tuple[np.ndarray, np.ndarray]:
        """Block and place within it of each slot."""
        index = np.asarray(slots, np.int64)
        table = np.asarray(self.tables.get(seq_id, ()), np.int64)
        if index.size and (index.min() < 0 or index.max() >= len(table) * BLOCK):
            raise TargetError(f"sequence {seq_id} holds {len(table) * BLOCK} KV slots, not slot {index.max()}")
        return table[index // BLOCK], index % BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that were ever handed out: what is really in memory."""
        return self._used * self.block_bytes


class Paged:
    """What keeps its KV in a `PagedCache`; see `executor.Executor`."""

    _cache: PagedCache

    def move(self, seq_id: int, src: Seq[int], dst: Seq[int]) -> None:
        self._cache.move(seq_id, src, dst)

    def release(self, seq_id: int) -> None:
        self._cache.release(seq_id)

    def kv(self, seq_id: int, length: int) -> Tensor:
        return self._cache.read(seq_id, length)
