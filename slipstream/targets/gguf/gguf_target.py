"""`GgufTarget`: a GGUF model as a `Target`, run by llama.cpp: for architectures that our own decoder does not run. Its
drafts are chains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, Runtime, TargetOut
from slipstream.errors import TargetError
from slipstream.models.executor import unknown_ids
from slipstream.targets.decoder import check_finite, check_is_chain
from slipstream.targets.gguf.cell_memory import CellMemory
from slipstream.targets.gguf.llama_context import ROWS, LlamaContext, Row

if TYPE_CHECKING:
    from slipstream.models.gguf_header import GgufShape

_NOT_FINITE = "use kv_dtype='float32' if keys overflow in float16, or convert the model again"


class GgufTarget:
    """context: of llama.cpp. shape: of the model. memory: who holds which cells of the context."""

    def __init__(self, context: LlamaContext, shape: GgufShape, runtime: Runtime):
        self.config, self._runtime, self.memory = shape, runtime, CellMemory(context)
        self.vocab_size = context.model.vocab_size
        self.context = min(shape.context, context.cells)
        self.device = torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        """See `Target`."""
        experts = self.config.experts
        return Capabilities(
            eos_ids=frozenset(self.config.eos_ids),
            trees=False,
            runtime=self._runtime,
            memory=self.memory,
            fork=self.memory.fork,
            torch_threads=1,
            experts=(experts.per_token, experts.count) if experts else None,
        )

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        """See `Target.run`. Raises TargetError for a draft with siblings, and for taps: llama.cpp gives no hidden
        states."""
        if taps:
            raise TargetError(
                f"hidden states of layers {list(taps)} were asked of a GGUF model",
                why="llama.cpp gives logits only",
                fix="choose a drafter that needs none, or load the model from a folder",
            )
        check_is_chain(draft)
        self._check_ids(token for seq in seqs for token in seq.pending)
        self._check_ids(draft.ids)
        try:
            logits = self._run(seqs, draft)
        except BaseException:  # llama.cpp may have run some of the rows
            for seq in seqs:
                self.release(seq.id)
            raise
        check_finite(logits, seqs, draft, _NOT_FINITE)
        return TargetOut(logits)

    def _run(self, seqs: Seq[Sequence], draft: Draft) -> Tensor:
        """Logits [B + N, V]."""
        rows: list[Row] = []
        for b, seq in enumerate(seqs):
            cells, chain = self.memory.rolled_back(seq), draft.ids[draft.splits[b] : draft.splits[b + 1]]
            text = [*seq.tokens[cells.cells : seq.end], *chain]
            rows += [(token, i, cells.id, i >= seq.end - 1) for i, token in enumerate(text, start=cells.cells)]
            cells.cells += len(text)
        self.memory.make_room(0)
        logits, at = np.empty((len(seqs) + len(draft), self.vocab_size), np.float32), 0
        for start in range(0, len(rows), ROWS):
            rows_out = self.memory.context.decode(rows[start : start + ROWS])
            logits[at : at + len(rows_out)] = rows_out
            at += len(rows_out)
        return torch.from_numpy(logits)

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        for seq, nodes in zip(seqs, path, strict=True):
            self.memory.cut(seq.id, seq.end + len(nodes))

    def release(self, seq_id: int) -> None:
        self.memory.release(seq_id)

    def _check_ids(self, tokens: Iterable[int]) -> None:
        outside = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise unknown_ids(f"token id {outside} is outside the model's vocabulary of {self.vocab_size}")
