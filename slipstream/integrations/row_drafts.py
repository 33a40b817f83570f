"""Lookup drafts for an engine that is not ours, which shows its batch as rows of tokens in each step.

The engine verifies; this only drafts. A row is recognised by the id of its request, wherever it stands in the batch.
Its `Sequence` grows by the tokens that the engine reports, so a drafter reads each token once. Drafts hold no
probabilities (point masses), so the engine's output distribution does not depend on them.

A draft ends at the first depth whose draft token is not worth its row. A token is accepted with the probability that
the request's own drafts show, depth by depth; at first, with that of all recent drafts. Drafts that were not verified
are compared with the text, too, so a request is drafted for again as soon as it pays. A row costs what the times of
recent steps say, in tokens that the batch gains in that time. A step's time is that from the end of one call to the
begin of the next, if a request is in both: else the engine may have been idle. Several ranks that must draft alike
cannot use times; there a draft ends where the acceptance rates of its match end it (`MatchLengthStats`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.acceptance_stats import DepthStats
from slipstream.engine.step_history import Mean, Times

NO_LOGITS = TargetOut(torch.empty(0, 0))
"""An engine that is not ours shows none; lookups read none."""
FIRST = 2
"""Longest drafts until a row has a cost, where lengths depend on times."""
KNOWN_AT_FIRST = 8.0
"""Steps that recent drafts of all requests count for a new one."""
DEAREST = 0.9
"""A draft token that is accepted with this probability is verified at any cost: times may be those of a bad moment."""
KNOWN = 6
"""Steps that are timed before a row has a cost."""
FORGET, CHEAPEST = 63 / 64, 1e-3
"""A cost that is not measured again falls by this factor in each step, so that drafts are tried again, and measured."""
SHORTEST = 1e-9
"""Seconds that a step takes at least, whatever the clock says."""


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
    timed    whether lengths depend on times.
    """

    def __init__(self, drafter: Drafter, most: int, context: int, timed: bool = True,
                 clock: Callable[[], float] = time.perf_counter):  # fmt: skip
        self.drafter, self.most, self.context, self.timed, self.clock = drafter, most, context, timed, clock
        self._seqs: dict[str, Sequence] = {}
        self._stats: dict[str, DepthStats] = {}
        self._proposed: dict[str, list[int]] = {}  # what the drafter proposed in the last call, by request
        self._all = self._new_stats(fade=255 / 256)
        self._forward, self._seconds, self._gained, self._ended = Times(), Mean(16), Mean(16), 0.0
        self._cost = 0.0
        self._last: set[str] = set()  # requests of the last call

    def __len__(self) -> int:
        """Requests that are remembered."""
        return len(self._seqs)

    def propose(self, rows: Seq[Row], alive: Collection[str]) -> list[list[int]]:
        """Draft tokens for each row, none for prompts that are still being read. alive: ids of all requests that have
        not ended; what is known of others is freed."""
        begin = self.clock()
        seqs = [self._grown(row) for row in rows]
        self._learn(rows, seqs, begin)
        for gone in [key for key in self._seqs if key not in alive]:
            self._free(gone)
        decoding = [i for i, row in enumerate(rows) if row.gained]
        decoded = [seqs[i] for i in decoding]
        limits = [max(0, min(self.most, seq.room - 1)) for seq in decoded]
        drafts: list[list[int]] = [[] for _ in rows]
        self._proposed = {}
        if any(limits):
            draft, cost = self.drafter.propose(decoded, limits), self._row_cost(len(decoded))
            for b, i in enumerate(decoding):
                ids = draft.ids[draft.splits[b] : draft.splits[b + 1]]
                if ids:
                    self._proposed[rows[i].id] = ids
                    drafts[i] = ids[: self._worth(rows[i].id, len(ids), cost)]
        self._last = {row.id for row in rows}
        self._ended = self.clock()
        return drafts

    def _worth(self, key: str, length: int, cost: float) -> int:
        """How many draft tokens of a request are worth their rows."""
        if not cost:
            return min(length, FIRST) if self.timed else length
        likely = self._stats[key].acceptance_by_depth(length)
        return next((depth for depth, chance in enumerate(likely) if chance < cost), length)

    def _row_cost(self, requests: int) -> float:
        """What a further row costs a step of so many requests, in tokens gained in that time; 0 if it is not known."""
        if not self.timed or len(self._forward) < KNOWN:
            return 0.0
        plain, more = self._forward.estimate(np.array([requests, requests + max(4, requests)])).tolist()
        each = max(0.0, more - plain) / max(4, requests)
        now = each * self._gained.value / max(self._seconds.value, SHORTEST)
        self._cost = min(DEAREST, max(now, FORGET * self._cost, CHEAPEST))
        return self._cost

    def _grown(self, row: Row) -> Sequence:
        """The sequence of a row, with its new tokens. A text that is not longer than before is one that the engine has
        begun anew."""
        seq = self._seqs.get(row.id)
        if seq is not None and len(seq.tokens) > row.length - row.gained:
            self._free(row.id)
            seq = None
        if seq is None:
            request = row.request()
            before = row.tokens(0, min(request.prompt, row.length))
            seq = Sequence(
                before, SamplingParams(max_tokens=max(1, request.limit - request.prompt)), context=self.context,
                prediction=request.prediction,
            )  # fmt: skip
            self._seqs[row.id] = seq
            self._stats[row.id] = self._new_stats(fade=31 / 32)
            self._stats[row.id].inherit(self._all, KNOWN_AT_FIRST)
        seq.tokens.extend(row.tokens(len(seq.tokens), row.length))
        return seq

    def _new_stats(self, fade: float) -> DepthStats:
        return DepthStats(self.most, prior=0.7, weight=4.0, fade=fade, restart_below=1e-4)

    def _learn(self, rows: Seq[Row], seqs: Seq[Sequence], begin: float) -> None:
        """Compare what was proposed with what followed, and note what the step took."""
        shown = [i for i, row in enumerate(rows) if row.gained and row.id in self._proposed]
        if shown:
            runs = [seqs[i].tokens[-rows[i].gained :] for i in shown]
            for i, run in zip(shown, runs, strict=True):
                pairs = list(zip(self._proposed[rows[i].id], run, strict=False))
                right = next((n for n, (proposed, token) in enumerate(pairs) if proposed != token), len(pairs))
                for stats in (self._stats[rows[i].id], self._all):
                    stats.learn(right, right < len(pairs))
            verified = Draft.chains([run[:-1] for run in runs])
            paths = [list(range(len(run) - 1)) for run in runs]
            verdict = Verdict(paths, [run[-1] for run in runs], [None] * len(runs), [False] * len(runs))
            self.drafter.observe([seqs[i] for i in shown], verified, NO_LOGITS, verdict)
        decoded = all(row.rows == 1 + row.drafted for row in rows)  # no prompt was read
        if self.timed and decoded and any(row.id in self._last for row in rows):
            self._forward.add(sum(row.rows for row in rows), begin - self._ended)
            self._seconds.add(begin - self._ended)
            self._gained.add(sum(row.gained for row in rows))

    def _free(self, key: str) -> None:
        """Forget a request that has ended."""
        seq = self._seqs.pop(key)
        seq.finish = "stop"  # a drafter that remembers finished requests keeps its output
        del self._stats[key]
        self._proposed.pop(key, None)
        self.drafter.release(seq.id)
