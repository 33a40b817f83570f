"""`MixedDrafters`: the drafters of a batch whose requests do not all have the same one, as one drafter.

The requests of one drafter are next to each other in the batch, so that what the target returned for them is a part of
its arrays, without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from itertools import groupby
from time import perf_counter

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter, read_prompts
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.hybrid import joint_taps


class MixedDrafters:
    """of: the drafter of each sequence; everyone: the sequences of the step, whose drafters' taps are joined.

    seconds  that each drafter has taken so far, by its `id`.
    """

    name = "several"

    def __init__(self, of: Callable[[Sequence], Drafter], everyone: Seq[Sequence]):
        self._of = of
        self.seconds: dict[int, float] = {}
        self.taps = joint_taps(map(of, everyone))

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        drafts = []
        for drafter, first, last in self._groups(seqs):
            with self._timed(drafter):
                drafts.append(drafter.propose(seqs[first:last], budget[first:last]))
        return Draft.joined(drafts) if drafts else Draft.empty(0)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for drafter, first, last in self._groups(seqs):
            members = range(first, last)
            own = draft.part(members), out.part(first, last, draft), verdict.part(members)
            with self._timed(drafter):
                drafter.observe(seqs[first:last], *own)

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        """See `PromptReader`."""
        undrafted = Draft.empty(len(seqs))
        for drafter, first, last in self._groups(seqs):
            with self._timed(drafter):
                read_prompts(drafter, seqs[first:last], out.part(first, last, undrafted))

    def release(self, seq_id: int) -> None:
        raise NotImplementedError("the engine releases each request at its own drafter")

    @contextmanager
    def _timed(self, drafter: Drafter) -> Iterator[None]:
        began = perf_counter()
        yield
        self.seconds[id(drafter)] = self.seconds.get(id(drafter), 0.0) + perf_counter() - began

    def _groups(self, seqs: Seq[Sequence]) -> list[tuple[Drafter, int, int]]:
        """(drafter, first, last): each drafter's sequences are first..last-1."""
        found, first = [], 0
        for _, members in groupby(seqs, key=lambda seq: id(self._of(seq))):
            last = first + sum(1 for _ in members)
            found.append((self._of(seqs[first]), first, last))
            first = last
        return found
