"""The KV cache of packed passes: blocks of tensors for each layer."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.backends.torch.torch_paged import TensorBlocks, zeros_like_blocks
from slipstream.kv.blocks import BLOCK

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


class ModuleBlocks(TensorBlocks):
    """Keys [Hk, places, D] and values [Hv, places, Dv] of each layer, empty before its first write. Numbers of heads
    and widths may differ between layers, and between keys and values."""

    def __init__(self, layers: int):
        with torch.inference_mode():
            self.layers = [torch.zeros(0, 0, 0)] * (2 * layers)  # keys and values of layer 0, of layer 1, ...

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys [Hk, M, D] and values [Hv, M, Dv] to places [M]; returns all keys and values of the layer."""
        for i, new in enumerate((k, v), start=2 * layer):
            if not len(self.layers[i]):
                size = self.layers[i].shape[1]
                self.layers[i] = zeros_like_blocks(new, (len(new), size, new.shape[2]), size // BLOCK)
        keys, values = self.layers[2 * layer : 2 * layer + 2]
        places = places.to(keys.device)
        keys.index_copy_(1, places, k)
        values.index_copy_(1, places, v)
        return keys, values

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of n blocks of a layer, in this order: keys [Hk, n * BLOCK, D] and values."""
        keys, values = (
            x.unflatten(1, (-1, BLOCK)).index_select(1, blocks.to(x.device)).flatten(1, 2)
            for x in self.layers[2 * layer : 2 * layer + 2]
        )
        return keys, values

    def read(self, places: Seq[int]) -> Tensor:
        """Return a copy of these places, [numbers, places]: keys and values of all layers, concatenated."""
        written = (x for x in self.layers if len(x))
        return torch.cat([x[:, list(places)].transpose(1, 2).flatten(0, 1).cpu() for x in written])
