"""What our own kernels need around a call, whether a decoder or a head runs: a cache, packed rows, threads, numbers."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numba
import numpy as np
import torch

from slipstream.core.draws import Draws
from slipstream.errors import TargetError
from slipstream.kernels.layer import Cache, Rows
from slipstream.kernels.picks import MAXIMUM, NOISE, UNIFORMS, Picks
from slipstream.targets.decoder.executor import ONE_THREAD_BYTES, Batch
from slipstream.targets.decoder.paged_cache import Paged, PagedCache

_KINDS = {"maximum": MAXIMUM, "uniforms": UNIFORMS, "noise": NOISE}
_TURNS = threading.Lock()
"""Held by whoever runs on several threads: not every threading layer of Numba may be entered twice at once, and two
passes on the same cores gain nothing."""

FEW = 32
"""Rows up to which a model below ONE_THREAD_BYTES runs on one thread."""


class Threads:
    """How many threads a call takes. most: None for as many as torch has; nbytes: of the weights that a pass reads."""

    def __init__(self, most: int | None, nbytes: int):
        self.most = min(most or torch.get_num_threads(), numba.get_num_threads())
        self._small = nbytes < ONE_THREAD_BYTES

    def of(self, rows: int) -> int:
        return 1 if self._small and rows <= FEW else self.most

    @staticmethod
    def turn(threads: int) -> contextlib.AbstractContextManager[Any]:
        """To be held while a call runs on so many."""
        return _TURNS if threads > 1 else contextlib.nullcontext()


class NativePaged(Paged):
    """KV in the layout of our kernels."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int):
        self._shape = layers, kv_heads, head_dim
        self._forget()

    def _forget(self) -> None:
        """Begin with an empty cache."""
        self._cache = PagedCache(*self._shape, key_columns=True)
        self._arrays: tuple[int, tuple[np.ndarray, ...], tuple[np.ndarray, ...]] = (-1, (), ())
        self._tables: tuple[tuple[int, ...], np.ndarray] = ((), np.zeros((0, 0), np.int64))

    def _rows(self, batch: Batch, extra: int = 0) -> Rows:
        """Where the packed rows stand; slots for them, and `extra` more of each sequence, are made sure of."""
        splits, before = np.asarray(batch.splits), np.asarray(batch.past)
        pending = np.diff(splits)  # [B]
        for seq_id, length in zip(batch.seq_ids, (before + pending + extra).tolist(), strict=True):
            self._cache.reserve(seq_id, length)
        sequence = np.repeat(np.arange(len(pending)), pending)  # [M]
        past = before[sequence]
        slots = np.arange(len(sequence)) + past - splits[sequence]
        length, hidden = slots + 1, np.zeros((len(sequence), 0), np.bool_)
        if any(tree is not None for tree in batch.trees):
            hidden = np.zeros((len(sequence), int(pending.max())), np.bool_)
            for b, tree in enumerate(batch.trees):
                if tree is not None:
                    start, stop = batch.splits[b], batch.splits[b + 1]
                    hidden[start:stop, : stop - start] = ~tree.numpy()
                    length[start:stop] = before[b] + stop - start
        return Rows(sequence, slots, np.asarray(batch.positions, np.int64), length, past, hidden)

    def _caches(self, batch: Batch) -> Cache:
        cache = self._cache
        if self._arrays[0] != cache.generation:
            columns = tuple(keys.transpose(0, 1, 3, 2) for keys in cache.keys)
            self._arrays = cache.generation, columns, tuple(cache.values)
        key = (cache.version, *batch.seq_ids)
        if self._tables[0] != key:
            owned = [cache.tables[seq_id] for seq_id in batch.seq_ids]
            tables = np.zeros((len(owned), max(map(len, owned))), np.int64)
            for row, blocks in zip(tables, owned, strict=True):
                row[: len(blocks)] = blocks
            self._tables = key, tables
        return Cache(self._arrays[1], self._arrays[2], self._tables[1])


def picks_of(draws: Draws, steps: int, count: int, vocab: int) -> Picks:
    """How K steps of B sequences pick among `vocab` ids."""
    heat, uniforms, noise = np.ones(count), np.empty((0, 0)), np.empty((0, 0, 0))
    if draws.inv_temperature is not None:
        heat = draws.inv_temperature.double().numpy()
    if draws.uniforms is not None:
        uniforms = draws.uniforms.double().contiguous().numpy()
    elif draws.noise is not None:
        noise = draws.noise.double().expand(steps, count, -1).contiguous().numpy()
    return Picks(_KINDS[draws.kind], vocab if draws.vocab is None else min(draws.vocab, vocab), heat, uniforms, noise)


def check_sound(sound: bool) -> None:
    """Raise TargetError where a draft came out of hidden states that are not finite."""
    if not sound:
        raise TargetError(
            "the hidden states behind a draft are not finite",
            why="no guess can be drawn from them",
            fix="check the weights of the model or head that drafts",
        )
