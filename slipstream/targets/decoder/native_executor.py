"""`NativeExecutor`: decoders like Llama's, Mistral's and Qwen's on a CPU by our own kernels (`slipstream.kernels`).

A pass is one call that knows no shapes beforehand: nothing is readied anew when the number of rows changes, as it does
in nearly every round of speculation. Weights stay in the 16 bits that the checkpoint keeps them in and are widened as
they are used, so arithmetic is float32's at half its memory traffic. A row of logits is the same, bit for bit, however
many rows are beside it: what is verified is exactly what plain decoding would have said.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draws import GREEDY, Draws
from slipstream.errors import TargetError
from slipstream.kernels import decoder
from slipstream.kernels.compiled import readied
from slipstream.targets.decoder.config import DecoderConfig
from slipstream.targets.decoder.executor import Batch, Output, Unrolled, check_settings, check_slice, check_unrolled
from slipstream.targets.decoder.native_paged import NativePaged, Threads, check_sound, picks_of
from slipstream.targets.decoder.native_weights import model_of, nbytes
from slipstream.targets.decoder.weights import Weights


class NativeExecutor(NativePaged):
    """A decoder on the CPU in float32; implements `executor.Executor`. Only for what `native_weights.suits`.

    quantize  None, or "int8": int8 weights per output channel; activations are rounded to 15 bits where they meet them,
              so the model is that of the rounded weights to within 1e-4.
    threads   None: as many as torch has.

    The kernels are compiled here, on a machine that has not done so yet, and not while the first request waits.
    """

    name = "native"
    dtype = torch.float32

    def __init__(
        self, config: DecoderConfig, weights: Weights, quantize: str | None = None, threads: int | None = None
    ):
        check_settings(quantize, threads)
        super().__init__(config.layers, config.kv_heads, config.head_dim)
        self.config, self.quantize, self.device = config, quantize, torch.device("cpu")
        self._model = model_of(config, weights, quantize)
        self._weight_bytes = nbytes(self._model)
        self._threads = Threads(threads, self._weight_bytes)
        self.threads = self._threads.most
        self._padded = self._model.head.values.shape[1]
        with readied():
            token = Batch((0,), torch.zeros(1, dtype=torch.int64), (0,), (0, 1), (0,), (None,), (0,), (2,))
            self.forward(token)
            self._unrolled(token, 1)
        self._forget()

    @property
    def embedding(self) -> np.ndarray:
        """[V, d] in panels, for heads that borrow it."""
        return self._model.embed

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
            decoder.lookup(self._model.embed, batch.tokens.numpy(), x)
        elif hidden is None:
            raise TargetError(f"layers {first}..{last - 1} need the hidden states of the layers below")
        else:
            x[:] = hidden.numpy()
        wanted = np.asarray(batch.select, np.int64)
        tapped = np.empty((len(taps), count, width), np.float32)
        logits = np.empty((len(wanted), self._padded), np.float32)
        alone = layers is None and not taps
        threads, taken = self._threads.of(count), np.asarray(taps, np.int64)
        with Threads.turn(threads):  # whether the logits are finite is asked where they are used
            decoder.forward(
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
        check_sound(sound)
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
        depth, threads = exit or self.config.layers, self._threads.of(batch.splits[-1])
        last, tokens = np.asarray(batch.splits[1:], np.int64) - 1, batch.tokens.numpy()
        picks = picks_of(draws, steps, count, vocab)
        with Threads.turn(threads):
            sound = decoder.draft(
                *(self._model, self._caches(batch), rows, tokens, last, depth, picks),
                *(drawn, logits, laws, stream, later, threads),
            )
        made, raw = torch.from_numpy(drawn), torch.from_numpy(logits)[..., :vocab]
        law = None if draws.kind == "maximum" else torch.from_numpy(laws)
        if exit is None:
            return Unrolled(made, raw, laws=law), sound
        return Unrolled(made, raw, torch.from_numpy(stream), torch.from_numpy(later), law), sound

    def memory(self) -> dict[str, int]:
        """Bytes: "weights" that a pass reads, "kv" of the blocks in use so far."""
        return {"weights": self._weight_bytes, "kv": self._cache.nbytes}
