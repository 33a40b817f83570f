"""`GgufTarget`: a GGUF model as a `Target`, run by llama.cpp.

A sequence holds one sequence id of llama.cpp. Each further branch of a draft gets an id of its own for one step: it
shares the cells of the text, and the cells of the nodes that it has in common with others. Committing keeps the id
whose branch was accepted, and drops the others; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling, best_steps_per_call
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Runtime, TargetOut
from slipstream.errors import TargetError
from slipstream.models.executor import unknown_ids
from slipstream.targets.decoder import check_finite
from slipstream.targets.gguf.cell_memory import CellMemory
from slipstream.targets.gguf.draft_rows import run_draft
from slipstream.targets.gguf.llama_context import ROWS, LlamaContext
from slipstream.targets.gguf.plain_steps import PlainSteps
from slipstream.targets.gguf.sequence_ids import SequenceIds

if TYPE_CHECKING:
    from slipstream.models.gguf_shape import GgufShape

_NOT_FINITE = "use kv_dtype='float32' if keys overflow in float16, or convert the model again"


class GgufTarget:
    """context: of llama.cpp. shape: of the model."""

    def __init__(self, context: LlamaContext, shape: GgufShape, runtime: Runtime):
        self.config, self._runtime = shape, runtime
        self.vocab_size = context.model.vocab_size
        self.context = min(shape.context, context.cells)
        self.device = torch.device("cpu")
        self.max_pending = ROWS
        self.steps_per_call = best_steps_per_call(sum(context.model.header.stored.values()))
        self._eos_ids = frozenset(shape.eos_ids)
        self.ids = SequenceIds(context)
        self._plain_steps = PlainSteps(self.ids)
        self._memory = CellMemory(self.ids)

    @property
    def capabilities(self) -> Capabilities:
        """See `Target`."""
        experts = self.config.experts
        return Capabilities(
            eos_ids=self._eos_ids,
            multi_step=self,
            runtime=self._runtime,
            memory=self._memory,
            fork=self.ids.fork,
            torch_threads=1,
            experts=(experts.per_token, experts.count) if experts else None,
        )

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """See `Target.run`. Raises TargetError for taps: llama.cpp gives no hidden states."""
        if taps:
            raise TargetError(
                f"hidden states of layers {list(taps)} were asked of a GGUF model",
                why="llama.cpp gives logits only",
                fix="choose a drafter that needs none, or load the model from a folder",
            )
        self._check_ids(token for seq in seqs for token in seq.pending)
        self._check_ids(draft.ids)
        with self._released_after_a_fault(seqs):
            logits = run_draft(self.ids, seqs, draft)
        own = [draft.splits[b] + b for b in range(len(seqs))]
        if not np.isfinite(logits[own, 0]).all():  # numpy takes a tenth of the time of torch here
            check_finite(torch.from_numpy(logits), seqs, draft, _NOT_FINITE)
        return TargetOut(torch.from_numpy(logits))

    def decode_steps(
        self, seqs: Seq[Sequence], steps: int, sampling: StepSampling = ARGMAX, exit: int | None = None
    ) -> DecodedSteps:
        """See `core.target.MultiStep`."""
        self._check_ids(token for seq in seqs for token in seq.pending)
        with self._released_after_a_fault(seqs):
            done = self._plain_steps.run(seqs, steps, sampling)
            if not np.isfinite(done.logits[..., 0].numpy()).all():
                for row in done.logits:
                    check_finite(row, seqs, Draft.empty(len(seqs)), _NOT_FINITE)
        return done

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        for seq, nodes in zip(seqs, path, strict=True):
            self.ids.commit(seq.id, nodes)

    def release(self, seq_id: int) -> None:
        self.ids.release(seq_id)

    @contextmanager
    def _released_after_a_fault(self, seqs: Seq[Sequence]) -> Iterator[None]:
        """llama.cpp may have run some of the rows."""
        try:
            yield
        except BaseException:
            for seq in seqs:
                self.release(seq.id)
            raise

    def _check_ids(self, tokens: Iterable[int]) -> None:
        outside = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise unknown_ids(f"token id {outside} is outside the model's vocabulary of {self.vocab_size}")
