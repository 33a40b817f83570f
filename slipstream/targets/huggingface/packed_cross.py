"""Cross-attention in packed passes through the decoder of an encoder-decoder.

Each sequence answers its own source, so cross-attention runs each sequence's rows on the keys and values of its source.
The model computes these for all sources that are new in a pass, concatenated like one long source; here they are split,
and stay with each source (`EncodedSources`). When the model asks its cache for keys, it gets a marker (`CrossCache`)
that tells the attention which layer is meant.
"""

from collections.abc import Callable, Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.targets.huggingface.encoded_sources import Source
from slipstream.targets.huggingface.module_blocks import Pair


class CrossAttention:
    """Keys and values of the cross-attention in one pass.

    sources   the sources of the pass's sequences, in order. layer_of: marker -> its layer; None for other keys.
    new       the sources without keys and values. attended: number of layers that have used the cross-attention.
    """

    def __init__(self, sources: Seq[Source], layer_of: Callable[[Tensor], int | None]):
        self.sources, self.layer_of = sources, layer_of
        self.new = list({id(source): source for source in sources if not len(source.cross)}.values())
        self.attended = 0

    @property
    def hidden(self) -> Tensor:
        """The states [1, S, d] from which the model computes keys and values: the new sources, concatenated. The model
        always computes them. In a pass without new sources the result is not used."""
        return torch.cat([source.hidden for source in self.new], 1) if self.new else self.sources[0].hidden

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Split keys [1, Hk, S, D] and values among the new sources."""
        lengths = [source.hidden.shape[1] for source in self.new]
        if keys.shape[2] != sum(lengths):
            raise TargetError(f"cross-attention wrote {keys.shape[2]} keys for sources of {sum(lengths)} tokens")
        for source, k, v in zip(self.new, keys.split(lengths, 2), values.split(lengths, 2), strict=True):
            source.cross.update(k, v, layer)

    def share(self, key: Tensor) -> list[Pair] | None:
        """Return keys [Hk, S, D] and values of each sequence's source, in the layer whose marker `key` is. Returns None
        for other keys: they belong to self-attention."""
        layer = self.layer_of(key)
        if layer is None:
            return None
        self.attended += 1
        layers: list[Any] = [source.cross.layers[layer] for source in self.sources]
        return [(one.keys[0], one.values[0]) for one in layers]
