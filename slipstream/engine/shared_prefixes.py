"""`SharedPrefixes`: what requests take over from texts with the same beginning, and leave to later ones."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.core.drafter import NoDrafter
from slipstream.core.sequence import Sequence
from slipstream.core.target import Memory
from slipstream.drafters.guard import Guard


class SharedPrefixes:
    """memory: the KV cache; None where nothing is shared.

    queries  prompt tokens that were looked up; hits: those that were found.
    """

    def __init__(self, memory: Memory | None):
        self._memory = memory
        self.queries = self.hits = 0

    def begin(self, seq: Sequence, drafter: Guard | NoDrafter, again: bool) -> None:
        """Take over the KV of an earlier text with the same beginning; the last token is always read.

        again: the request ran before and was preempted. What it finds is what it left itself, and is not counted.
        """
        if self._memory is None:
            return
        most = min(len(seq.tokens) - 1, drafter.cached_prefix(seq))
        seq.kv_len = self._memory.begin(seq.id, seq.tokens, most)
        if seq.kv_len:
            drafter.begin(seq, seq.kv_len)
        if not again:
            seq.cached = seq.kv_len
            self.queries += len(seq.tokens)
            self.hits += seq.kv_len

    def keep(self, seq: Sequence, drafter: Guard | NoDrafter) -> None:
        """Leave what was computed for a request to later ones."""
        if self._memory is not None and seq.finish != "error":
            self._memory.keep(seq.id, seq.tokens[: seq.kv_len])
            drafter.keep(seq)

    def is_being_read(self, seq: Sequence, drafter: Guard | NoDrafter, reading: Iterable[Sequence]) -> bool:
        """Whether one of these requests, which have the same drafter, reads the next block of this prompt that is not
        kept yet. What a request has read is kept when it has read all of its prompt."""
        if self._memory is None or drafter.reads_all:
            return False
        block = self._memory.block
        others = [one.tokens for one in reading if one.tokens[:block] == seq.tokens[:block]]
        if not others:
            return False
        end = self._memory.match(seq.tokens) + block
        return end < len(seq.tokens) and any(tokens[:end] == seq.tokens[:end] for tokens in others)
