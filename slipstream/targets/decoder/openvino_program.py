"""A compiled graph with everything that keeps the host's part of a step to a few microseconds."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence as Seq
from typing import Any, TypeVar

import numpy as np
import openvino as ov
import torch
from torch import Tensor

from slipstream.core.draws import Draws
from slipstream.errors import TargetError
from slipstream.targets.decoder.executor import Batch
from slipstream.targets.decoder.openvino_constants import Constants
from slipstream.targets.decoder.openvino_graph import Graph
from slipstream.targets.decoder.paged_cache import PagedCache

Key = TypeVar("Key", bound=Hashable)

_KEPT_ROWS = 64
"""Memory is kept for inputs and outputs of up to this many rows; for more (prefill) it is made for the call."""


def unrolled_kept(weight_bytes: int) -> int:
    """How many unrolled graphs to keep of a model whose weights take so many bytes, since each packs them for itself:
    as many as 256 MiB hold, 4 at least, 32 at most. Compiling one takes longer than many rounds, so whoever tries
    several draft lengths in turns must find them all again."""
    return max(4, min(32, (256 << 20) // max(1, weight_bytes)))


def kept(programs: dict[Key, Program], key: Key, most: int, make: Callable[[], Program]) -> Program:
    """The program of `key`, made if it is not there; of all, the `most` that were used last stay."""
    program = programs.pop(key, None)
    if program is None:
        if len(programs) >= most:
            del programs[next(iter(programs))]  # the least recently used
        program = make()
    programs[key] = program  # now the most recently used
    return program


@functools.cache
def core() -> ov.Core:
    return ov.Core()


def begins(lengths: Iterable[int]) -> list[int]:
    """[3, 0, 2] -> [0, 3, 3, 5]."""
    out = [0]
    for n in lengths:
        out.append(out[-1] + n)
    return out


@contextlib.contextmanager
def _evicting(constants: Constants) -> Iterator[None]:
    """While a graph compiles, its constants are packed one after another: keep letting go of those already read,
    so that the peak is one copy of the weights, not two."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(0.005):
            constants.evict()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        constants.evict()


