"""`NativeBlocks`: the memory of the native KV cache. `kv.blocks` decides which sequence owns which block."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.kv.blocks import BLOCK


class NativeBlocks:
    """A `BlockStore`: for each layer keys [blocks, Hk, D, BLOCK] and values [blocks, Hk, BLOCK, D], float32 or float16.
    The kernels read all slots of a key dimension at once, and all D of a value slot.

    block_bytes  bytes of one block in all layers.

    The system allocates memory when a block is first written, so a large capacity costs only address space.
    The arrays grow one layer after another. A place is block * BLOCK + slot in the block (`BlockPool.places`).
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: type = np.float32):
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, np.dtype(dtype)
        self.block_bytes = 2 * layers * kv_heads * BLOCK * head_dim * self.dtype.itemsize
        self.keys: list[np.ndarray] = [np.empty((0, kv_heads, head_dim, BLOCK), dtype)] * layers
        self.values: list[np.ndarray] = [np.empty((0, kv_heads, BLOCK, head_dim), dtype)] * layers
        self._addresses = np.zeros((layers, 2), np.int64)
        self._moved = True

    def addresses(self) -> np.ndarray:
        """int64 [L, 2]: addresses of each layer's keys and values. Every call returns the same array."""
        if self._moved:
            for i, arrays in enumerate(zip(self.keys, self.values, strict=True)):
                self._addresses[i] = [array.ctypes.data for array in arrays]
            self._moved = False
        return self._addresses

    def grow(self, blocks: int) -> None:
        """Make room for `blocks` blocks and keep the content. Raises TargetError if there is not enough memory."""
        self._moved = True  # set first: an interrupt may leave only some arrays replaced
        for i in range(len(self.keys)):
            for arrays in (self.keys, self.values):
                old = arrays[i]
                if len(old) >= blocks:
                    continue  # already grown by an interrupted call
                try:
                    new = np.empty((blocks, *old.shape[1:]), self.dtype)
                except MemoryError as error:
                    raise TargetError(
                        f"no memory for {blocks} KV blocks of {self.block_bytes} bytes: {error}",
                        why="the running sequences do not fit",
                        fix="run fewer or shorter sequences",
                    ) from error
                new[: len(old)] = old
                arrays[i] = new

    def copy(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy whole blocks, in every layer."""
        for data in (*self.keys, *self.values):
            data[list(targets)] = data[list(sources)]

    def move(self, src: Seq[int], dst: Seq[int]) -> None:
        """Copy places `src` to `dst` in every layer. All places are read before any is written."""
        from_block, from_slot = np.divmod(np.asarray(src, np.int64), BLOCK)
        to_block, to_slot = np.divmod(np.asarray(dst, np.int64), BLOCK)
        for data in self.keys:
            data[to_block, :, :, to_slot] = data[from_block, :, :, from_slot]
        for data in self.values:
            data[to_block, :, to_slot] = data[from_block, :, from_slot]

    def read(self, places: Seq[int]) -> Tensor:
        """Return a copy of these places, float32 [L, 2, Hk, places, D]."""
        block, slot = np.divmod(np.asarray(places, np.int64), BLOCK)
        layers = [
            np.stack([keys[block, :, :, slot], values[block, :, slot]])  # [2, places, Hk, D]
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        return torch.from_numpy(np.stack(layers)).float().transpose(2, 3).contiguous()
