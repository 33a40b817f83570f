"""Prepares calls of native kernels, for decoders and heads: KV cache, packed rows and workspace."""

from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.backends.native.kernels import addresses
from slipstream.backends.native.kernels.arithmetic import MAXIMUM, NOISE, UNIFORMS, Picks
from slipstream.backends.native.kernels.formats import FLOAT32, Q8_0, Format
from slipstream.backends.native.kernels.records import CACHE, FINE, NO_SUCH_POSITION, NO_SUCH_TOKEN, ROW, ROWS
from slipstream.backends.native.states import NativeStates
from slipstream.backends.native.threads import Workspace, kernel_lock
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.layers import LayerDescription
from slipstream.core.decode_steps import DecodedSteps, StepSampling
from slipstream.errors import TargetError
from slipstream.executor.executor import Batch, make_not_finite, make_unknown_ids
from slipstream.host.machine import RESERVE, available_bytes
from slipstream.kv.blocks import BLOCK
from slipstream.kv.kv_memory import MOST_BLOCKS, PagedCache

_KINDS = {"maximum": MAXIMUM, "uniforms": UNIFORMS, "noise": NOISE}


class NativeBlocks:
    """A `BlockStore`. Each layer has keys [blocks, Hk, D, BLOCK] and values [blocks, Hk, BLOCK, D] in float32 or
    float16. The kernels read all slots of a key dimension at once, and all D of a value slot. The arrays grow one layer
    after another. Recurrent layers have no arrays, and neither have layers that read the keys and values of an earlier
    layer.

    In q8_0 the arrays are records [blocks, Hk] with int8 "values" of the shapes above and float16 "scales". A scale
    belongs to 32 neighbours in D; the last scale may have fewer.

    block_bytes  bytes of one block in all layers.
    """

    def __init__(self, layers: Seq[LayerDescription], fmt: Format = FLOAT32):
        owners = [i for i, layer in enumerate(layers) if layer.has_kv]
        self._owner = [
            owners.index(i if layer.shared is None else layer.shared) if layer.attends else None
            for i, layer in enumerate(layers)
        ]
        shapes = [(layers[i].kv_heads, layers[i].head_dim) for i in owners]
        self.block_bytes = sum(2 * heads * BLOCK * fmt.head_bytes(size) for heads, size in shapes)
        self.keys = [np.empty((0, heads), _block_dtype(fmt, size, True)) for heads, size in shapes]
        self.values = [np.empty((0, heads), _block_dtype(fmt, size, False)) for heads, size in shapes]
        self._addresses = np.zeros((len(layers), 2), np.int64)
        self._moved = True

    def addresses(self) -> np.ndarray:
        """int64 [L, 2]: addresses of each layer's keys and values. Every call returns the same array."""
        if self._moved:
            for i, owner in ((i, owner) for i, owner in enumerate(self._owner) if owner is not None):
                self._addresses[i] = [arrays[owner].ctypes.data for arrays in (self.keys, self.values)]
            self._moved = False
        return self._addresses

    def grow(self, blocks: int) -> None:
        self._moved = True  # set first: an interrupt may leave only some arrays replaced
        for i in range(len(self.keys)):
            for arrays in (self.keys, self.values):
                old = arrays[i]
                if len(old) >= blocks:
                    continue  # already grown by an interrupted call
                try:
                    new = np.empty((blocks, *old.shape[1:]), old.dtype)
                except MemoryError as error:
                    raise TargetError(
                        f"there is no memory for {blocks} KV blocks of {self.block_bytes} bytes: {error}",
                        why="the KV cache of the running sequences does not fit into memory",
                        fix="run fewer or shorter sequences",
                    ) from error
                new[: len(old)] = old
                arrays[i] = new

    def copy(self, originals: Seq[int], copies: Seq[int]) -> None:
        for data in (*self.keys, *self.values):
            data[list(copies)] = data[list(originals)]

    def move(self, src: Seq[int], dst: Seq[int]) -> None:
        from_block, from_slot = np.divmod(np.asarray(src, np.int64), BLOCK)
        to_block, to_slot = np.divmod(np.asarray(dst, np.int64), BLOCK)
        for arrays, axis in ((self.keys, 3), (self.values, 2)):
            for part in (part for data in arrays for part in _by_slot(data, axis)):
                part[to_block, to_slot] = part[from_block, from_slot]

    def read(self, places: Seq[int]) -> Tensor:
        """Return a copy of these places as float32 [layers with own keys, 2, Hk, places, D]. Layers with fewer or
        smaller heads than the largest layer are padded with zeros."""
        block, slot = np.divmod(np.asarray(places, np.int64), BLOCK)
        keys, values = (
            [_as_floats([part[block, slot] for part in _by_slot(data, axis)]) for data in arrays]
            for arrays, axis in ((self.keys, 3), (self.values, 2))
        )
        layers = [np.stack(pair) for pair in zip(keys, values, strict=True)]  # [2, places, Hk, D]
        largest = np.max([layer.shape for layer in layers], axis=0)
        full = [np.pad(x, [(0, most - n) for n, most in zip(x.shape, largest, strict=True)]) for x in layers]
        return torch.from_numpy(np.stack(full)).transpose(2, 3).contiguous()


