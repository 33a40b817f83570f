"""`CudaExecutor` runs decoding steps with our Triton kernels in CUDA graphs. Everything else (prompts, slices of
layers) runs in PyTorch as in `TorchExecutor`, on the same weights and KV cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from slipstream.backends.cuda import kernels
from slipstream.backends.cuda.small_pass import MOST_ROWS, MOST_STEPS, SmallPass
from slipstream.backends.torch.torch_executor import TorchExecutor
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.load_settings import DEFAULTS, LoadSettings
from slipstream.checkpoints.weights import Weights
from slipstream.core.decode_steps import ARGMAX, ARGMAX_INV_TEMPERATURE, DecodedSteps, StepSampling, best_steps_per_call
from slipstream.core.dice import invert
from slipstream.core.draft import index_rows
from slipstream.core.target import Runtime, Slice
from slipstream.errors import TargetError
from slipstream.executor.executor import Batch, Output, check_ids, check_slice, check_steps, make_not_finite
from slipstream.kv.blocks import BLOCK

FIRST_TOKENS = 4096
"""Upper limit of the KV cache's initial capacity, in tokens. When the cache grows, graphs are captured again."""
CALL_BYTES = 1_000_000_000
"""Bytes of weights that a GPU reads in the time of Python's overhead for one call (see `best_steps_per_call`)."""
MOST_NEW = MOST_ROWS - 1
"""Most new tokens of one sequence in a pass: a row has one bit of an int64 for each new token that it sees."""

(SEQ, INDEX, BITS, TILE, COUNT, SELECT, PAST, NEXT, POSITION, STEP, PASS, TOKEN) = (
    field.value
    for field in (
        kernels.SEQ, kernels.INDEX, kernels.BITS, kernels.TILE, kernels.COUNT, kernels.SELECT, kernels.PAST,
        kernels.NEXT, kernels.POSITION, kernels.STEP, kernels.PASS, kernels.TOKEN,
    )
)  # fmt: skip


