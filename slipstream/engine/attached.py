"""`Attached`: the drafter of a step in which some requests decode without it, as plain ones do.

Those that it drafts for are first in the batch, so that what the target returned for them is a part of its arrays,
without copies.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter, read_prompts
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut


class Attached:
    """drafter: what drafts. gaining, reading: how many of the requests that gain tokens, and of those that read a chunk
    of their prompt, it drafts for."""

    def __init__(self, drafter: Drafter, gaining: int, reading: int):
        self._drafter, self._gaining, self._reading = drafter, gaining, reading
        self.name, self.traits = drafter.name, drafter.traits

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        count = self._gaining
        return self._drafter.propose(seqs[:count], budget[:count]).padded(len(seqs) - count)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        members = range(self._gaining)
        shown = draft.part(members), out.part(0, len(members), draft), verdict.part(members)
        if members:
            self._drafter.observe(seqs[: len(members)], *shown)

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        if self._reading:
            undrafted = Draft.empty(len(seqs))
            read_prompts(self._drafter, seqs[: self._reading], out.part(0, self._reading, undrafted))

    def release(self, seq_id: int) -> None:
        self._drafter.release(seq_id)
