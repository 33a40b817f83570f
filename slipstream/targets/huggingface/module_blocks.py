"""The KV cache of packed passes: blocks of tensors for each layer, and the cache that transformers writes to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from slipstream.backends.torch.torch_paged import zeros_like_blocks
from slipstream.errors import TargetError
from slipstream.kv.blocks import BLOCK
from slipstream.targets.huggingface.packed_pass import current_pass


class ModuleBlocks:
    """A `CacheStore`: for each layer one tensor of keys [Hk, places, D] and one of values [Hv, places, Dv], made when
    the layer first writes: heads and widths may differ between layers, and between keys and values."""

    def __init__(self, layers: int):
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._blocks = 0

    def grow(self, blocks: int) -> None:
        for i, layer in enumerate(self.layers):
            if layer is None or layer[0].shape[1] >= blocks * BLOCK:
                continue
            grown = [zeros_like_blocks(old, (old.shape[0], blocks * BLOCK, old.shape[2]), blocks) for old in layer]
            for old, new in zip(layer, grown, strict=True):
                new[:, : old.shape[1]] = old
            self.layers[i] = (grown[0], grown[1])
        self._blocks = blocks

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys [Hk, M, D] and values [Hv, M, Dv] to places [M]; returns all of the layer's."""
        stored = self.layers[layer]
        if stored is None:
            keys, values = (
                zeros_like_blocks(x, (x.shape[0], self._blocks * BLOCK, x.shape[2]), self._blocks) for x in (k, v)
            )
            stored = self.layers[layer] = (keys, values)
        keys, values = stored
        places = places.to(keys.device)
        keys.index_copy_(1, places, k)
        values.index_copy_(1, places, v)
        return keys, values

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of n blocks of a layer, in this order: keys [Hk, n * BLOCK, D] and values."""
        keys, values = self._held(layer)
        blocks = blocks.to(keys.device)
        return (
            keys.unflatten(1, (-1, BLOCK)).index_select(1, blocks).flatten(1, 2),
            values.unflatten(1, (-1, BLOCK)).index_select(1, blocks).flatten(1, 2),
        )

    def copy(self, sources: Seq[int], targets: Seq[int]) -> None:
        for x in self._tensors():
            blocks = x.unflatten(1, (-1, BLOCK))  # [H, blocks, BLOCK, D]
            blocks[:, list(targets)] = blocks[:, list(sources)]  # the right side is a copy

    def move(self, src: Seq[int], dst: Seq[int]) -> None:
        for x in self._tensors():
            x[:, list(dst)] = x[:, list(src)]

    def read(self, places: Seq[int]) -> Tensor:
        """A copy of these places, [numbers, places]: keys and values of all layers below each other."""
        parts = [x[:, list(places)].transpose(1, 2).flatten(0, 1).cpu() for x in self._tensors()]
        return torch.cat(parts)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [x for layer in self.layers if layer is not None for x in layer]

    def _held(self, layer: int) -> tuple[Tensor, Tensor]:
        stored = self.layers[layer]
        if stored is None:
            raise TargetError(f"layer {layer} has written no keys and values yet")
        return stored


class PackedLayer(CacheLayerMixin):
    """Takes the keys and values of one layer from transformers (see `PackedPass.write`)."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return current_pass().write(self.index, key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the blocks are made by `ModuleBlocks`."""

    def get_seq_length(self) -> Any:
        return current_pass().before

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Nobody reads them: masks are made for each sequence."""
        return (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.17


class PackedCache(Cache):
    """What transformers takes for its KV cache in packed passes."""

    def __init__(self, layers: int):
        super().__init__(layers=[PackedLayer(i) for i in range(layers)])