class CudaExecutor(TorchExecutor):
    """A decoder on a GPU; implements `executor.Executor`, and `MultiStep` for a `Batch`.

    Passes over at most MOST_ROWS rows are batch-invariant: the logits of a row are bitwise the same in any batch, chain
    or tree, given the same KV cache. Longer passes are not batch-invariant, so the KV of a prompt depends on how the
    prompt was cut into passes.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, settings: LoadSettings = DEFAULTS):
        super().__init__(config, weights, settings)
        self.runtime = Runtime("cuda", self.dtype)
        with torch.inference_mode():
            first = min(FIRST_TOKENS, config.context) // BLOCK
            self._blocks.grow(first if settings.kv_blocks is None else settings.kv_blocks)
            self._small = SmallPass(self, self._blocks)
        self.steps_per_call = best_steps_per_call(self._weight_bytes, call_bytes=CALL_BYTES)
        pinned = self.device.type == "cuda"
        self._results = torch.zeros_like(self._small.results, device="cpu", pin_memory=pinned)
        self._tables = torch.zeros_like(self._small.tables, device="cpu", pin_memory=pinned)
        self._sent: tuple[object, ...] = ()  # the tables that the device has now: version and sequences

    has_states = False

    @property
    def multi_step(self) -> CudaExecutor:
        return self

    @torch.inference_mode()
    def forward(
        self, batch: Batch, taps: tuple[int, ...] = (), layers: Slice = None, hidden: Tensor | None = None
    ) -> Output:
        if layers is not None or not self._is_small(batch):
            return super().forward(batch, taps, layers, hidden)
        check_slice(self.config, 0, self.config.layers, taps)
        rows, select = batch.splits[-1], batch.select
        with self._calls:
            slots = self._fill(batch, batch.select)
            kept = self._small.run(self._small.shape(rows, slots, self.config.layers, False, taps))
            ids, confidences = self._read(0, 1)
        finite = bool(np.isfinite(confidences[0, : len(select)]).all())
        if not finite:
            check_ids(batch.tokens, len(self.embedding))
        return Output(
            self._small.logits[index_rows(select)],
            {tap: states[:rows] for tap, states in kept.taps.items()},
            finite=finite,
            maxima=ids[0, : len(select)].tolist() if finite else None,
        )

    @torch.inference_mode()
    def decode_steps(
        self, batch: Batch, steps: int, sampling: StepSampling = ARGMAX, exit: int | None = None, taps: Seq[int] = ()
    ) -> DecodedSteps:
        """See `MultiStep`. Tokens are drawn from distributions in float64, which are returned."""
        check_steps(steps, exit, self.config.layers)
        if taps:
            raise TargetError("hidden states were asked for, the cuda backend returns none of several steps")
        if steps > MOST_STEPS:
            raise TargetError(f"{steps} steps were asked for, the cuda backend runs at most {MOST_STEPS} in one call")
        with self._calls:
            layers, count, stream = exit or self.config.layers, len(batch.seq_ids), list[Tensor]()
            if not self._is_small(batch, steps):  # a long prompt: all but the last token of each sequence first
                sizes = [stop - start for start, stop in zip(batch.splits, batch.splits[1:], strict=False)]
                before = super().forward(batch.cut([range(n - 1) for n in sizes]), (), (0, layers))
                batch = batch.cut([range(n - 1, n) for n in sizes])
                assert before.hidden is not None
                stream = list(before.hidden.split([n - 1 for n in sizes]))
                if not self._is_small(batch, steps):
                    raise TargetError(f"{count} sequences were given, the cuda backend decodes at most {MOST_ROWS}")
            last = [stop - 1 for stop in batch.splits[1:]]
            slots = self._fill(batch, last, steps - (exit is None), sampling)
            steps_taken = self._steps(count, batch.splits[-1], slots, steps, layers, sampling, exit is not None)
            tokens, logits, probs, streams = steps_taken
            ran = len(logits)
            ids, confidences = self._read(0, ran)
        if not np.isfinite(confidences[:, :count]).all():
            check_ids(batch.tokens, len(self.embedding))
            raise make_not_finite()
        drawn = torch.from_numpy(ids[:, :count].copy()) if tokens is None else tokens
        confidence = torch.from_numpy(confidences[:, :count].copy()) if sampling.worth is not None else None
        if exit is None:
            return DecodedSteps(drawn, logits, probs, confidence=confidence)
        rows = streams[0].split([b - a for a, b in zip(batch.splits, batch.splits[1:], strict=False)])
        pieces = [part for b, row in enumerate(rows) for part in (*stream[b : b + 1], row)]
        return DecodedSteps(drawn, logits, probs, torch.cat(pieces), torch.stack(streams[1:]))

    def _steps(
        self, count: int, rows: int, slots: int, steps: int, layers: int, sampling: StepSampling, exits: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None, list[Tensor]]:
        """Run the passes of `decode_steps`. Returns sampled tokens [K, B] (None if tokens are argmaxes), logits
        [K, B, V], probabilities, and with `exits` the residual stream of the first pass and of each new token."""
        small, dtype = self._small, self.dtype
        logits = torch.empty(steps, count, self.config.vocab_size, device=self.device)
        probs = None if sampling.kind == "maximum" else torch.zeros_like(logits, dtype=torch.float64)
        tokens = None if probs is None else torch.empty(steps, count, dtype=torch.int64, device=self.device)
        streams, reach = list[Tensor](), np.ones(count)
        select = small.inputs.table[SELECT, :count].clone()
        for j in range(steps):
            shape = small.shape(count if j else rows, slots, layers, True)
            small.run(shape)
            if exits:
                streams.append(small.stream[: count if j else rows].to(dtype, copy=True))
            torch.index_select(small.logits, 0, select, out=logits[j])
            if j == 0:
                select = torch.arange(count, device=self.device)
            if probs is not None and tokens is not None:
                tokens[j] = _draw(logits[j], sampling, j, probs[j])
                small.inputs.table[TOKEN, :count] = tokens[j]
            if sampling.worth is not None and j + 1 < steps:
                confidence = self._read(j, 1)[1][0, :count]
                if not np.isfinite(confidence).all():
                    steps = j + 1
                    break
                rates, least = sampling.worth.rates, sampling.worth.least
                classes = np.minimum((confidence * rates.shape[1]).astype(int), rates.shape[1] - 1)
                reach *= rates[np.arange(count), classes]
                if not (reach >= least[:, j]).any():
                    steps = j + 1
                    break
        if exits:  # the last token's keys and values, and its residual stream
            small.run(small.shape(count, slots, layers, True))
            streams.append(small.stream[:count].to(dtype, copy=True))
        kept = (None if each is None else each[:steps] for each in (tokens, probs))
        return next(kept), logits[:steps], next(kept), streams

    def _is_small(self, batch: Batch, extra: int = 0) -> bool:
        """Return True if the kernels can run this batch and `extra` more tokens of each sequence."""
        room = self._tables.shape[1] * BLOCK
        return 0 < batch.splits[-1] <= MOST_ROWS and all(
            stop - start <= MOST_NEW and past + stop - start + extra <= room
            for past, start, stop in zip(batch.past, batch.splits, batch.splits[1:], strict=False)
        )

    def _fill(self, batch: Batch, select: Seq[int], extra: int = 0, sampling: StepSampling = ARGMAX) -> int:
        """Reserve KV slots for the rows and for `extra` further tokens of each sequence, and send the inputs of the
        rows to the device. Returns the number of slots of the longest sequence."""
        inputs, host = self._small.inputs, self._small.inputs.host
        host.fill(0)
        host[SEQ], host[TILE] = -1, -1
        tile = longest = 0
        for b, (seq_id, past) in enumerate(zip(batch.seq_ids, batch.past, strict=True)):
            start, stop = batch.splits[b], batch.splits[b + 1]
            count, tree = stop - start, batch.trees[b]
            self._pool.reserve(seq_id, past, past + count + extra)
            host[SEQ, start:stop], host[INDEX, start:stop] = b, _COUNT[:count]
            host[BITS, start:stop] = _CHAIN[:count] if tree is None else tree.numpy() @ (_ONE << _COUNT[:count])
            host[PAST, b], host[NEXT, b] = past, batch.positions[stop - 1] + 1
            for first in range(start, stop, self._small.tile_rows):
                host[TILE, tile], host[COUNT, tile] = first, min(self._small.tile_rows, stop - first)
                tile += 1
            longest = max(longest, past + count + extra)
        host[POSITION, : len(batch.positions)] = batch.positions
        host[SELECT, : len(select)] = select
        host[PASS, 0], host[PASS, 1] = len(batch.seq_ids), sampling.vocab or self.config.vocab_size
        inputs.inverse.fill(1.0)
        if sampling.inv_temperature is not None:
            given = sampling.inv_temperature.double().cpu().numpy()
            inputs.inverse[: len(given)] = np.where(given < ARGMAX_INV_TEMPERATURE, given, 1.0)
        self._send_tables(batch.seq_ids)
        inputs.send()
        inputs.table[TOKEN, : len(batch.tokens)].copy_(batch.tokens)
        return longest

    def _send_tables(self, seq_ids: Seq[int]) -> None:
        key = (self._pool.version, *seq_ids)
        if key == self._sent:
            return
        tables, host = [self._pool.tables[seq_id] for seq_id in seq_ids], self._tables.numpy()
        for b, table in enumerate(tables):
            host[b, : len(table)] = table
        count, width = len(tables), max(map(len, tables))
        self._small.tables[:count, :width].copy_(self._tables[:count, :width], non_blocking=True)
        self._sent = key

    def _read(self, first: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the device, and return tokens and confidences of `steps` steps from step `first` on. Both are
        [steps, MOST_ROWS] and valid until the next call."""
        part = self._results[first : first + steps]
        part.copy_(self._small.results[first : first + steps], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        values = part.numpy()
        return values[:, 0], values[:, 1].view(np.float64)


_ONE = np.int64(1)
_COUNT = np.arange(MOST_ROWS, dtype=np.int64)
_CHAIN = (_ONE << (_COUNT + 1)) - 1
"""Visibility bits of the rows of a chain: a row sees itself and the rows before it."""


def _draw(logits: Tensor, sampling: StepSampling, j: int, probs: Tensor) -> Tensor:
    """Draw the tokens [B] of step j in float64; writes the distributions that they are drawn from to `probs` [B, V]."""
    x = logits[:, : sampling.vocab].double()
    assert sampling.inv_temperature is not None
    torch.softmax(x * sampling.inv_temperature.to(x)[:, None], -1, out=probs[:, : x.shape[1]])
    if sampling.uniforms is not None:
        return invert(probs[:, : x.shape[1]], sampling.uniforms[j].to(x.device))
    return sampling.pick(x, j)
