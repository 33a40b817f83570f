"""`Engine`: a queue of requests over one target, one drafter and one rule.

    engine.add(seq)             the request waits
    while engine.unfinished:
        batch = engine.step()   requests join, one step runs, finished requests leave

A request keeps the drafter, the rule and the draft length of its engine from its first token to its last.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import AbstractContextManager

from slipstream.core.drafter import Drafter, remembers
from slipstream.core.plain import plain_steps
from slipstream.core.rules import Rule
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import Target
from slipstream.core.turns import Turns

_nonces = itertools.count()
"""Of this process, because several engines may share a drafter. In order, so that a program repeats its texts."""


class Engine:
    """Decodes requests, several at a time.

    drafter       guarded: its faults must not end a request (see `drafters.guard`).
    draft_tokens  most draft tokens a step (K); a request may ask for fewer.
    max_batch     most requests in one step; more wait.
    lock          held during each step: targets and drafters are not made for two Python threads at once. Engines that
                  share a target share a lock.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rule: Rule,
        draft_tokens: int,
        max_batch: int,
        lock: AbstractContextManager[object] | None = None,
    ):
        self.target, self.drafter, self.rule = target, drafter, rule
        self.draft_tokens, self.max_batch = draft_tokens, max_batch
        self._remembers = remembers(drafter)  # checks of protocols take 0.2 ms: not for each request
        self._lock = lock or Turns()
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Queue a request; it joins the batch as soon as there is room.

        What a drafter remembers of earlier requests depends on their random numbers. With the same seed, verification
        would decide on such a draft with the numbers that made it, and the text would not have the target's
        distribution. So each request for such a drafter draws other numbers. Under `coupled` drafts do not matter.
        """
        seq.coupled, seq.lossless = self.rule.name == "coupled", self.rule.lossless
        if self._remembers and not seq.coupled:
            seq.random.nonce = next(_nonces)
        self._waiting.append(seq)

    @property
    def unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._active)

    def step(self) -> list[Sequence]:
        """Advance the batch by one step, or by several where nothing is drafted (see `core.plain`). Returns the
        requests that ran; those with `finish` have left. Raises what the target raises: then the batch is as it was."""
        while self._waiting and len(self._active) < self.max_batch:
            self._active.append(self._waiting.popleft())
        batch = self._active
        with self._lock:
            if not plain_steps(batch, self.target, self.drafter, self.rule, self.draft_tokens):
                step(batch, self.target, self.drafter, self.rule, self.draft_tokens)
            for seq in batch:
                if seq.finish:
                    self._release(seq)
        self._active = [seq for seq in batch if not seq.finish]
        return batch

    def abort(self, seq: Sequence) -> None:
        """Forget a request and free what it holds, whether it waits, runs or is unknown."""
        if seq in self._waiting:
            self._waiting.remove(seq)
        elif seq in self._active:
            self._active.remove(seq)
            with self._lock:
                self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self.target.release(seq.id)
        self.drafter.release(seq.id)
