"""The one adapter around OpenVINO's paged attention.

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
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from slipstream.errors import UnsupportedModelError
from slipstream.targets.decoder.paged_cache import PagedCache

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
        request.set_tensor("key_cache.0", ov.Tensor(kv.keys[0], shared_memory=True))
        request.set_tensor("value_cache.0", ov.Tensor(kv.values[0], shared_memory=True))
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
