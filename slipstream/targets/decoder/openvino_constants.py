"""The weights of a decoder as OpenVINO constants that take no memory of their own.

The CPU plugin packs every matrix for its kernels, so a constant in ordinary memory would exist twice for as long
as the model lives. Hence every constant lives in one temporary file, already in the shape that the graph wants
(query, key and value in one matrix), mapped into memory: the kernel can drop its pages at any
time, and `evict` tells it to. Of the embedding only the rows that are looked up are ever in memory. The file has
no name and is gone with the process.

int8: one scale per output channel, symmetric, w = scale * round(w / scale) with scale = max|w| / 127. The plugin
multiplies with int8 kernels that also round the *activations* to int8, in groups of 32 along the row; a row's
result does not depend on the rows beside it. Embeddings, norms, biases and the router stay in float32.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openvino import Type, opset13 as op
from torch import Tensor

from slipstream.errors import LoadError
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.int8 import quantise_rows

ALIGN = 64
"""Bytes; every constant starts at a multiple."""


def _trim_heap() -> None:
    """Return freed memory to the system where the allocator keeps it (glibc): tens of MiB after a conversion."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


class Constants:
    """Every weight of a model, written once, handed out as graph nodes. Nodes of one name share one constant, so
    a graph that uses a matrix K times packs it once."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        quantize: str | None,
        folder: Path,
        plan: Plan | None = None,
    ):
        """plan: what to make of the weights, if it is not an ordinary decoder's."""
        self.config = config
        self.quantize = quantize
        # name -> (offset, shape, dtype)
        self._place: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        self._nodes: dict[str, Any] = {}
        plan = plan or decoder_plan(config, quantize)
        self.head = "head" if any(name == "head" for name, _, _ in plan) else "embed"
        self.matmul_bytes = 0  # of matrices: what one pass reads
        self.resident_bytes = 0  # and with norms and biases
        self.nbytes = 0  # and with embeddings: the size of the file
        try:
            self._map = self._write(weights, folder, plan)
        except OSError as error:
            raise LoadError(
                f"the packed weights cannot be written to {folder}: {error}",
                why="they are mapped from a file so that they are not in memory twice",
                fix="make room there, or name another folder with cache_dir or SLIPSTREAM_CACHE",
            ) from error
        _trim_heap()

    def _write(self, weights: Mapping[str, Tensor], folder: Path, plan: Plan) -> mmap.mmap:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            offset = 0

            def put(name: str, array: Any) -> None:
                nonlocal offset
                file.seek(offset)
                view = memoryview(np.ascontiguousarray(array).reshape(-1)).cast("B")  # type: ignore[arg-type]
                while view:  # a raw write may be short (Linux writes at most 2 GiB at once)
                    view = view[file.write(view) :]
                self._place[name] = (offset, array.shape, array.dtype)
                self.nbytes += array.nbytes
                offset += -(-array.nbytes // ALIGN) * ALIGN

            for name, parts, kind in plan:
                tensors = [weights[p].to(torch.float32) for p in parts]
                whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
                del tensors
                if kind != "matrix" or self.quantize is None:
                    put(name, whole.numpy())
                    size = whole.nbytes
                else:
                    values, scale = quantise_rows(whole)
                    put(name, values.numpy())
                    put(name + ".scale", scale.numpy())
                    size = values.nbytes
                if kind == "matrix" or name == self.head:
                    self.matmul_bytes += size
                if kind != "lookup" or name == self.head:
                    self.resident_bytes += size
            file.seek(max(offset - 1, 0))
            if offset > file.seek(0, os.SEEK_END):
                file.truncate(offset)
            return mmap.mmap(file.fileno(), offset)  # writable because constants must be; nobody writes

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def _constant(self, name: str) -> Any:
        node = self._nodes.get(name)
        if node is None:
            offset, shape, dtype = self._place[name]
            array = np.frombuffer(self._map, dtype, int(np.prod(shape)), offset).reshape(shape)
            node = self._nodes[name] = op.constant(array, shared_memory=True)
        return node

    def vector(self, name: str) -> Any:
        """A norm weight, bias, router or embedding, float32."""
        return self._constant(name)

    def matrix(self, name: str) -> Any:
        """A linear weight [out, in] as float32; int8 is decompressed in the graph, where the plugin sees it."""
        if name + ".scale" not in self._place:
            return self._constant(name)
        node = self._nodes.get(name + ".float")
        if node is None:
            node = op.multiply(op.convert(self._constant(name), Type.f32), self._constant(name + ".scale"))
            self._nodes[name + ".float"] = node
        return node

    def forget(self) -> None:
        """Drop the graph nodes (not the weights): a compiled model keeps what it needs."""
        self._nodes.clear()

    def evict(self) -> None:
        """Let go of every page that is in memory; they come back from the file when touched."""
        if hasattr(self._map, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


Plan = list[tuple[str, list[str], str]]
"""(name in the graph, canonical names it is made of, kind) of every constant.

kind: "matrix" (rows one below another), and two that stay float32: "lookup" (embeddings, of which rows are read) and
"vector" (norms, biases, routers). A matrix "head" makes the logits; without one the embedding does.
"""


def decoder_plan(config: DecoderConfig, quantize: str | None) -> Plan:
    """The constants of an ordinary decoder."""
    plan: Plan = [("embed", ["embed_tokens.weight"], "lookup")]
    if config.position == "learned":
        plan.append(("positions", ["embed_positions.weight"], "lookup"))

    def norm(name: str, source: str) -> None:
        plan.append((name, [source + ".weight"], "vector"))
        if config.norm == "layer":
            plan.append((name + ".bias", [source + ".bias"], "vector"))

    def linear(name: str, sources: list[str], bias: bool) -> None:
        plan.append((name, [s + ".weight" for s in sources], "matrix"))
        if bias:
            plan.append((name + ".bias", [s + ".bias" for s in sources], "vector"))

    for i in range(config.layers):
        source, name = f"layers.{i}.", f"{i}."
        norm(name + "norm1", source + "input_layernorm")
        linear(name + "qkv", [f"{source}self_attn.{p}_proj" for p in "qkv"], config.qkv_bias)
        linear(name + "o", [source + "self_attn.o_proj"], config.o_bias)
        if config.qk_norm:
            plan += [(f"{name}{p}_norm", [f"{source}self_attn.{p}_norm.weight"], "vector") for p in "qk"]
        norm(name + "norm2", source + "post_attention_layernorm")
        parts = ("gate", "up", "down") if config.gated else ("up", "down")
        if config.sparse(i):
            assert config.experts is not None
            plan.append((name + "router", [source + "mlp.gate.weight"], "vector"))
            for e in range(config.experts.count):
                expert = f"{source}mlp.experts.{e}."
                for part in parts:
                    linear(f"{name}{e}.{part}", [f"{expert}{part}_proj"], False)
        else:
            for part in parts:
                linear(name + part, [f"{source}mlp.{part}_proj"], config.mlp_bias)
    norm("norm", "norm")
    if not config.tie_embeddings:
        plan.append(("head", ["lm_head.weight"], "matrix"))
    elif quantize:
        plan.append(("head", ["embed_tokens.weight"], "matrix"))
    return plan  # a tied float32 head is the constant of the embedding itself
