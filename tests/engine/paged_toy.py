"""`PagedToy`: the toy target with its KV cache in a pool of blocks. Each slot contains the token for which it was
written. So if a block is reused wrongly, or written while it is shared, the next run finds it."""

import contextlib
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.target import Capabilities, TargetOut
from slipstream.errors import TargetError
from slipstream.kv.blocks import BlockPool
from slipstream.kv.kv_memory import KVMemory
from tests.drafters.fakes import MultiStepToy
from tests.kv.model import Cells


class PagedToy(MultiStepToy):
    """blocks: capacity of the pool; None: the pool grows. faulty: an id; a run with this id as pending token fails."""

    in_one_call, steps_per_call = False, 6

    def __init__(
        self, *args: object, blocks: int | None = None, block: int = 4, faulty: int | None = None, **more: object
    ):
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.cells = Cells(block)
        self.pool = BlockPool(self.cells, blocks, block)
        self.memory = KVMemory(self.pool, contextlib.nullcontext)
        self.faulty = faulty
        self.rows = 0  # number of rows of the last run

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, memory=self.memory)

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        for seq in seqs:
            if seq.kv_len and seq.id not in self._slots:  # the sequence began with cached blocks of an earlier request
                self._slots[seq.id] = self._read(seq.id, seq.kv_len)
            if self._slots.get(seq.id, [])[: seq.kv_len] != (self._read(seq.id, seq.kv_len) if seq.kv_len else []):
                raise AssertionError(f"the blocks of sequence {seq.id} were written by another one")
            if self.faulty in seq.pending:
                raise TargetError(f"token {self.faulty} is pending")
        for b, seq in enumerate(seqs):
            self.pool.reserve(seq.id, seq.kv_len, seq.end + len(draft.nodes(b)))
        self.rows = sum(len(seq.pending) for seq in seqs) + len(draft)
        out = super().run(seqs, draft, taps)
        for seq in seqs:
            self._write(seq.id, seq.kv_len)
        return out

    def decode_steps(
        self, seqs: Seq[Sequence], steps: int, sampling: StepSampling = ARGMAX, *more: Any
    ) -> DecodedSteps:
        for seq in seqs:  # reserve one by one, as executors do: earlier sequences keep their blocks if one does not fit
            self.pool.reserve(seq.id, seq.kv_len, seq.end + steps - 1)
        outputs = super().decode_steps(seqs, steps, sampling, *more)
        for seq in seqs:
            self._write(seq.id, seq.kv_len)
        return outputs

    def commit(self, seqs: Seq[Sequence], path: Seq[Seq[int]]) -> None:
        super().commit(seqs, path)
        for seq in seqs:
            self._write(seq.id, seq.kv_len)

    def fork(self, parent_id: int, child_id: int, length: int) -> None:
        super().fork(parent_id, child_id, length)
        self.pool.fork(parent_id, child_id, length)

    def release(self, seq_id: int) -> None:
        super().release(seq_id)
        self.pool.release(seq_id)

    def _read(self, seq_id: int, length: int) -> list[int]:
        return [self.cells.cells[place] for place in self.pool.places(seq_id, range(length))]

    def _write(self, seq_id: int, first: int) -> None:
        """Write the sequence's tokens to its slots from `first` on."""
        values = self._slots[seq_id]
        for place, value in zip(self.pool.places(seq_id, range(first, len(values))), values[first:], strict=True):
            self.cells.cells[place] = value

    def check(self) -> None:
        """Assert that a block's reference count is the number of tables that contain it, plus one if it is in the
        prefix cache."""
        kept = self.memory._kept.values()
        for block in range(len(self.pool._free)):
            owners = sum(block in table for table in self.pool.tables.values()) + (block in kept)
            assert self.pool.count(block) == owners
            assert self.pool._free[block] == (owners == 0)