def _block_dtype(fmt: Format, size: int, keys: bool) -> np.dtype:
    """The dtype of one head's keys, or values, in a block."""
    shape, scales = (size, BLOCK), (-(-size // fmt.span) if fmt.span else 0, BLOCK)
    if not keys:
        shape, scales = shape[::-1], scales[::-1]
    if not fmt.span:
        return np.dtype((fmt.name, shape))
    return np.dtype([("values", np.int8, shape), ("scales", np.float16, scales)])


def _by_slot(data: np.ndarray, axis: int) -> list[np.ndarray]:
    """Return views [blocks, BLOCK, Hk, ...] of a layer's keys or values, and of their scales if the format has scales.
    axis: the axis of slots in `data`."""
    parts = [data] if data.dtype.names is None else [data[name] for name in data.dtype.names]
    return [np.moveaxis(part, axis, 1) for part in parts]


def _as_floats(parts: list[np.ndarray]) -> np.ndarray:
    """Return float32 [places, Hk, D]: the numbers parts[0], times the scales parts[1] if the format has any."""
    numbers = parts[0].astype(np.float32)
    if len(parts) == 1:
        return numbers
    with np.errstate(invalid="ignore"):  # 0 times a scale that is not finite
        return numbers * parts[1].astype(np.float32).repeat(Q8_0.span, -1)[..., : numbers.shape[-1]]


class RotaryTables:
    """Tables of a decoder: cos and sin of each rotary embedding, float32 [positions, 2, n / 2], and factors of queries
    that grow with the position, float32 [positions]. They use float64, up to the highest position so far."""

    def __init__(self, config: DecoderConfig):
        ropes = [config.rope(number) for number in range(len(config.rotaries))]
        self._ropes = [(inv_freq.numpy().astype(np.float64), float(scale)) for inv_freq, scale in ropes]
        self._growth, self._count, self._tables = config.growth, 0, list[np.ndarray]()
        self.addresses = np.zeros(0, np.int64)

    def up_to(self, position: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Extend the tables up to a position. Returns (int64 addresses of the tables, the tables)."""
        if position >= self._count and (self._ropes or self._growth):
            count = max(position + 1, 2 * self._count, 256)
            self._tables = [_turns(count, *rope) for rope in self._ropes]
            if self._growth is not None:
                beta, step, ahead = self._growth
                steps = (np.arange(count) + ahead) // step
                self._tables.append((1 + beta * np.log1p(steps)).astype(np.float32))
            self._count, self.addresses = count, np.array([address(table) for table in self._tables], np.int64)
        return self.addresses, self._tables


def _turns(count: int, inv_freq: np.ndarray, scale: float) -> np.ndarray:
    angles = np.outer(np.arange(count), inv_freq)
    return np.stack([np.cos(angles) * scale, np.sin(angles) * scale], 1).astype(np.float32)


_NOTHING_HIDDEN = np.zeros(1, np.bool_)


def address(values: np.ndarray) -> int:
    """Return the address of an array's memory. `values.ctypes.data` takes several times as long."""
    return int(values.__array_interface__["data"][0])


class PackedRows:
    """The rows of a pass and the arrays that they refer to. `record` is ROWS [2]: the rows of the pass, and room for
    one further row of each of B sequences.

    at      one ROW per row, as tuples.
    hidden  bool [R, n], or None if each row sees all rows before it.
    tables  as `RotaryTables.up_to` returns them.
    """

    def __init__(
        self,
        at: list[tuple[int, ...]],
        hidden: np.ndarray | None,
        tables: tuple[np.ndarray, list[np.ndarray]],
        sequences: int,
    ):
        fields = ROW.itemsize // 8  # all are int64: numbers are stored faster than records
        self.at, self._more = np.array(at, np.int64), np.empty((sequences, fields), np.int64)
        self.hidden, self.tables = _NOTHING_HIDDEN if hidden is None else hidden, tables
        stride = 0 if hidden is None else hidden.shape[1]
        first = address(self.at), len(at), address(self.hidden), stride, address(tables[0])
        self.record = np.array([first, (address(self._more), 0, 0, 0, 0)], np.int64).view(ROWS)[:, 0]


class NativePaged(PagedCache[NativeBlocks]):
    """The KV cache, and calls of kernels that use it: see `PagedCache`."""

    _workspace: Workspace

    def __init__(
        self,
        config: DecoderConfig,
        kv_format: Format = FLOAT32,
        kv_blocks: int | None = None,
        ahead: int = 0,
        lag: int = 0,
    ):
        """lag: see `NativeStates`."""
        self._options = (config, kv_format, kv_blocks, ahead, lag)
        self._rotary = RotaryTables(config)
        self._tiles = addresses.attention_tile_addresses(kv_format)
        self._reset_cache()

    def _reset_cache(self) -> None:
        config, kv_format, kv_blocks, ahead, lag = self._options
        blocks, self._states = NativeBlocks(config.described, kv_format), None
        if config.recurrences:
            room = int((1 - RESERVE) * available_bytes(torch.device("cpu"))) - (kv_blocks or 0) * blocks.block_bytes
            beside = (kv_blocks or MOST_BLOCKS) * blocks.block_bytes
            self._states = NativeStates(config.recurrences, lag, room, beside)
        super().__init__(blocks, kernel_lock, kv_blocks, ahead=ahead, states=self._states)
        self._tables: tuple[tuple[int, ...], np.ndarray] = ((), np.zeros((0, 0), np.int64))
        self._record = np.zeros(1, CACHE)

    def _rows(self, batch: Batch, extra: int = 0) -> PackedRows:
        """Reserve the slots of a batch and `extra` further slots of each sequence. Returns the packed rows."""
        splits, positions = batch.splits, batch.positions
        at: list[tuple[int, ...]] = []  # sequence, slot, position, length, past
        hidden: np.ndarray | None = None
        for b, (seq_id, past, tree) in enumerate(zip(batch.seq_ids, batch.past, batch.trees, strict=True)):
            start, stop = splits[b], splits[b + 1]
            end = past + stop - start
            self._pool.reserve(seq_id, past, end + extra)
            if tree is None:
                at += [(b, past + i - start, positions[i], past + i - start + 1, past) for i in range(start, stop)]
                continue
            if self._states is not None:
                raise TargetError(
                    "the draft is a tree, but the model has recurrent layers, which verify only chains",
                    why="each branch of the tree would need its own copy of the recurrent states",
                    fix="draft chains, or use LLM or Engine, which cut trees to chains",
                )
            at += [(b, past + i - start, positions[i], end, past) for i in range(start, stop)]
            if hidden is None:
                widest = max(splits[k + 1] - splits[k] for k, each in enumerate(batch.trees) if each is not None)
                hidden = np.zeros((splits[-1], widest), np.bool_)
            hidden[start:stop, : stop - start] = ~tree.numpy()
        furthest = max(positions) + extra if at else 0
        return PackedRows(at, hidden, self._rotary.up_to(furthest), len(batch.seq_ids))

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        with kernel_lock():
            if self._states is not None:
                self._states.fork(parent_id, child_id, length)
            super().fork(parent_id, child_id, length)

    def release(self, seq_id: int) -> None:
        with kernel_lock():
            if self._states is not None:
                self._states.release(seq_id)
            super().release(seq_id)

    def _caches(self, batch: Batch, extra: int = 0) -> np.ndarray:
        """Return CACHE [1] for the sequences of a batch, of which `extra` further tokens each are decoded."""
        pool, blocks = self._pool, self._blocks
        layers = blocks.addresses()
        key = (pool.version, *batch.seq_ids)
        if self._tables[0] != key:
            owned = [pool.tables[seq_id] for seq_id in batch.seq_ids]
            tables = np.zeros((len(owned), max(map(len, owned))), np.int64)
            for row, entries in zip(tables, owned, strict=True):
                row[: len(entries)] = entries
            self._tables = (), tables  # marked as invalid, as an interrupt may leave them half written
            record = self._record[0]
            record["layers"], record["slots"] = address(layers), BLOCK
            record["tables"], record["stride"] = address(tables), tables.shape[1]
            record["bytes"] = self._options[1].bytes
            record["scores"], record["mix"] = self._tiles
            self._tables = key, tables
        if self._states is not None:
            counts = np.diff(batch.splits).tolist()
            certain = batch.certain or [0] * len(counts)
            passes = list(zip(batch.seq_ids, batch.past, counts, certain, strict=True))
            self._prepared = self._states.prepare(passes, extra)  # alive until the next pass
            self._record[0]["states"], self._record[0]["sequences"] = address(self._prepared), len(passes)
            self._record[0]["ring"], self._record[0]["lag"] = self._states.ring, self._states.lag
        return self._record

    def _call(self, kernel: Callable[..., Any], *args: object, rows: int) -> int:
        """Call kernel(board, *args, arena, threads) and return its status (see `Workspace.run`). Raises TargetError for
        a token or position outside the embedding."""
        status = self._workspace.run(kernel, *args, rows=rows)
        if status == NO_SUCH_TOKEN:
            raise make_unknown_ids("a token id is outside the model's embedding")
        if status == NO_SUCH_POSITION:
            raise TargetError(
                "a token lies after the last position for which the model has an embedding",
                why="a model with learned positions has embeddings only for the positions of its training context",
                fix="shorten the prompt or max_tokens",
            )
        return status


def make_picks(sampling: StepSampling, steps: int, count: int, vocab: int) -> Picks:
    """Describe how the kernels pick tokens in K steps of B sequences, among `vocab` ids."""
    inv_temperature, uniforms, noise = np.ones(count), np.empty((0, 0)), np.empty((0, 0, 0))
    if sampling.inv_temperature is not None:
        inv_temperature = sampling.inv_temperature.double().numpy()
    if sampling.uniforms is not None:
        uniforms = sampling.uniforms.double().contiguous().numpy()
    elif sampling.noise is not None:
        noise = sampling.noise.double().expand(steps, count, -1).contiguous().numpy()
    vocab = vocab if sampling.vocab is None else min(sampling.vocab, vocab)
    worth, none = sampling.worth, np.empty((0, 0))
    rates, least = (none, none) if worth is None else (worth.rates, worth.least)
    ends = rates, least, np.full((steps, len(rates)), -1.0), np.ones(len(rates))
    return Picks(_KINDS[sampling.kind], vocab, inv_temperature, uniforms, noise, *ends)


def cut_steps(picks: Picks, drawn: Tensor, logits: Tensor, probs: Tensor | None) -> DecodedSteps:
    """Make the result of a call that picked tokens [K, B] by `picks` and may have ended before K steps."""
    if not len(picks.rates):
        return DecodedSteps(drawn, logits, probs)
    ran = int((picks.confidence[:, 0] >= 0).sum())
    confidence = torch.from_numpy(picks.confidence[:ran])
    return DecodedSteps(drawn[:ran], logits[:ran], None if probs is None else probs[:ran], confidence=confidence)


def check_finite(status: int) -> None:
    """Raise TargetError if logits were computed from hidden states that are not finite."""
    if status != FINE:
        raise make_not_finite()


def as_int64(tokens: Tensor) -> np.ndarray:
    return tokens.to(torch.int64).contiguous().numpy()
