"""KV cache in blocks for PyTorch. `TorchBlocks` owns the memory; decoders and heads use it through `TorchPaged`."""

import threading
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.checkpoints.config import DecoderConfig
from slipstream.core.draft import index_rows
from slipstream.errors import TargetError
from slipstream.executor.executor import Batch
from slipstream.kv.blocks import BLOCK
from slipstream.kv.kv_memory import PagedCache, S

SPREAD = 16
"""Number of free blocks between a new sequence and the sequence before it, so that both can grow in consecutive blocks.
Consecutive blocks are read without a copy."""


class TensorBlocks:
    """A `BlockStore` of tensors [..., places, D], without the method `read`. Tensors are initialised with zeros,
    because attention to a masked NaN gives NaN. Place block * BLOCK + i is slot i of a block, so consecutive blocks are
    read without a copy.

    The tensors grow one after another, so that at most one tensor is in memory twice.
    """

    layers: list[Tensor]

    def grow(self, blocks: int) -> None:
        for i, old in enumerate(self.layers):
            *outer, size, dim = old.shape
            if size >= blocks * BLOCK:
                continue  # an interrupted call has already enlarged this tensor
            new = zeros_like_blocks(old, (*outer, blocks * BLOCK, dim), blocks)
            new[..., :size, :] = old
            self.layers[i] = new

    def copy(self, originals: Seq[int], copies: Seq[int]) -> None:
        for layer in self.layers:
            blocks = layer.unflatten(-2, (-1, BLOCK))  # [..., blocks, BLOCK, D]
            blocks[..., list(copies), :, :] = blocks[..., list(originals), :, :]  # the right side is a copy

    def move(self, src: Seq[int], dst: Seq[int]) -> None:
        for layer in self.layers:
            layer[..., list(dst), :] = layer[..., list(src), :]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class TorchBlocks(TensorBlocks):
    """For each layer one tensor [2, Hk, places, D] of keys and values."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device):
        with torch.inference_mode():
            empty = torch.zeros(2, config.kv_heads, 0, config.head_dim, dtype=dtype, device=device)
        self.layers = [empty] * config.layers

    def read(self, places: Seq[int]) -> Tensor:
        return torch.stack([layer[:, :, list(places)] for layer in self.layers])

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [M, Hk, D] of a layer to places [M]. Returns the layer's keys and values, [Hk, places,
        D]."""
        keys, values = self.layers[layer]
        keys.index_copy_(1, places, k.transpose(0, 1))
        values.index_copy_(1, places, v.transpose(0, 1))
        return keys, values

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """Return a copy of n blocks of a layer, in this order, [2, Hk, n * BLOCK, D]."""
        by_block = self.layers[layer].unflatten(2, (-1, BLOCK))  # [2, Hk, blocks, BLOCK, D]
        return by_block.index_select(2, blocks).flatten(2, 3)


def zeros_like_blocks(old: Tensor, shape: Seq[int], blocks: int) -> Tensor:
    """Return zeros of this shape, with the dtype and device of `old`. Raises TargetError if there is not enough memory;
    the error names the number of blocks."""
    try:
        return old.new_zeros(*shape)
    except RuntimeError as error:  # CUDA's out-of-memory error is a subclass
        raise TargetError(
            f"there is no memory for {blocks} KV blocks of {BLOCK} slots: {error}",
            why="the KV cache of the running sequences does not fit into memory",
            fix="run fewer or shorter sequences",
        ) from error


class TorchPaged(PagedCache[S]):
    """A KV cache of tensors, for decoders and heads: see `PagedCache`."""

    def __init__(self, blocks: S, kv_blocks: int | None = None, spread: int = 0, ahead: int = 0):
        self._calls = calls = threading.RLock()  # a lambda with `self` would be a reference cycle
        super().__init__(blocks, lambda: calls, kv_blocks, spread, ahead)

    def _reserve(self, batch: Batch, extra: int = 0) -> list[list[int]]:
        """Reserve the slots of each sequence's rows and `extra` more. Returns their places, now writable."""
        places: list[list[int]] = []
        for b, (seq_id, past) in enumerate(zip(batch.seq_ids, batch.past, strict=True)):
            end = past + batch.splits[b + 1] - batch.splits[b] + extra
            self._pool.reserve(seq_id, past, end)
            places.append(self._pool.places(seq_id, range(past, end)))
        return places

    def _place(self, batch: Batch, b: int, scattered: list[int]) -> tuple[int, bool, int]:
        """Return the number of slots of sequence `b` of a batch after the pass, whether its blocks are consecutive, and
        the place of slot 0; other blocks are added to `scattered`, and slot 0 is a place in the gathered blocks."""
        total = batch.past[b] + batch.splits[b + 1] - batch.splits[b]
        table = self._pool.tables[batch.seq_ids[b]][: -(-total // BLOCK)]
        in_place = isinstance(index_rows(table), slice)
        first = BLOCK * (table[0] if in_place else len(scattered))
        if not in_place:
            scattered += table
        return total, in_place, first
