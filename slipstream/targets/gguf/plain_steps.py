"""`PlainSteps`: several steps of plain decoding in one call, a token of each sequence a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.decode_steps import DecodedSteps, StepSampling
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.targets.gguf.draft_rows import run_draft
from slipstream.targets.gguf.llama_context import ROWS, Logits
from slipstream.targets.gguf.sequence_ids import SequenceIds


class PlainSteps:
    """ids: who holds which cells."""

    def __init__(self, ids: SequenceIds):
        self._ids = ids
        self._room = np.empty(0, np.float32)

    def run(self, seqs: Seq[Sequence], steps: int, sampling: StepSampling) -> DecodedSteps:
        """See `core.target.MultiStep`. Tokens are drawn in float64. Logits stay valid until the next call."""
        ids, size = self._ids, len(seqs)
        tokens = np.zeros((steps, size), np.int64)  # [K, B]
        logits = self._logits(steps, size)
        probs: list[Tensor] = []
        alike = self._first(seqs, steps, logits[0])
        helds, context = [ids[seq.id] for seq in seqs], ids.context  # it may be a wider one than before
        for j in range(steps):
            if j > 1 or (j and alike):
                logits[j] = context.decode_next(tokens[j - 1])
            elif j:
                logits[j] = context.decode(
                    [(int(t), seq.end, (h.id,), True) for t, h, seq in zip(tokens[0], helds, seqs, strict=True)]
                )
            tokens[j], drawn = _picked(logits[j], sampling, j)
            if drawn is not None:
                probs.append(drawn)
        for seq, held in zip(seqs, helds, strict=True):
            held.cells = held.length = seq.end + steps - 1
        return DecodedSteps(torch.from_numpy(tokens), torch.from_numpy(logits), torch.stack(probs) if probs else None)

    def _first(self, seqs: Seq[Sequence], steps: int, logits: Logits) -> bool:
        """Run what is pending, into logits [B, V]. Returns whether that is one token of each sequence, so that the next
        pass has the same rows."""
        ids = self._ids
        helds = [ids.rolled_back(seq) for seq in seqs]
        rows = [
            (seq.tokens[i], i, (held.id,), i == seq.end - 1)
            for seq, held in zip(seqs, helds, strict=True)
            for i in range(held.length, seq.end)
        ]
        ids.make_room(len(rows) + (steps - 1) * len(seqs))
        if len(rows) > ROWS:
            logits[:] = run_draft(ids, seqs, Draft.empty(len(seqs)))
            for seq in seqs:
                ids.commit(seq.id, ())
        else:
            logits[:] = ids.context.decode(rows)
        return len(rows) == len(seqs)

    def _logits(self, steps: int, batch: int) -> Logits:
        """Memory for logits [K, B, V], the same in each call: fresh memory would cost more than to fill it."""
        width = self._ids.context.model.vocab_size
        size = steps * batch * width
        if len(self._room) < size:
            self._room = np.empty(size, np.float32)
        return self._room[:size].reshape(steps, batch, width)


def _picked(logits: Logits, sampling: StepSampling, j: int) -> tuple[NDArray[np.int64], Tensor | None]:
    """Tokens [B] of step j from logits [B, V], and the distributions [B, V] that they were drawn from, if they were."""
    known = logits[:, : sampling.vocab]
    if sampling.kind == "maximum":
        return known.argmax(-1), None  # the first of equal ones
    scores = torch.from_numpy(known).double()
    if sampling.uniforms is None:
        assert sampling.noise is not None
        return (sampling.scaled(scores) + sampling.noise[j][..., : scores.shape[-1]]).numpy().argmax(-1), None
    drawn, probs = sampling.draw(scores, j)
    tokens = drawn.numpy()
    padding = logits.shape[-1] - probs.shape[-1]
    return tokens, torch.nn.functional.pad(probs, (0, padding)) if padding else probs
