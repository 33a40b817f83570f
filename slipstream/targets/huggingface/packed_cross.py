"""Cross-attention and positions in packed passes through the decoder of an encoder-decoder.

Each sequence answers a source of its own, so cross-attention runs each sequence's rows on the keys and values of its
source. The model computes them for the sources that are new in a pass, one after another as one long source; they are
divided here and stay with each source (`EncodedSources`). Where the model asks its cache for keys, it gets a marker, by
which attention knows the layer.

Decoders whose positions are embedded count tokens from the length of their cache, which differs between the rows of a
pass. The module that embeds positions is therefore called with those of the rows (`PackedPositions`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from slipstream.targets.huggingface.encoded_sources import Source
from slipstream.targets.huggingface.module_blocks import PackedLayer
from slipstream.targets.huggingface.module_parts import put_back
from slipstream.targets.huggingface.packed_pass import PackedError, Pair, current_pass

_PAST = "past_key_values_length"
"""What modules that embed positions call the argument that says how many tokens were before."""


class CrossAttention:
    """Keys and values of the cross-attention in one pass.

    sources  of the sequences of the pass, in order. cache: what the model takes for theirs.
    new      those among them without keys and values. attended: how many layers have used it.
    """

    def __init__(self, sources: Seq[Source], cache: CrossCache):
        self.sources, self.cache = sources, cache
        self.new = list({id(source): source for source in sources if not len(source.cross)}.values())
        self.attended = 0

    @property
    def hidden(self) -> Tensor:
        """[1, S, d], what the model computes keys and values from: the new sources, one after another. The
        model asks for it in any case, and without new ones it uses nothing of it."""
        return torch.cat([source.hidden for source in self.new], 1) if self.new else self.sources[0].hidden

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """keys [1, Hk, S, D] and values of all new sources."""
        lengths = [source.hidden.shape[1] for source in self.new]
        if keys.shape[2] != sum(lengths):
            raise PackedError(f"cross-attention wrote {keys.shape[2]} keys for sources of {sum(lengths)} tokens")
        for source, k, v in zip(self.new, keys.split(lengths, 2), values.split(lengths, 2), strict=True):
            source.cross.update(k, v, layer)

    def share(self, key: Tensor) -> list[Pair] | None:
        """Keys [Hk, S, D] and values of each sequence's source, in the layer whose marker `key` is. None for other
        keys: they are of self-attention."""
        layer = self.cache.layer_of(key)
        if layer is None:
            return None
        self.attended += 1
        layers: list[Any] = [source.cross.layers[layer] for source in self.sources]
        return [(one.keys[0], one.values[0]) for one in layers]


class CrossLayer(PackedLayer):
    """What the model takes for the keys and values of one layer's cross-attention."""

    def __init__(self, index: int):
        super().__init__(index)
        self.marker = self.keys = self.values = torch.zeros(1, 1, 1, 1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cross = current_pass().cross
        assert cross is not None
        cross.write(self.index, key_states, value_states)
        return self.marker, self.marker

    def get_seq_length(self) -> int:
        """0 makes the model compute keys and values."""
        cross = current_pass().cross
        return 0 if cross is not None and cross.new else 1


class CrossCache(Cache):
    """What the model takes for the cache of its cross-attention."""

    def __init__(self, layers: int):
        cross_layers = [CrossLayer(i) for i in range(layers)]
        super().__init__(layers=list(cross_layers))
        self._layers = {id(layer.marker): layer.index for layer in cross_layers}

    def layer_of(self, key: Tensor) -> int | None:
        return self._layers.get(id(key))


class PackedPositions:
    """decoder: of the model; pad: its padding id, after which some models count otherwise."""

    def __init__(self, decoder: nn.Module, pad: int | None):
        self.pad = pad
        self.modules = [
            module for module in decoder.modules() if _PAST in inspect.signature(type(module).forward).parameters
        ]

    @contextmanager
    def given(self) -> Iterator[None]:
        """In this block, the modules embed the positions of the pass."""
        with ExitStack() as undo:
            for module in self.modules:
                undo.callback(put_back, module, vars(module).get("forward"))
                module.forward = partial(self._embedded, module.forward)
            yield

    def _embedded(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Embeddings [M, d] or [1, M, d] by the module's own forward."""
        run, takes = current_pass(), inspect.signature(original)
        given = takes.bind(*args, **kwargs).arguments | {_PAST: 0}
        if "position_ids" in takes.parameters:
            return original(**given | {"position_ids": run.positions})
        parts, rows = [], len(run.places)
        for first, last in self._pieces():
            part = {
                name: value[:, first:last] if isinstance(value, Tensor) and value.shape[:2] == (1, rows) else value
                for name, value in given.items()
            }
            parts.append(original(**part | {_PAST: int(run.positions[first])}))
        return torch.cat(parts, 1)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Rows first..last-1 that can be embedded in one call: consecutive positions of one sequence, and nothing after
        a padding token, so that each token is numbered as when tokens are read one at a time."""
        run = current_pass()
        positions, tokens = run.positions.tolist(), run.tokens.tolist()
        starts = {row.start for row in run.rows}
        first = 0
        for i in range(1, len(tokens) + 1):
            if i == len(tokens) or i in starts or positions[i] != positions[i - 1] + 1 or tokens[i - 1] == self.pad:
                yield first, i
                first = i
