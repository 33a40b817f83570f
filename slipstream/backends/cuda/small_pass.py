"""`SmallPass` runs one pass over few rows with our Triton kernels, replayed as a CUDA graph.

A decoding step of a model of a few billion parameters takes a millisecond or two; launching its kernels one by one
from Python takes longer. So each shape of a pass is captured once. Everything that a graph reads has a fixed address:
the table with the inputs of the rows, the block tables, and the KV cache until it grows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from slipstream.backends.cuda import kernels
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.backends.torch.torch_paged import TorchBlocks
from slipstream.kv.blocks import BLOCK

log = logging.getLogger("slipstream")

MOST_ROWS: int = kernels.ROWS.value
"""Most rows of a pass."""
CHUNK = 256
"""Slots of a split of attention."""
MOST_STEPS = 64
"""Most steps of one call."""
SLOTS = 64
"""Slots that attention reads at once."""
ROTATED = 8
"""Heads that are rotated together."""
TILE = 16
"""Rows of a tile of a product. It is the same for every number of rows in a pass, so the order of sums is, too."""
PRODUCTS = {"store": (16, 128, 2), "add": (16, 128, 2), "gate": (16, 128, 2), "head": (64, 128, 4)}
"""Outputs and columns of a tile of weights, and warps, by kind of product. Four tiles are fetched ahead. These settings
were the fastest of six on an H200 (docs/log.md). More warps were slower, because they repeat the norm of the same
rows."""


@dataclass(frozen=True)
class Shape:
    """The properties for which a graph is captured.

    rows     number of rows
    splits   number of splits of attention
    layers   number of layers to run
    advance  whether the tokens that the pass picks become the inputs of the next pass
    taps     the layers whose residual stream is copied
    """

    rows: int
    splits: int
    layers: int
    advance: bool = False
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kept:
    """A captured pass. After a replay, `taps` has the residual stream after each tapped layer (-1: after the final
    norm). If `graph` is None, the kernels are launched one by one."""

    taps: Mapping[int, Tensor]
    graph: torch.cuda.CUDAGraph | None


@dataclass
class Inputs:
    """The inputs of the rows, on the host and on the device: int64 [fields, MOST_ROWS], see `kernels`."""

    device: torch.device
    host: np.ndarray = field(init=False)
    table: Tensor = field(init=False)
    inverse: np.ndarray = field(init=False)
    """1 / temperature of each sequence, as a view of a row of `host`."""

    def __post_init__(self) -> None:
        fields = kernels.PASS.value + 1
        self._pinned = torch.zeros(fields, MOST_ROWS, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.host, self.table = self._pinned.numpy(), torch.zeros_like(self._pinned, device=self.device)
        self.inverse = self.host[kernels.INVERSE.value].view(np.float64)

    def send(self) -> None:
        self.table.copy_(self._pinned, non_blocking=True)


class SmallPass:
    """Runs passes with the weights of a `TorchExecutor`. It refers to the weights but not to the executor: a reference
    cycle would hold the memory of both until Python collects it."""

    def __init__(self, executor: TorchExecutor, blocks: TorchBlocks):
        config = executor.config
        self.config, self.device, self.dtype = config, executor.device, executor.dtype
        self._layers: list[Any]  # without mixtures of experts, which `find_missing_part` refuses
        self._layers, self._embedding, self._norm, self._head = (
            executor.layers, executor.embedding, executor.final_norm, executor.head
        )  # fmt: skip
        self._frequencies, self._rope_factor = executor.frequencies, executor.rope_factor
        self._blocks, self.inputs = blocks, Inputs(executor.device)
        self.group = config.heads // config.kv_heads
        self.tile_rows = max(1, 16 // self.group)
        """Rows of one sequence for which keys are read once."""
        self._pieces = -(-config.vocab_size // PRODUCTS["head"][0])
        self._capturing = self.device.type == "cuda"
        self._graphs: dict[Shape, Kept] = {}
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None

        def memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        heads, dim, rows = config.heads, config.head_dim, MOST_ROWS
        self.stream = memory(rows, config.hidden_size)
        self.logits = memory(rows, config.vocab_size)
        self._qkv = memory(rows, (heads + 2 * config.kv_heads) * dim, dtype=self.dtype)
        self._queries, self._attended = memory(2, rows, heads * dim, dtype=self.dtype)
        self._hidden = memory(rows, config.intermediate_size, dtype=self.dtype)
        self._tops, self._sums = memory(2, rows, self._pieces)
        self._firsts = memory(rows, self._pieces, dtype=torch.int32)
        self._inverse = self.inputs.table[kernels.INVERSE.value].view(torch.float64)
        self.tables = memory(rows, -(-config.context // BLOCK) + 4, dtype=torch.int32)
        self.results = memory(MOST_STEPS, 2, rows, dtype=torch.int64)
        """The token of each step and row, and the bits of its confidence in float64."""

    def bucket(self, rows: int) -> int:
        """The number of rows for which the graph of a pass over `rows` rows is captured."""
        return max(1, 1 << (rows - 1).bit_length())

    def shape(self, rows: int, slots: int, layers: int, advance: bool, taps: tuple[int, ...] = ()) -> Shape:
        """Return the shape of a pass over `rows` rows. slots: KV slots of the longest sequence."""
        splits = 1
        while splits * CHUNK < slots:
            splits *= 4
        return Shape(self.bucket(rows), splits, layers, advance, taps)

    def run(self, shape: Shape) -> Kept:
        """Enqueue the pass on the GPU, without waiting for its end."""
        addresses = tuple(layer.data_ptr() for layer in self._blocks.layers)
        if addresses != self._addresses:  # the cache has grown
            self._graphs.clear()
            self._addresses = addresses
        kept = self._graphs.get(shape)
        if kept is None:
            kept = self._graphs[shape] = self._capture(shape)
        if kept.graph is None:
            self._launch(shape, kept.taps)
        else:
            kept.graph.replay()
        return kept

    def _capture(self, shape: Shape) -> Kept:
        taps = {
            tap: torch.empty(shape.rows, self.config.hidden_size, dtype=self.dtype, device=self.device)
            for tap in shape.taps
        }
        if not self._capturing:
            return Kept(taps, None)
        before = self.inputs.table.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._launch(shape, taps)  # a first launch compiles the kernels
        torch.cuda.current_stream().wait_stream(stream)
        self.inputs.table.copy_(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._launch(shape, taps)
        except RuntimeError as error:
            self._capturing = False
            torch.cuda.synchronize()
            log.warning(
                "a decoding step cannot be captured as a CUDA graph (%s): its kernels are launched one by one, slower",
                str(error).splitlines()[0],
            )
            return Kept(taps, None)
        self._pool = graph.pool()
        return Kept(taps, graph)

    def _launch(self, shape: Shape, taps: Mapping[int, Tensor]) -> None:
        """Launch the kernels of a pass in order."""
        config, rows, table = self.config, shape.rows, self.inputs.table
        width, heads, kv_heads = config.hidden_size, config.heads, config.kv_heads
        half = config.head_dim // 2
        embedding = self._embedding
        kernels.embed[(rows, triton.cdiv(width, 1024))](
            table, embedding, self.stream, len(embedding), width, BLOCK_WIDTH=1024
        )
        if 0 in taps:
            taps[0].copy_(self.stream[:rows])
        for i, layer in enumerate(self._layers[: shape.layers]):
            cache = self._blocks.layers[i]
            self._multiply(rows, self.stream, layer.qkv, self._qkv, "store", layer.input_norm)
            kernels.rotate[(rows, triton.cdiv(heads + 2 * kv_heads, ROTATED))](
                self._qkv, layer.q_norm, layer.k_norm, self._frequencies, self._rope_factor, table, self.tables,
                self._queries, cache, heads, kv_heads, cache.shape[2], self.tables.shape[1], config.norm_eps,
                NORM=layer.q_norm is not None, HALF=half, HALF_PADDED=triton.next_power_of_2(half), HEADS=ROTATED,
                num_warps=4,
            )  # fmt: skip
            self._attend(shape, i, cache)
            self._multiply(rows, self._attended, layer.o, self.stream, "add")
            self._multiply(rows, self.stream, layer.mlp.up, self._hidden, "gate", layer.post_norm)
            self._multiply(rows, self._hidden, layer.mlp.down, self.stream, "add")
            if i + 1 in taps:
                taps[i + 1].copy_(self.stream[:rows])
        if -1 in taps:
            taps[-1].copy_(torch.nn.functional.rms_norm(
                self.stream[:rows], (width,), self._norm.weight.float(), config.norm_eps
            ))  # fmt: skip
        self._multiply(rows, self.stream, self._head, self.logits, "head", self._norm)
        kernels.choose[(rows,)](
            self._tops, self._sums, self._firsts, table, self._inverse,
            self.results[0, 0], self.results[0, 1].view(torch.float64), self._pieces,
            PIECES=triton.next_power_of_2(self._pieces), ADVANCE=shape.advance,
        )  # fmt: skip

    def _multiply(self, rows: int, x: Tensor, layer: Any, out: Tensor, kind: str, norm: Any = None) -> None:
        """See `kernels.multiply`."""
        outs, columns = layer.weight.shape
        outs = outs // 2 if kind == "gate" else outs
        wide, deep, warps = PRODUCTS[kind]
        kernels.multiply[(triton.cdiv(outs, wide), triton.cdiv(rows, TILE))](
            x, None if norm is None else norm.weight, layer.weight, layer.bias, out, self._tops, self._sums,
            self._firsts, self.inputs.table, self._inverse, rows, outs, columns, self.config.norm_eps,
            NORM=norm is not None, BIAS=layer.bias is not None, KIND=kind, ACTIVATION=self.config.activation,
            BM=TILE, BN=wide, BK=deep, EVEN=columns % deep == 0, num_warps=warps, num_stages=4,
        )  # fmt: skip

    def _attend(self, shape: Shape, i: int, cache: Tensor) -> None:
        config, rows, splits = self.config, shape.rows, shape.splits
        heads, dim, window = config.heads, config.head_dim, config.windows[i] if config.windows else None
        padded = triton.next_power_of_2(dim)
        several = rows * heads * splits if splits > 1 else 1
        parts = torch.empty(several * dim, device=self.device)  # during a capture, this is the graph's own memory
        tops, sums = torch.empty(2, several, device=self.device)
        kernels.attend[(rows, config.kv_heads, splits)](
            self._queries, cache, self.inputs.table, self.tables, self._attended, parts, tops, sums,
            heads, config.kv_heads, cache.shape[2], self.tables.shape[1],
            math.log2(math.e) / math.sqrt(dim), window or 0,
            G=self.group, TILE_ROWS=self.tile_rows, PADDED=max(16, triton.next_power_of_2(self.tile_rows * self.group)),
            D=dim, D_PADDED=max(16, padded), SLOTS=SLOTS, CHUNK=CHUNK, SPLITS=splits, WINDOW=window is not None,
            num_warps=4,
        )  # fmt: skip
        if splits > 1:
            kernels.merge[(rows, heads)](
                self.inputs.table, self._attended, parts, tops, sums, heads, D=dim, D_PADDED=padded, SPLITS=splits,
                num_warps=1,
            )  # fmt: skip
