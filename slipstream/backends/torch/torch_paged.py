"""KV in blocks for PyTorch: the memory (`TorchBlocks`), and what a decoder and a head do with it (`TorchPaged`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.kv.blocks import BLOCK, BlockPool
from slipstream.models.config import DecoderConfig
from slipstream.models.executor import Batch


class TorchBlocks:
    """A `BlockStore`: for each layer one tensor [2, Hk, places, D] of keys and values, zeros at first, because a masked
    NaN is a NaN. Place block * BLOCK + i is slot i of a block, so consecutive blocks are read without a copy.

    The tensors grow one layer after another, so that no more than one layer is in memory twice.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device):
        empty = torch.zeros(2, config.kv_heads, 0, config.head_dim, dtype=dtype, device=device)
        self.layers = [empty] * config.layers

    def grow(self, blocks: int) -> None:
        """Room for `blocks` blocks, content kept. Raises TargetError where memory is out."""
        for i, old in enumerate(self.layers):
            kinds, heads, held, dim = old.shape
            if held >= blocks * BLOCK:
                continue  # grown by a call that was interrupted later
            try:
                new = old.new_zeros(kinds, heads, blocks * BLOCK, dim)
            except RuntimeError as error:  # CUDA's is a kind of it
                raise TargetError(
                    f"no memory for {blocks} KV blocks of {BLOCK} slots: {error}",
                    why="the running sequences do not fit",
                    fix="run fewer or shorter sequences",
                ) from error
            new[:, :, :held] = old
            self.layers[i] = new

    def copy(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy whole blocks, in every layer."""
        for layer in self.layers:
            blocks = layer.unflatten(2, (-1, BLOCK))  # [2, Hk, blocks, BLOCK, D]
            blocks[:, :, list(targets)] = blocks[:, :, list(sources)]  # the right side is a copy

    def move(self, src: Seq[int], dst: Seq[int]) -> None:
        """Copy places `src` to `dst` in every layer; all are read before any is written."""
        for layer in self.layers:
            layer[:, :, list(dst)] = layer[:, :, list(src)]

    def read(self, places: Seq[int]) -> Tensor:
        """Copy of these places, [L, 2, Hk, places, D]."""
        return torch.stack([layer[:, :, list(places)] for layer in self.layers])

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [M, Hk, D] of a layer to places [M]; returns all of its own, [Hk, places, D] each."""
        keys, values = self.layers[layer]
        keys.index_copy_(1, places, k.transpose(0, 1))
        values.index_copy_(1, places, v.transpose(0, 1))
        return keys, values

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """Copy of n blocks of a layer, in this order, [2, Hk, n * BLOCK, D]."""
        held = self.layers[layer].unflatten(2, (-1, BLOCK))  # [2, Hk, blocks, BLOCK, D]
        return held.index_select(2, blocks).flatten(2, 3)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def consecutive(blocks: Seq[int]) -> bool:
    """Whether these blocks follow each other, so that they can be read where they are."""
    return all(b == a + 1 for a, b in pairwise(blocks))


class TorchPaged:
    """KV of sequences in blocks. Calls of several Python threads take turns.

    kv_blocks  most blocks of KV for all sequences together; None: as many as memory holds.
    spread     see `BlockPool`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        kv_blocks: int | None = None,
        spread: int = 0,
    ):
        with torch.inference_mode():
            self._blocks = TorchBlocks(config, dtype, device)
        self._pool = BlockPool(self._blocks, kv_blocks, spread=spread)
        self._calls = threading.RLock()

    def _reserve(self, batch: Batch, extra: int = 0) -> list[list[int]]:
        """For each sequence the places of its rows, and of `extra` slots behind them; all may then be written."""
        places: list[list[int]] = []
        for b, (seq_id, past) in enumerate(zip(batch.seq_ids, batch.past, strict=True)):
            end = past + batch.splits[b + 1] - batch.splits[b] + extra
            self._pool.reserve(seq_id, past, end)
            places.append(self._pool.places(seq_id, range(past, end)))
        return places

    @torch.inference_mode()
    def move(self, seq_id: int, src: Seq[int], dst: Seq[int]) -> None:
        with self._calls:
            self._blocks.move(*self._pool.moves(seq_id, src, dst))

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        with self._calls:
            self._pool.fork(parent_id, child_id, length)

    def release(self, seq_id: int) -> None:
        with self._calls:
            self._pool.release(seq_id)

    def kv(self, seq_id: int, length: int) -> Tensor:
        with self._calls:
            return self._blocks.read(self._pool.first(seq_id, length))
