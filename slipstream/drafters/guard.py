"""`Guard`: a faulty drafter cannot change the text.

Verification makes every *well-formed* draft lossless. The guard handles the rest: a drafter that raises, or returns an
invalid draft, only costs speed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.errors import DraftError

log = logging.getLogger("slipstream")

MAX_NODES = 256
"""Most draft tokens for one sequence in one step; a drafter that proposes more is faulty."""


class Guard:
    """Wraps a drafter. After a fault the step continues with plain decoding, the fault is counted for every sequence of
    the batch, and the first one is logged."""

    def __init__(self, drafter: Drafter, target: Target):
        self.drafter, self.target = drafter, target
        self.name, self.taps = drafter.name, drafter.taps
        self.faults = 0

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        if any(budget):
            try:
                draft = self.drafter.propose(seqs, budget)
                draft.check(budget, self.target.vocab_size, MAX_NODES)
                if not (draft.is_chain or self.target.capabilities.trees):
                    raise DraftError("a tree was drafted for a target that runs chains only")
                return draft
            except Exception as fault:  # no fault of a drafter may leave the guard
                self._count(seqs, "propose", fault)
        return Draft.empty(len(seqs), self.target.device)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        try:
            self.drafter.observe(seqs, draft, out, verdict)
        except Exception as fault:
            self._count(seqs, "observe", fault)

    def release(self, seq_id: int) -> None:
        try:
            self.drafter.release(seq_id)
        except Exception as fault:
            self._count((), "release", fault)

    def _count(self, seqs: Seq[Sequence], where: str, fault: Exception) -> None:
        self.faults += 1
        first = self.faults == 1
        for seq in seqs:
            seq.stats.drafter_faults += 1
            self.release(seq.id)  # start with a new state: the old one is unknown after a fault
        if first:
            kind = "" if isinstance(fault, DraftError) else f"{type(fault).__name__}: "
            log.warning(
                "drafter %r failed in %s (%s%s). Falling back to plain decoding; the text is not affected. "
                "Further faults are counted, not logged.",
                self.name,
                where,
                kind,
                fault,
            )
