"""`NativeExecutor`: decoders like Llama's, Mistral's and Qwen's on a CPU by our own kernels (`slipstream.kernels`).

A pass is one call that knows no shapes beforehand: nothing is readied anew when the number of rows changes, as it does
in nearly every round of speculation. Weights stay in the 16 bits that the checkpoint keeps them in and are widened as
they are used, so arithmetic is float32's at half its memory traffic. A row of logits is the same, bit for bit, however
many rows are beside it: what is verified is exactly what plain decoding would have said.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draws import GREEDY, Draws
from slipstream.errors import TargetError, UnsupportedModelError
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.executor import (
    ONE_THREAD_BYTES,
    Batch,
    Output,
    Unrolled,
    check_settings,
    check_slice,
    check_unrolled,
)
from slipstream.targets.decoder.native_weights import model_of, nbytes, suits
from slipstream.targets.decoder.paged_cache import Paged, PagedCache
from slipstream.targets.decoder.weights import Weights

if TYPE_CHECKING:
    from slipstream.kernels.decoder import Cache, Picks, Rows

_TURNS = threading.Lock()
"""Held by whoever runs on several threads: not every threading layer of Numba may be entered twice at once, and two
passes on the same cores gain nothing."""

FEW = 32
"""Rows up to which a model below ONE_THREAD_BYTES runs on one thread."""


class NativeExecutor(Paged):
    """A decoder on the CPU in float32; implements `executor.Executor`.

    quantize  None, or "int8": int8 weights per output channel; activations are rounded to 15 bits where they meet them,
              so the model is that of the rounded weights to within 1e-4.
    threads   None: as many as torch has.

    The kernels are compiled here, on a machine that has not done so yet, and not while the first request waits.
    Raises UnsupportedModelError for decoders that the kernels do not compute (see `native_weights.suits`), or where
    Numba is missing.
    """

    name = "native"
    dtype = torch.float32

    def __init__(
        self, config: DecoderConfig, weights: Weights, quantize: str | None = None, threads: int | None = None
    ):
        check_settings(quantize, threads)
        if not suits(config, quantize):
            raise UnsupportedModelError(
                f"the native executor does not run {config.model_type} models of this kind",
                why="it knows RMS norms, rotary positions and gated MLPs with silu, no experts, and needs Numba",
                fix="leave executor at 'auto'",
            )
        import numba

        from slipstream.kernels import decoder
        from slipstream.kernels.compiled import readied

        self._kernel = decoder
        self.config, self.quantize, self.device = config, quantize, torch.device("cpu")
        self.threads = min(threads or torch.get_num_threads(), numba.get_num_threads())
        self._model = model_of(config, weights, quantize)
        self._weight_bytes = nbytes(self._model)
        self._padded = self._model.head.values.shape[1]
        self._forget()
        with readied():
            token = Batch((0,), torch.zeros(1, dtype=torch.int64), (0,), (0, 1), (0,), (None,), (0,), (2,))
            self.forward(token)
            self._unrolled(token, 1)
        self._forget()

    def _forget(self) -> None:
        """Begin with an empty KV cache."""
        c = self.config
        self._cache = PagedCache(c.layers, c.kv_heads, c.head_dim, key_columns=True)
        self._arrays: tuple[int, tuple[np.ndarray, ...], tuple[np.ndarray, ...]] = (-1, (), ())
        self._tables: tuple[tuple[int, ...], np.ndarray] = ((), np.zeros((0, 0), np.int64))

    # --- one pass ----------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        taps: tuple[int, ...] = (),
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
    ) -> Output:
        """See `Executor.forward`."""
        first, last = layers or (0, self.config.layers)
        check_slice(self.config, first, last, taps)
        rows, width = self._rows(batch), self.config.hidden_size
        count = batch.splits[-1]
        x = np.empty((count, width), np.float32)
        if first == 0:
            self._kernel.lookup(self._model.embed, batch.tokens.numpy(), x)
        elif hidden is None:
            raise TargetError(f"layers {first}..{last - 1} need the hidden states of the layers below")
        else:
            x[:] = hidden.numpy()
        wanted = np.asarray(batch.select, np.int64)
        tapped = np.empty((len(taps), count, width), np.float32)
        logits = np.empty((len(wanted), self._padded), np.float32)
        alone = layers is None and not taps
        threads, taken = self._threads(count), np.asarray(taps, np.int64)
        with self._turn(threads):  # whether the logits are finite is asked where they are used
            self._kernel.forward(
                *(self._model, self._caches(batch), rows, x, first, last, wanted, alone, taken, tapped, logits, threads)
            )
        return Output(
            torch.from_numpy(logits)[:, : self.config.vocab_size],
            {tap: torch.from_numpy(tapped[i]) for i, tap in enumerate(taps)},
            torch.from_numpy(x) if layers is not None else None,
        )

    def unrolled(self, batch: Batch, steps: int, draws: Draws = GREEDY, exit: int | None = None) -> Unrolled:
        """Draft `steps` tokens a sequence in one call; see `OpenVinoExecutor.unrolled`. Tokens are drawn in float64,
        and their laws returned."""
        check_unrolled(steps, exit, self.config.layers)
        drafted, sound = self._unrolled(batch, steps, draws, exit)
        if not sound:
            raise TargetError(
                "the hidden states behind a draft are not finite",
                why="no guess can be drawn from them",
                fix="check the weights of the model that drafts",
            )
        return drafted

    def _unrolled(
        self, batch: Batch, steps: int, draws: Draws = GREEDY, exit: int | None = None
    ) -> tuple[Unrolled, bool]:
        """The same, and whether all was finite."""
        rows = self._rows(batch, steps - (exit is None))
        count, width, vocab = len(batch.seq_ids), self.config.hidden_size, self.config.vocab_size
        drawn = np.empty((steps, count), np.int64)
        logits = np.empty((steps, count, self._padded), np.float32)
        laws = np.empty((steps, count, vocab if draws.kind != "maximum" else 0))
        stream = np.empty((0 if exit is None else batch.splits[-1], width), np.float32)
        later = np.empty((0 if exit is None else steps, count, width), np.float32)
        depth, threads = exit or self.config.layers, self._threads(batch.splits[-1])
        last, tokens = np.asarray(batch.splits[1:], np.int64) - 1, batch.tokens.numpy()
        picks = self._picks(draws, steps, count)
        with self._turn(threads):
            sound = self._kernel.draft(
                *(self._model, self._caches(batch), rows, tokens, last, depth, picks),
                *(drawn, logits, laws, stream, later, threads),
            )
        made, raw = torch.from_numpy(drawn), torch.from_numpy(logits)[..., :vocab]
        law = None if draws.kind == "maximum" else torch.from_numpy(laws)
        if exit is None:
            return Unrolled(made, raw, laws=law), sound
        return Unrolled(made, raw, torch.from_numpy(stream), torch.from_numpy(later), law), sound

    # --- what the kernels take -----------------------------------------------------------------------------------

    def _threads(self, rows: int) -> int:
        return 1 if self._weight_bytes < ONE_THREAD_BYTES and rows <= FEW else self.threads

    def _turn(self, threads: int) -> contextlib.AbstractContextManager[Any]:
        return _TURNS if threads > 1 else contextlib.nullcontext()

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
        return self._kernel.Rows(sequence, slots, np.asarray(batch.positions, np.int64), length, past, hidden)

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
        return self._kernel.Cache(self._arrays[1], self._arrays[2], self._tables[1])

    def _picks(self, draws: Draws, steps: int, count: int) -> Picks:
        vocab = self.config.vocab_size if draws.vocab is None else min(draws.vocab, self.config.vocab_size)
        heat, uniforms, noise = np.ones(count), np.empty((0, 0)), np.empty((0, 0, 0))
        if draws.inv_temperature is not None:
            heat = draws.inv_temperature.double().numpy()
        if draws.uniforms is not None:
            uniforms = draws.uniforms.double().contiguous().numpy()
        elif draws.noise is not None:
            noise = draws.noise.double().expand(steps, count, -1).contiguous().numpy()
        kinds = {"maximum": self._kernel.MAXIMUM, "uniforms": self._kernel.UNIFORMS, "noise": self._kernel.NOISE}
        return self._kernel.Picks(kinds[draws.kind], vocab, heat, uniforms, noise)

    def memory(self) -> dict[str, int]:
        """Bytes: "weights" that a pass reads, "kv" of the blocks in use so far."""
        return {"weights": self._weight_bytes, "kv": self._cache.nbytes}
