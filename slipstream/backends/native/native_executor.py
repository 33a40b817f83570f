"""`NativeExecutor`: runs decoders on a CPU with our own kernels (`slipstream.backends.native.kernels`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from slipstream.backends.native.kernels import passes
from slipstream.backends.native.kernels.compiled import compile_lock
from slipstream.backends.native.kernels.formats import FLOAT32, KV_FORMATS
from slipstream.backends.native.kernels.processor import kv_refusal
from slipstream.backends.native.kernels.records import FINE
from slipstream.backends.native.packed_weights import Layout, SharedTables, decoder_weights
from slipstream.backends.native.paged import NativePaged, as_int64, check_finite, cut_steps, make_picks
from slipstream.backends.native.threads import Workspace, kernel_lock
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import DEFAULTS, LoadSettings
from slipstream.checkpoints.weights import Weights
from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling, best_steps_per_call
from slipstream.core.target import Runtime, Slice
from slipstream.errors import ParameterError, TargetError
from slipstream.executor.executor import Batch, Output, check_slice, check_steps
from slipstream.host.machine import give_back_freed
from slipstream.host.torch_threads import host_threads

PACKED_ALONE = 1 << 28
"""Weights of fewer bytes are packed by one thread of torch. Otherwise torch's other threads would spin between the many
short operations of packing (0.1 to 1.7 s of processor time for 17M weights on two cores)."""

LONGEST_TAKEN_BACK = 16
"""Most draft tokens that a draft model with recurrent layers can roll back."""


class NativeExecutor(NativePaged):
    """A decoder on the CPU; implements `executor.Executor`.

    settings   quantize None: weights as stored in the checkpoint, arithmetic in `dtype`. "w8a16": int8 weights with
               one scale per output channel; activations are rounded to 16 bits in products with these weights. "w8a8":
               int8 weights, and activations in 8 bits with one scale per 64 columns. dtype: float32 or bfloat16.
               Weights and activations are rounded to this dtype, and their products are added in float32.

    Logits are batch-invariant: a row has bitwise the same logits in any batch, chain or tree. The constructor compiles
    kernels that are not compiled on this machine yet, so that the first request does not wait for them.

    config and settings: only those that `native_backend.refusal` does not refuse. Raises ParameterError for a cache in
    float16 or q8_0 on a processor without float16 instructions.
    """

    torch_threads, has_states = 1, True

    def __init__(self, config: DecoderConfig, weights: Weights, settings: LoadSettings = DEFAULTS):
        quantised, dtype = settings.weight_format, settings.dtype or torch.float32
        kv_dtype = settings.kv_dtype or FLOAT32.name
        if refused := kv_refusal(kv_dtype):
            raise ParameterError(f"kv_dtype is {kv_dtype!r}, but {refused}", fix="choose 'float32'")
        self.config, self.device = config, torch.device("cpu")
        with compile_lock(), host_threads(1 if weights.nbytes < PACKED_ALONE else None):
            super().__init__(config, KV_FORMATS[kv_dtype], settings.kv_blocks, lag=_lag(settings))
            self._layout = Layout()
            self._model = decoder_weights(config, weights, quantised, dtype, self._layout)
            give_back_freed()
            self._workspace = Workspace(settings.threads, self._layout.nbytes)
            quantize = quantised.quantize if quantised else weights.quantised
            lag = None if self._states is None else self._states.lag
            self.runtime = Runtime("native", dtype, quantize, kv_dtype, self._workspace.most, rollback=lag)
            self.steps_per_call = best_steps_per_call(self._layout.nbytes)
            self._padded = int(self._model[0]["head"]["outs"])
            self._kept = threading.local()  # for each Python thread the logits [R, padded V] of its last pass
            token = Batch((0,), torch.zeros(1, dtype=torch.int64), (0,), (0, 1), (0,), (None,), (0,))
            self.forward(token)
            with suppress(TargetError):  # the logits of token 0 may be infinite
                self.decode_steps(token, 1)
        self._reset_cache()

    @property
    def slices(self) -> bool:
        return not self.config.recurrences  # a pass over all layers commits states

    @property
    def multi_step(self) -> NativeExecutor:
        return self

    @property
    def packed_tables(self) -> SharedTables:
        """The packed embedding and output head [V, d], for draft heads that use the target's."""
        return SharedTables(self._model[0]["embed"], self._model[0]["head"], self._layout)

    def forward(
        self, batch: Batch, taps: tuple[int, ...] = (), layers: Slice = None, hidden: Tensor | None = None
    ) -> Output:
        first, last = layers or (0, self.config.layers)
        if layers is not None or taps:
            check_slice(self.config, first, last, taps)
        count, width = batch.splits[-1], self.config.hidden_size
        given = np.empty((0, width), np.float32)
        if first > 0:
            if hidden is None or tuple(hidden.shape) != (count, width):
                raise TargetError(
                    f"layers {first}..{last - 1} need hidden states [{count}, {width}] of the layers below",
                    why=f"given were {'none' if hidden is None else list(hidden.shape)}",
                )
            given = hidden.float().contiguous().numpy()
        wanted = np.asarray(batch.select, np.int64)
        tapped = np.empty((len(taps), count, width), np.float32)
        stream = np.empty((0 if layers is None else count, width), np.float32)
        alone = layers is None and not taps
        with kernel_lock():
            rows = self._rows(batch)
            logits = self._logits_buffer(len(wanted))
            status = self._call(
                *(passes.forward, self._model, self._caches(batch), rows.record[:1], as_int64(batch.tokens)),
                *(given, first, last),
                *(wanted, alone, np.asarray(taps, np.int64), tapped, stream, logits),
                rows=count,
            )
            experts_read = self._workspace.experts_read
        return Output(
            torch.from_numpy(logits)[:, : self.config.vocab_size],
            {tap: torch.from_numpy(tapped[i]) for i, tap in enumerate(taps)},
            torch.from_numpy(stream) if layers is not None else None,
            finite=status == FINE,
            experts_read=experts_read,
        )

    def _logits_buffer(self, rows: int) -> np.ndarray:
        """An array float32 [rows, padded V], whose memory the thread's next pass reuses."""
        kept = self._kept.__dict__
        if "logits" not in kept or len(kept["logits"]) < rows:
            kept["logits"] = np.empty((rows, self._padded), np.float32)
        return kept["logits"][:rows]  # type: ignore[no-any-return]

    def decode_steps(
        self, batch: Batch, steps: int, sampling: StepSampling = ARGMAX, exit: int | None = None, taps: Seq[int] = ()
    ) -> DecodedSteps:
        """See `MultiStep`. Tokens are drawn from distributions in float64, which are returned."""
        check_steps(steps, exit, self.config.layers)
        if taps:
            check_slice(self.config, 0, self.config.layers, taps)
            if batch.splits[-1] > len(batch.seq_ids):
                raise TargetError("hidden states of several steps were asked for where several tokens are pending")
        count, width, vocab = len(batch.seq_ids), self.config.hidden_size, self.config.vocab_size
        drawn = np.empty((steps, count), np.int64)
        logits = np.empty((steps, count, self._padded), np.float32)
        probs = np.empty((steps, count, vocab if sampling.kind != "maximum" else 0))
        stream = np.empty((0 if exit is None else batch.splits[-1], width), np.float32)
        later = np.empty((0 if exit is None else steps, count, width), np.float32)
        tapped = np.empty((steps, len(taps), count, width), np.float32)
        last, picks = np.asarray(batch.splits[1:], np.int64) - 1, make_picks(sampling, steps, count, vocab)
        with kernel_lock():
            rows = self._rows(batch, steps - (exit is None))
            status = self._call(
                *(passes.decode, self._model, self._caches(batch, steps), rows.record[:1], rows.record[1:]),
                *(as_int64(batch.tokens), last, exit or self.config.layers, picks),
                *(np.asarray(taps, np.int64), tapped, drawn, logits, probs, stream, later),
                rows=batch.splits[-1],
            )
        check_finite(status)
        drawn_probs = None if sampling.kind == "maximum" else torch.from_numpy(probs)
        drawn_logits = torch.from_numpy(logits)[..., :vocab]
        if exit is not None:
            streams = torch.from_numpy(stream), torch.from_numpy(later)
            return DecodedSteps(torch.from_numpy(drawn), drawn_logits, drawn_probs, *streams)
        states = {tap: torch.from_numpy(tapped[:, i]) for i, tap in enumerate(taps)}
        return cut_steps(picks, torch.from_numpy(drawn), drawn_logits, drawn_probs)._replace(states=states)

    def memory(self) -> dict[str, int]:
        """Bytes by kind: "weights" that a pass reads, and "kv", the blocks used so far."""
        states = self._states.nbytes if self._states is not None else 0
        return {"weights": self._layout.nbytes, "kv": self._pool.used * self._blocks.block_bytes + states}


def _lag(settings: LoadSettings) -> int:
    """The number of tokens that a draft model may roll back. 0 for a target, which never rolls back."""
    return LONGEST_TAKEN_BACK if settings.role == "draft" else 0
