"""Lookup drafts for another engine, whose batch is given as rows of tokens in each step.

The engine verifies; this module only drafts. A row is recognised by its request id, wherever it is in the batch. Its
`Sequence` grows by the tokens that the engine reports, so a drafter reads each token once. Drafts have no probabilities
(point masses), so the engine's output distribution does not depend on them.

A draft ends where verifying a further token costs too much (see `drafters.lookups`). Drafts are compared with the text
even if they were not verified. The cost of a row comes from the times of recent steps, in tokens that the batch gains
in that time. The time of a step is from the end of one call to the beginning of the next, if a request is in both;
otherwise the engine may have been idle. Several ranks, which must draft alike, use the drafter's option `row_cost`.
"""

import time
from collections.abc import Callable, Collection, Sequence as Seq
from dataclasses import dataclass

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.engine.step_history import SHORTEST, Mean, StepTimes

NO_LOGITS = TargetOut(torch.empty(0, 0))
"""The logits of another engine's step: it shows none, and lookups read none."""
FIRST = 2
"""Longest draft before the cost of a row is known, if lengths depend on times."""
DEAREST = 0.9
"""Upper bound of a row's cost, because the times may come from a moment in which the machine was slow."""
KNOWN = 6
"""Number of timed steps from which the cost of a row is known."""
FORGET, CHEAPEST = 63 / 64, 1e-3
"""Factor by which an old cost falls in each step, so that drafts are tried again; and its lower bound."""


@dataclass(frozen=True)
class RowRequest:
    """Describes a request when it first appears. prompt: number of its prompt tokens. limit: largest number of tokens
    that it may have at the end. prediction: tokens that its output is expected to contain."""

    prompt: int
    limit: int
    prediction: Seq[int] = ()


@dataclass(frozen=True)
class Row:
    """A request in the step that has just ended.

    length   number of its tokens, including new tokens.
    tokens   function that returns its tokens from one position to another, as a list.
    gained   number of tokens from this step; 0 while its prompt is read.
    drafted  number of its draft tokens that were verified in this step. rows: number of its rows in the forward pass.
    request  function that describes the request; called once.
    """

    id: str
    length: int
    tokens: Callable[[int, int], list[int]]
    gained: int
    drafted: int
    rows: int
    request: Callable[[], RowRequest]


class RowDrafts:
    """Drafts for the rows of one engine.

    drafter  a lookup, or a stack of lookups.
    most     longest draft.
    context  largest number of tokens in the context of the engine's model.
    timed    whether draft lengths depend on times.
    """

    def __init__(self, drafter: Drafter, most: int, context: int, timed: bool = True,
                 clock: Callable[[], float] = time.perf_counter):  # fmt: skip
        self.drafter, self.most, self.context, self.timed, self.clock = drafter, most, context, timed, clock
        self._seqs: dict[str, Sequence] = {}
        self._asked: set[str] = set()  # requests that could draft in the last call
        self._forward, self._seconds, self._gained, self._ended = StepTimes(), Mean(16), Mean(16), 0.0
        self._cost = 0.0
        self._last: set[str] = set()  # ids of all requests of the last call

    def __len__(self) -> int:
        """Number of requests with a state."""
        return len(self._seqs)

    def propose(self, rows: Seq[Row], alive: Collection[str]) -> list[list[int]]:
        """Return draft tokens for each row, none for prompts that are still being read. alive: ids of all requests that
        have not ended; the state of other requests is freed."""
        begin = self.clock()
        seqs = [self._grow(row) for row in rows]
        self._learn(rows, seqs, begin)
        for gone in [key for key in self._seqs if key not in alive]:
            self._free(gone)
        decoding = [i for i, row in enumerate(rows) if row.gained]
        decoded = [seqs[i] for i in decoding]
        cost = self._price_row(len(decoded))
        most = FIRST if self.timed and not cost else self.most
        budgets = [Budget(max(0, min(most, seq.room - 1)), (cost,) if cost else ()) for seq in decoded]
        drafts: list[list[int]] = [[] for _ in rows]
        self._asked = {rows[i].id for i, budget in zip(decoding, budgets, strict=True) if budget.depth}
        if self._asked:
            draft = self.drafter.propose(decoded, budgets)
            for b, i in enumerate(decoding):
                drafts[i] = draft.ids[draft.splits[b] : draft.splits[b + 1]]
        self._last = {row.id for row in rows}
        self._ended = self.clock()
        return drafts

    def _price_row(self, requests: int) -> float:
        """Return the cost of one more row in a step of this many requests, in tokens per step time; 0 if unknown."""
        if not self.timed or self._forward.steps < KNOWN:
            return 0.0
        plain, more = map(self._forward.at, (requests, requests + max(4, requests)))
        each = max(0.0, more - plain) / max(4, requests)
        now = each * self._gained.value / max(self._seconds.value, SHORTEST)
        self._cost = min(DEAREST, max(now, FORGET * self._cost, CHEAPEST))
        return self._cost

    def _grow(self, row: Row) -> Sequence:
        """Return the sequence of a row, with its new tokens. If the text did not grow, the engine has restarted the
        request."""
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
        seq.tokens.extend(row.tokens(len(seq.tokens), row.length))
        return seq

    def _learn(self, rows: Seq[Row], seqs: Seq[Sequence], begin: float) -> None:
        """Let the drafter compare its drafts with the text, and record the time of the step."""
        shown = [i for i, row in enumerate(rows) if row.gained and row.id in self._asked]
        if shown:
            runs = [seqs[i].tokens[-rows[i].gained :] for i in shown]
            verified = Draft.chains([run[:-1] for run in runs])
            paths = [list(range(len(run) - 1)) for run in runs]
            verdict = Verdict(paths, [run[-1] for run in runs], [None] * len(runs), [False] * len(runs))
            self.drafter.observe([seqs[i] for i in shown], verified, NO_LOGITS, verdict)
        decoded = all(row.rows == 1 + row.drafted for row in rows)  # no prompt was read
        if self.timed and decoded and any(row.id in self._last for row in rows):
            count = sum(row.rows for row in rows)
            self._forward.add(count, begin - self._ended)
            self._seconds.add(self._forward.of(count))
            self._gained.add(sum(row.gained for row in rows))

    def _free(self, key: str) -> None:
        seq = self._seqs.pop(key)
        seq.finish = "stop"  # so that a drafter can remember the output
        self._asked.discard(key)
        self.drafter.release(seq.id)
