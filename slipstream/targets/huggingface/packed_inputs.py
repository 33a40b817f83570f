"""Stands in for the caches and positions of a transformers model in packed passes.

The caches hand keys and values to the pass (`PackedPass.write`, `CrossAttention.write`). Decoders with position
embeddings count positions from the length of their cache, which differs between the rows of a pass. So the module that
embeds positions is called with the positions of the rows (`PackedPositions`).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from slipstream.targets.huggingface.module_parts import put_back
from slipstream.targets.huggingface.packed_pass import current_pass


def argument_of_past(module: nn.Module) -> str | None:
    """Return the argument through which a position embedding gets the number of earlier tokens; None for other modules.
    Such a module has no submodules, and one integer argument with default 0, whose name differs between versions."""
    if next(module.children(), None) is not None:
        return None
    each = inspect.signature(type(module).forward).parameters.values()
    names = [argument.name for argument in each if type(argument.default) is int and argument.default == 0]
    return names[0] if len(names) == 1 else None


class PackedLayer(CacheLayerMixin):
    """Receives the keys and values of one layer from transformers (see `PackedPass.write`)."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return current_pass().write(self.index, key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: `ModuleBlocks` makes the blocks."""

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        return current_pass().before

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return sizes that no code reads: masks are made for each sequence."""
        return (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the method's name up to transformers 5.17


class PackedCache(Cache):
    """Stands in for transformers' KV cache in packed passes."""

    def __init__(self, layers: int):
        super().__init__(layers=[PackedLayer(i) for i in range(layers)])


class CrossLayer(PackedLayer):
    """Stands in for the keys and values of one layer's cross-attention."""

    def __init__(self, index: int):
        super().__init__(index)
        self.marker = self.keys = self.values = torch.zeros(1, 1, 1, 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        cross = current_pass().cross
        assert cross is not None
        cross.write(self.index, key_states, value_states)
        return self.marker, self.marker

    def get_seq_length(self) -> int:
        """Return 0 if there are new sources, because the model then computes keys and values; otherwise 1."""
        cross = current_pass().cross
        return 0 if cross is not None and cross.new else 1


class CrossCache(Cache):
    """Stands in for the cache of the model's cross-attention."""

    def __init__(self, layers: int):
        cross_layers = [CrossLayer(i) for i in range(layers)]
        super().__init__(layers=list(cross_layers))
        self._layers = {id(layer.marker): layer.index for layer in cross_layers}

    def layer_of(self, key: Tensor) -> int | None:
        return self._layers.get(id(key))


class PackedPositions:
    """Gives a decoder the positions of packed rows. pad: padding id, after which some models count differently."""

    def __init__(self, decoder: nn.Module, pad: int | None):
        self.pad = pad
        named = {module: argument_of_past(module) for module in decoder.modules()}
        self.modules = {module: name for module, name in named.items() if name is not None}

    @contextmanager
    def given(self) -> Iterator[None]:
        """Make the modules embed the positions of the pass, within this block."""
        with ExitStack() as undo:
            for module, past in self.modules.items():
                undo.callback(put_back, module, vars(module).get("forward"))
                module.forward = partial(self._embed, module.forward, past)
            yield

    def _embed(self, original: Callable[..., Tensor], past: str, *args: object, **kwargs: object) -> Tensor:
        """Return embeddings [M, d] or [1, M, d] by the module's own forward."""
        run, takes = current_pass(), inspect.signature(original)
        given = takes.bind(*args, **kwargs).arguments | {past: 0}
        if "position_ids" in takes.parameters:
            return original(**given | {"position_ids": run.positions})
        parts, rows = [], len(run.places)
        for first, last in self._pieces():
            part = {
                name: value[:, first:last] if isinstance(value, Tensor) and value.shape[:2] == (1, rows) else value
                for name, value in given.items()
            }
            parts.append(original(**part | {past: int(run.positions[first])}))
        return torch.cat(parts, 1)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield rows first..last-1 that can be embedded in one call: consecutive positions of one sequence, ending at a
        padding token, so that each token is numbered as when tokens are read one at a time."""
        run = current_pass()
        positions, tokens = run.positions.tolist(), run.tokens.tolist()
        starts = {row.start for row in run.rows}
        first = 0
        for i in range(1, len(tokens) + 1):
            if i == len(tokens) or i in starts or positions[i] != positions[i - 1] + 1 or tokens[i - 1] == self.pad:
                yield first, i
                first = i
