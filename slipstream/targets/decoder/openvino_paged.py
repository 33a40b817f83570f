"""The one adapter around OpenVINO's paged attention, and the paged KV cache that it reads and writes.

`openvino.op._PagedAttentionExtension` is marked experimental: nothing else in Slipstream touches it, the release
is pinned (>=2026.4,<2027), and the torch executor is both its reference and its fallback. What it does, found by
experiment and held by the tests:

- it writes the new keys and values of sequence b to slots past_lens[b] onwards of the blocks that the sequence
  owns, then attends over all slots up to there: rolling back is passing a smaller past_lens;
- `qq_bias` holds, for each sequence, nothing (causal among its new tokens) or n*n bytes: does row i see column j?
- `sliding_window` counts *slots*, so it is exact for chains, and for trees while nothing has left the window;
- the cache in float32 is plain memory, [blocks, Hk, 32, D] for keys and values alike.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence as Seq
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

from slipstream.errors import TargetError, UnsupportedModelError

try:
    from openvino.op import _PagedAttentionExtension as _PagedAttention
except ImportError as error:  # pragma: no cover - another release of OpenVINO
    raise UnsupportedModelError(
        f"OpenVINO {ov.__version__} has no paged attention",
        why="the CPU executor is built on it",
        fix="pip install 'openvino>=2026.4,<2027'",
    ) from error

PROPERTIES = {
    "PERFORMANCE_HINT": "LATENCY",
    "INFERENCE_PRECISION_HINT": "f32",  # newer processors would compute in bfloat16
    "KV_CACHE_PRECISION": "f32",  # and the cache would be quantised
    "ENABLE_CPU_PINNING": False,  # a pinned thread waits for its core: 30 times slower beside other work
}
"""What every graph with paged attention is compiled with."""

BLOCK = 32
"""Slots in a block; the CPU plugin allows no other size."""

INPUTS = {
    "past_lens": (1, np.int32),  # [B]
    "subsequence_begins": (1, np.int32),  # [B+1]
    "block_indices": (1, np.int32),  # [blocks of all sequences, one sequence after another]
    "block_indices_begins": (1, np.int32),  # [B+1]
    "max_context_len": (0, np.int32),  # [], longest past + new tokens
    "qq_bias": (1, np.uint8),  # [sum of n*n over the sequences that have a tree]
    "qq_bias_begins": (1, np.int32),  # [B+1]
}
"""Name -> (rank, dtype) of the inputs that every layer shares."""


def parameter(name: str, rank: int, dtype: Any) -> ov.Node:
    """A named graph input, every dimension dynamic."""
    node = op.parameter([-1] * rank, dtype, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def attention(
    q: Any,
    k: Any,
    v: Any,
    cache: tuple[ov.Node, ov.Node],
    meta: Mapping[str, Any],
    kv_heads: int,
    head_dim: int,
    window: int,
) -> Any:
    """Paged attention of q [M, H*D] over the cache after k and v [M, Hk*D] are written to it; [M, H*D].

    cache: this layer's key and value inputs (see `caches`). window: 0 for full attention, else how many slots a
    token sees, itself included.
    """

    def scalar(value: float, dtype: Any) -> Any:
        return op.constant(np.array(value, dtype))

    def none(dtype: Any, rank: int = 1) -> Any:
        return op.constant(np.zeros((0,) * rank, dtype))

    i32, f32 = np.int32, np.float32
    inputs = (
        *(q, k, v, *cache),
        *(meta[n] for n in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")),
        *(scalar(head_dim**-0.5, f32), scalar(window, i32), none(f32)),  # scale, sliding window, alibi slopes
        *(meta["max_context_len"], none(i32)),  # longest context, score aggregation window
        *(none(i32), none(i32), none(f32)),  # cache rotation: blocks, deltas, table
        *(none(f32), scalar(0, i32), scalar(0, i32)),  # sparse attention: threshold, block size, stride
        none(f32, 4),  # attention sinks
        *(scalar(0, i32), none(i32), none(i32), none(i32)),  # cache eviction
        none(i32),  # token types
        *(meta["qq_bias"], meta["qq_bias_begins"]),
    )
    node = _PagedAttention([n.output(0) if hasattr(n, "output") else n for n in inputs])
    info = node.get_rt_info()
    for part in "kv":
        info[f"num_{part}_heads"] = kv_heads
        info[f"{part}_head_size"] = head_dim
    return node.output(0)


def caches(layer: int) -> tuple[ov.Node, ov.Node]:
    """The key and value cache inputs of one layer; the plugin fills in their shape and type."""
    key, value = (parameter(f"{kind}_cache.{layer}", 4, ov.Type.dynamic) for kind in ("key", "value"))
    return key, value


@functools.cache
def probe(core: ov.Core, heads: int, kv_heads: int, head_dim: int) -> None:
    """Run one token through paged attention with these head sizes: it sees only itself, so its own value must come
    back. Raises UnsupportedModelError if this runtime, on this processor, cannot do that."""
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    q, k, v = (parameter(name, 2, np.float32) for name in sizes)
    for node, size in zip((q, k, v), sizes.values(), strict=True):
        node.set_partial_shape(ov.PartialShape([-1, size]))
        node.validate_and_infer_types()
    meta = {name: parameter(name, rank, dtype) for name, (rank, dtype) in INPUTS.items()}
    cache = caches(0)
    out = attention(q, k, v, cache, meta, kv_heads, head_dim, 0)
    model = ov.Model([op.result(out)], [q, k, v, *meta.values(), *cache], "probe")
    why = "attention is its own value for a token that sees nothing else"
    try:
        request = core.compile_model(model, "CPU", PROPERTIES).create_infer_request()
        value = np.arange(kv_heads * head_dim, dtype=np.float32).reshape(kv_heads, 1, head_dim)
        kv = PagedCache(1, kv_heads, head_dim)
        kv.reserve(0, 1)
        feed: dict[str, np.ndarray] = {name: np.ones((1, size), np.float32) for name, size in sizes.items()}
        feed |= {name: np.zeros((1,) * rank, dtype) for name, (rank, dtype) in INPUTS.items()}
        feed["v"] = value.reshape(1, -1)
        feed["subsequence_begins"] = feed["block_indices_begins"] = np.array([0, 1], np.int32)
        feed["max_context_len"] = np.array(1, np.int32)
        feed["qq_bias"], feed["qq_bias_begins"] = np.zeros(0, np.uint8), np.zeros(2, np.int32)
        for name, array in feed.items():
            request.set_tensor(name, ov.Tensor(array))
        request.set_tensor("key_cache.0", kv.keys[0])
        request.set_tensor("value_cache.0", kv.values[0])
        request.infer()
        got = request.get_output_tensor(0).data.reshape(kv_heads, heads // kv_heads, head_dim)
        sound = bool(np.array_equal(got, np.broadcast_to(value, got.shape)))
    except RuntimeError as error:
        sound, why = False, str(error)
    if not sound:
        raise UnsupportedModelError(
            f"OpenVINO {ov.__version__} cannot run paged attention with {heads} heads of {head_dim} here",
            why=why,
            fix="use executor='torch'",
        )


class PagedCache:
    """The KV of every sequence: for each layer two tensors [blocks, Hk, 32, D] float32, and who owns which block.

    Memory is taken from the system when a block is first written, so a large capacity costs address space only;
    the tensors grow by doubling, one layer after another.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int):
        self.shape = (kv_heads, BLOCK, head_dim)
        self.block_bytes = 2 * layers * kv_heads * BLOCK * head_dim * 4
        self.tables: dict[int, list[int]] = {}
        self.version = 0  # changes whenever a table does
        self.generation = 0  # changes whenever the tensors do
        self.capacity = 0
        self._free: list[int] = []
        self._used = 0  # blocks ever handed out
        self.keys: list[ov.Tensor] = [self._tensor(0) for _ in range(layers)]
        self.values: list[ov.Tensor] = [self._tensor(0) for _ in range(layers)]

    def _tensor(self, blocks: int) -> ov.Tensor:
        return ov.Tensor(ov.Type.f32, ov.Shape([blocks, *self.shape]))

    def reserve(self, seq_id: int, slots: int) -> None:
        """Make sure that a sequence owns blocks for `slots` slots. Raises TargetError where memory is out."""
        table = self.tables.get(seq_id)
        if table is None:
            table = self.tables[seq_id] = []
            self.version += 1
        missing = -(-slots // BLOCK) - len(table)
        if missing <= 0:
            return
        while len(self._free) < missing and self._used < self.capacity:
            self._free.append(self._used)
            self._used += 1
        if len(self._free) < missing:
            self._grow(self.capacity + missing - len(self._free))
            return self.reserve(seq_id, slots)
        table.extend(self._free.pop(0) for _ in range(missing))
        self.version += 1
        return None

    def _grow(self, least: int) -> None:
        """Room for at least `least` blocks, content kept."""
        capacity = max(least, 2 * self.capacity, 16)
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                try:
                    new = self._tensor(capacity)
                except (RuntimeError, MemoryError) as error:
                    raise TargetError(
                        f"no memory for {capacity} KV blocks of {self.block_bytes} bytes: {error}",
                        why="the running sequences do not fit",
                        fix="run fewer or shorter sequences",
                    ) from error
                if self._used:
                    new.data[: self._used] = old.data[: self._used]
                tensors[i] = new
        self.capacity = capacity
        self.generation += 1

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
        for tensor in (*self.keys, *self.values):
            data = tensor.data  # [blocks, Hk, 32, D]
            data[to_block, :, to_slot] = data[from_block, :, from_slot]

    def read(self, seq_id: int, length: int) -> Tensor:
        """Copy of the first `length` slots of a sequence, [L, 2, Hk, length, D]."""
        block, slot = self._places(seq_id, range(length))
        layers = [
            torch.stack([torch.from_numpy(t.data[block, :, slot]) for t in pair])  # [2, length, Hk, D]
            for pair in zip(self.keys, self.values, strict=True)
        ]
        return torch.stack(layers).transpose(2, 3).contiguous()

    def slot(self, seq_id: int, slot: int) -> list[np.ndarray]:
        """Copy of one slot: keys of every layer, then values, each [Hk, D]."""
        block, place = self._places(seq_id, (slot,))
        return [t.data[block[0], :, place[0]].copy() for t in (*self.keys, *self.values)]

    def write(self, seq_id: int, slot: int, content: Seq[np.ndarray]) -> None:
        """Put back what `slot` returned."""
        block, place = self._places(seq_id, (slot,))
        for tensor, part in zip((*self.keys, *self.values), content, strict=True):
            tensor.data[block[0], :, place[0]] = part

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
