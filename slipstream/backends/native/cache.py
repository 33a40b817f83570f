"""`PagedCache`: keys and values in blocks, of which each sequence owns as many as it needs."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import TargetError

BLOCK = 32
"""Slots in a block."""


class PagedCache:
    """The KV of every sequence: for each layer keys [blocks, Hk, D, BLOCK] and values [blocks, Hk, BLOCK, D], float32
    or float16, and who owns which block. Of keys all slots are read at once, of values all D.

    Memory is taken from the system when a block is first written, so a large capacity costs address space only;
    the arrays grow by doubling, one layer after another.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: type = np.float32):
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, np.dtype(dtype)
        self.block_bytes = 2 * layers * kv_heads * BLOCK * head_dim * self.dtype.itemsize
        self.tables: dict[int, list[int]] = {}
        self.version = 0  # changes whenever a table does
        self.capacity = 0
        self._free: list[int] = []
        self._used = 0  # blocks ever handed out
        self.keys = [self._array(0, True) for _ in range(layers)]
        self.values = [self._array(0, False) for _ in range(layers)]
        self.addresses = np.zeros((layers, 2), np.int64)

    def _array(self, blocks: int, keys: bool) -> np.ndarray:
        shape = (self.head_dim, BLOCK) if keys else (BLOCK, self.head_dim)
        return np.empty((blocks, self.kv_heads, *shape), self.dtype)

    def reserve(self, seq_id: int, slots: int) -> None:
        """Make sure that a sequence owns blocks for `slots` slots. Raises TargetError where memory is out."""
        table = self.tables.get(seq_id)
        if table is None:
            table = self.tables[seq_id] = []
            self.version += 1
        missing = -(-slots // BLOCK) - len(table)
        if missing <= 0:
            return
        if len(self._free) + self.capacity - self._used < missing:
            self._grow(self._used - len(self._free) + missing)
        while len(self._free) < missing:
            self._free.append(self._used)
            self._used += 1
        taken, self._free = self._free[:missing], self._free[missing:]  # an interrupt from here on leaks, never shares
        table.extend(taken)
        self.version += 1

    def _grow(self, least: int) -> None:
        """Room for at least `least` blocks, content kept."""
        capacity = max(least, 2 * self.capacity, 16)
        for i in range(len(self.keys)):
            for j, arrays in enumerate((self.keys, self.values)):
                try:
                    new = self._array(capacity, arrays is self.keys)
                except MemoryError as error:
                    raise TargetError(
                        f"no memory for {capacity} KV blocks of {self.block_bytes} bytes: {error}",
                        why="the running sequences do not fit",
                        fix="run fewer or shorter sequences",
                    ) from error
                if self._used:
                    new[: self._used] = arrays[i][: self._used]
                arrays[i] = new
                self.addresses[i, j] = new.ctypes.data
        self.capacity = capacity

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
        for data in self.keys:
            data[to_block, :, :, to_slot] = data[from_block, :, :, from_slot]
        for data in self.values:
            data[to_block, :, to_slot] = data[from_block, :, from_slot]

    def read(self, seq_id: int, length: int) -> Tensor:
        """Copy of the first `length` slots of a sequence, float32 [L, 2, Hk, length, D]."""
        block, slot = self._places(seq_id, range(length))
        layers = [
            np.stack([keys[block, :, :, slot], values[block, :, slot]])  # [2, length, Hk, D]
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        return torch.from_numpy(np.stack(layers)).float().transpose(2, 3).contiguous()

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
