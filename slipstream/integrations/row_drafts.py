"""`RowDrafts`: lookup drafts for an engine that is not ours, which shows its batch as rows of tokens in each step.

The engine verifies; this only drafts. A row is recognised by the id of its request, wherever it stands in the batch.
Its `Sequence` is made when the request is first seen and grows by the tokens that the engine reports, so a drafter
reads each token once. Drafts hold no probabilities (point masses), as lookups always do, so the engine's output
distribution does not depend on them.

Draft lengths are those of `DraftLengths`. The time of a step is that from the end of one call to the begin of the next,
and it counts only if a request is in both: else the engine may have been idle. Several ranks that must draft alike
cannot use times; there each draft has the full length, and ends where the acceptance rates of its match end it
(`MatchLengthStats`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence as Seq
from dataclasses import dataclass

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.engine.draft_lengths import DraftLengths, Step

NO_LOGITS = TargetOut(torch.empty(0, 0))
"""An engine that is not ours shows none; lookups read none."""
CAUGHT_UP = 64
"""A drafter that reads more new tokens of a request than this catches up: that time is no cost of its drafts."""


@dataclass(frozen=True)
class Request:
    """What is known of a request when it is first seen. prompt: number of its prompt tokens; limit: most tokens that it
    may hold in the end; prediction: tokens that its output is expected to hold."""

    prompt: int
    limit: int
    prediction: Seq[int] = ()


@dataclass(frozen=True)
class Row:
    """A request in a step that has just ended.

    length   its tokens, the new ones included.
    tokens   from one position to another, as a list.
    gained   tokens of this step; 0 while its prompt is read.
    drafted  its draft tokens that were verified in this step. rows: its rows of the forward.
    request  describes it; called once.
    """

    id: str
    length: int
    tokens: Callable[[int, int], list[int]]
    gained: int
    drafted: int
    rows: int
    request: Callable[[], Request]


class RowDrafts:
    """Drafts for the rows of one engine.

    drafter  a lookup, or a stack of lookups.
    most     longest draft.
    context  most tokens that the engine's model can hold.
    timed    whether lengths are chosen by times.
    """

    def __init__(self, drafter: Drafter, most: int, context: int, timed: bool = True,
                 clock: Callable[[], float] = time.perf_counter):  # fmt: skip
        self.drafter, self.most, self.context, self.clock = drafter, most, context, clock
        self.lengths = DraftLengths(most) if timed else None
        self._seqs: dict[str, Sequence] = {}
        self._given: dict[str, int] = {}  # the length that each request of the last call was given
        self._read: dict[str, int] = {}  # how many tokens of each the drafter has read
        self._caught_up = False  # whether it caught up in the last call
        self._ended, self._spent = 0.0, 0.0  # when the last call ended; how long it took

    def __len__(self) -> int:
        """Requests that are remembered."""
        return len(self._seqs)

    def propose(self, rows: Seq[Row], alive: Collection[str]) -> list[list[int]]:
        """Draft tokens for each row, none for prompts that are still being read. alive: ids of all requests that have
        not ended; what is known of others is freed."""
        begin = self.clock()
        seqs = [self._grown(row) for row in rows]
        decoding = [i for i, row in enumerate(rows) if row.gained]
        self._learn(rows, seqs, begin)
        for gone in [key for key in self._seqs if key not in alive]:
            self._free(gone)
        own = [seqs[i] for i in decoding]
        limits = [max(0, min(self.most, seq.room - 1)) for seq in own]
        waiting = sum(row.rows for row in rows if not row.gained)
        ids = [seq.id for seq in own]
        budget = self.lengths.choose(ids, limits, waiting) if self.lengths else limits
        self._given = {row.id: 0 for row in rows}
        drafts: list[list[int]] = [[] for _ in rows]
        self._caught_up = False
        if any(budget):
            draft = self.drafter.propose(own, budget)
            for b, i in enumerate(decoding):
                drafts[i] = draft.ids[draft.splits[b] : draft.splits[b + 1]]
                self._given[rows[i].id] = budget[b]
                if budget[b]:
                    self._caught_up |= rows[i].length - self._read.get(rows[i].id, 0) > CAUGHT_UP
                    self._read[rows[i].id] = rows[i].length
        self._ended = self.clock()
        self._spent = self._ended - begin
        return drafts

    def _grown(self, row: Row) -> Sequence:
        """The sequence of a row, with its new tokens. A text that is not longer than before is one that the engine has
        begun anew."""
        seq = self._seqs.get(row.id)
        if seq is not None and len(seq.tokens) > row.length - row.gained:
            self._free(row.id)
            seq = None
        if seq is None:
            found = row.request()
            before = row.tokens(0, min(found.prompt, row.length))
            seq = Sequence(
                before, SamplingParams(max_tokens=max(1, found.limit - found.prompt)), context=self.context,
                prediction=found.prediction,
            )  # fmt: skip
            self._seqs[row.id] = seq
        seq.tokens.extend(row.tokens(len(seq.tokens), row.length))
        return seq

    def _learn(self, rows: Seq[Row], seqs: Seq[Sequence], begin: float) -> None:
        """Show the drafter what followed its drafts, and the lengths what the step took."""
        own = [i for i, row in enumerate(rows) if row.gained and row.id in self._given and row.rows == 1 + row.drafted]
        shown = [i for i in own if self._given[rows[i].id]]
        if shown:
            runs = [seqs[i].tokens[-rows[i].gained :] for i in shown]
            verified = Draft.chains([run[:-1] for run in runs])
            paths = [list(range(len(run) - 1)) for run in runs]
            plain = [False] * len(shown)
            verdict = Verdict(paths, [run[-1] for run in runs], [None] * len(shown), plain)
            self.drafter.observe([seqs[i] for i in shown], verified, NO_LOGITS, verdict)
        if self.lengths is None or not own:
            return
        if not self.lengths.learning:
            return self.lengths.rest(1)
        self.lengths.learn(
            Step(
                ids=[seqs[i].id for i in own],
                lengths=[self._given[rows[i].id] for i in own],
                nodes=[rows[i].drafted for i in own],
                accepted=[min(rows[i].gained - 1, rows[i].drafted) for i in own],
                draft=self._spent,
                rest=begin - self._ended,
                catching_up=self._caught_up,
                prompt_rows=sum(row.rows for row in rows) - sum(rows[i].rows for i in own),
                read_rows=0,
            )
        )

    def _free(self, key: str) -> None:
        """Forget a request that has ended."""
        seq = self._seqs.pop(key)
        seq.finish = "stop"  # a drafter that remembers finished requests keeps its output
        self._read.pop(key, None)
        self.drafter.release(seq.id)
        if self.lengths is not None:
            self.lengths.release(seq.id)