class Program:
    """A compiled graph, its request, and buffers that are bound once and then only written.

    Inputs and outputs live in memory of our own, a buffer for each shape, so that a step whose shapes repeat binds
    nothing, and an output handed out earlier is at worst overwritten, never freed.
    """

    def __init__(self, graph: Graph, properties: Mapping[str, Any], constants: Constants):
        try:
            with _evicting(constants):
                self.compiled = core().compile_model(graph[0], "CPU", dict(properties))
        except RuntimeError as error:
            raise TargetError(
                f"OpenVINO cannot compile the model: {error}",
                why="nothing can be run without it",
                fix="report this with the model's config.json; executor='torch' runs it without OpenVINO",
            ) from error
        self.request = self.compiled.create_infer_request()
        self.outputs = {name: i for i, name in enumerate(graph[1])}
        self._index = {i.get_any_name(): n for n, i in enumerate(self.compiled.inputs)}
        self._types = {i.get_any_name(): i.get_element_type().to_dtype() for i in self.compiled.inputs}
        self._memory: dict[str, np.ndarray] = {}  # name -> flat; each shape of an input or output is a view of it
        self._views: dict[str, dict[tuple[int, ...], tuple[Tensor, ov.Tensor]]] = {}
        self._bound: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._written: dict[str, tuple[int, ...]] = {}
        self._constants = constants
        self._first = True  # some kernels pack their weights when first run, some when a shape is new
        self._new_shape = False
        self._generation = -1
        self._tables: tuple[int, tuple[int, ...]] | None = None

    def bind(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The buffer of an input or output in this shape, bound to the request."""
        bound = self._bound.get(name)
        if bound is not None and bound[0] == shape:
            return bound[1]
        pair = self._views.setdefault(name, {}).get(shape)
        if pair is None:
            pair = self._view(name, shape)
        if name in self.outputs:
            self.request.set_output_tensor(self.outputs[name], pair[1])
        else:
            self.request.set_input_tensor(self._index[name], pair[1])
            self._written.pop(name, None)
        self._bound[name] = (shape, pair[0])
        return pair[0]

    def bound(self, name: str) -> Tensor:
        """The buffer that is bound now."""
        return self._bound[name][1]

    def _view(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, ov.Tensor]:
        """New memory or a new view of what there is, as a tensor of each library."""
        self._new_shape = True
        size = math.prod(shape)
        dtype = self._types.get(name, np.int64 if name == "tokens" else np.float32)
        keep = not shape or shape[0] <= _KEPT_ROWS
        memory = self._memory.get(name) if keep else None
        if memory is None or memory.size < size:
            memory = np.zeros(size, dtype)
            if keep:
                self._memory[name] = memory
                self._views[name] = {}
        array = memory[:size].reshape(shape)
        pair = torch.from_numpy(array), ov.Tensor(array, shared_memory=True)
        if keep:
            self._views[name][shape] = pair
        return pair

    def feed(self, name: str, values: Iterable[int]) -> None:
        """Write a vector of host integers, unless it is what was written last."""
        values = tuple(values)
        if self._written.get(name) == values and name in self._bound:
            return
        self.bind(name, (len(values),)).numpy()[:] = values
        self._written[name] = values

    def feed_batch(self, cache: PagedCache, batch: Batch, extra: int = 0) -> None:
        """Everything of a batch but token ids: positions, KV slots (and `extra` more of them a sequence), masks."""
        splits, past = batch.splits, batch.past
        longest = 0
        for b, seq_id in enumerate(batch.seq_ids):
            length = past[b] + splits[b + 1] - splits[b]
            cache.reserve(seq_id, length + extra)
            longest = max(longest, length)
        self.feed("positions", batch.positions)
        self.feed("past_lens", past)
        self.feed("subsequence_begins", splits)
        self.bind("max_context_len", ()).fill_(longest)
        trees = batch.trees
        if any(t is not None for t in trees):
            masks = [torch.zeros(0, dtype=torch.bool) if t is None else t.reshape(-1) for t in trees]
            self.bind("qq_bias", (sum(map(len, masks)),)).copy_(torch.cat(masks))
            self.feed("qq_bias_begins", begins(len(m) for m in masks))
        else:
            self.feed("qq_bias", ())
            self.feed("qq_bias_begins", (0,) * (len(splits)))
        self.feed_cache(cache, batch.seq_ids)

    def feed_draws(self, count: int, draws: Draws) -> None:
        """What an unrolled graph of this kind picks by, for `count` sequences."""
        self.feed("single_begins", range(count + 1))
        if draws.kind == "maximum":
            return
        heat = self.bind("inv_temperature", (count,))
        heat.fill_(1.0) if draws.inv_temperature is None else heat.copy_(draws.inv_temperature)
        name, values = ("uniforms", draws.uniforms) if draws.noise is None else ("noise", draws.noise)
        assert values is not None
        self.bind(name, tuple(values.shape)).copy_(values)

    def feed_cache(self, cache: PagedCache, seq_ids: Seq[int]) -> None:
        """Bind the cache arrays if they have grown, and the block tables if they or the batch have changed."""
        if self._generation != cache.generation:
            for kind, arrays in (("key", cache.keys), ("value", cache.values)):
                for i, array in enumerate(arrays):
                    index = self._index.get(f"{kind}_cache.{i}")
                    if index is not None:
                        self.request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
            self._generation = cache.generation
        key = (cache.version, tuple(seq_ids))
        if self._tables != key:
            tables = [cache.tables[s] for s in seq_ids]
            self.feed("block_indices", [block for table in tables for block in table])
            self.feed("block_indices_begins", begins(len(t) for t in tables))
            self._tables = key

    def infer(self) -> None:
        try:
            with _evicting(self._constants) if self._first else contextlib.nullcontext():
                self.request.infer(share_outputs=True)
        except RuntimeError as error:
            raise TargetError(
                f"OpenVINO failed while running the model: {error}",
                why="nothing of this step can be trusted",
                fix="report this with the model's config.json; executor='torch' runs it without OpenVINO",
            ) from error
        if self._new_shape:
            self._constants.evict()
        self._first = self._new_shape = False
