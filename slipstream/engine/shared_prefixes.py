"""`SharedPrefixes`: what requests take over from texts with the same beginning, and leave to later ones."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.core.sequence import Sequence
from slipstream.core.target import Memory
from slipstream.drafters.guard import Guard


class SharedPrefixes:
    """memory: the KV cache; None where nothing is shared. drafter: of the engine.

    queries  prompt tokens that were looked up; hits: those that were found.
    """

    def __init__(self, memory: Memory | None, drafter: Guard):
        self._memory, self._drafter = memory, drafter
        self.queries = self.hits = 0

    def begin(self, seq: Sequence, drafts: bool, again: bool) -> None:
        """Take over the KV of an earlier text with the same beginning; the last token is always read.

        drafts: whether the drafter drafts for the request, and has to begin there, too.
        again: the request ran before and was preempted. What it finds is what it left itself, and is not counted.
        """
        if self._memory is None:
            return
        most = min(len(seq.tokens) - 1, self._drafter.cached_prefix(seq)) if drafts else len(seq.tokens) - 1
        seq.kv_len = self._memory.begin(seq.id, seq.tokens, most)
        if seq.kv_len and drafts:
            self._drafter.begin(seq, seq.kv_len)
        if not again:
            seq.cached = seq.kv_len
            self.queries += len(seq.tokens)
            self.hits += seq.kv_len

    def keep(self, seq: Sequence) -> None:
        """Leave what was computed for a request to later ones."""
        if self._memory is not None and seq.finish != "error":
            self._memory.keep(seq.id, seq.tokens[: seq.kv_len])
            self._drafter.keep(seq)

    def is_being_read(self, seq: Sequence, drafts: bool, reading: Iterable[Sequence]) -> bool:
        """Whether one of these requests reads the next block of this prompt that is not kept yet. What a request has
        read is kept when it has read all of its prompt."""
        if self._memory is None or (drafts and self._drafter.reads_all):
            return False
        block = self._memory.block
        similar = [one.tokens for one in reading if one.tokens[:block] == seq.tokens[:block]]
        if not similar:
            return False
        end = self._memory.match(seq.tokens) + block
        return end < len(seq.tokens) and any(tokens[:end] == seq.tokens[:end] for tokens in similar)
