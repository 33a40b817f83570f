"""`Rereader`: runs a draft model on texts whose tokens are another model's.

The draft model has a sequence of its own for each text. Where the text goes on, or its last words are split in another
way, the model's KV cache is kept up to the first id that differs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.models.rereading import Reading, Vocabularies

RESERVE = 64
"""Room for draft tokens in the draft model's context. The same for every text and batch, so that a text is read in the
same way in every company."""


@dataclass
class Held:
    """begin: place in `reading.ids` of the first token that `own` holds, less those that begin every text."""

    reading: Reading
    own: Sequence
    begin: int = 0


class Rereader:
    """model: the draft model, any `Target`. both: its tokens and those of the texts.

    reserve  how many of its own tokens fit into its context after every text.
    """

    def __init__(self, model: Target, both: Vocabularies):
        self.model, self.both = model, both
        self.memory = model.capabilities.memory
        self.reserve = min(RESERVE, model.context // 2)
        self._held: dict[int, Held] = {}
        roles = both.theirs.roles
        self._filler = next((found for role in ("bos", "eos") if (found := roles[role]) is not None), 0)

    def follow(self, seq_id: int, tokens: Seq[int], same: int, cached: bool = False) -> Sequence:
        """The draft model's own sequence for a text, brought up to date; at least its last token is pending. A text
        that fills the model's context is read from a later point on.

        same    how many leading tokens are as they were in the last call for `seq_id`.
        cached  whether the sequence may begin with what the model computed for an earlier text.
        """
        held = self._held.get(seq_id)
        if held is None:
            held = self._held[seq_id] = Held(Reading(self.both), Sequence([], context=self.model.context))
            cached = cached and self.memory is not None
        else:
            cached = False
        kept = held.reading.update(tokens, same)
        ids = held.reading.ids
        begin = self._begin(len(ids))
        if begin != held.begin:
            self.model.release(held.own.id)
            held.own, held.begin, kept = Sequence([], context=self.model.context), begin, 0
        own = held.own
        if begin:
            ids = [*self.both.theirs.begin, *ids[begin + len(self.both.theirs.begin) :]]
            kept = max(0, kept - begin)
        ids = ids or [self._filler]
        if cached:
            assert self.memory is not None
            own.kv_len = self.memory.begin(own.id, ids, len(ids) - 1)
            own.tokens[:] = ids
            return own
        k, most = min(kept, own.kv_len), min(own.kv_len, len(ids), len(own.tokens))
        while k < most and ids[k] == own.tokens[k]:
            k += 1
        own.tokens[k:] = ids[k:]
        own.kv_len = min(k, len(ids) - 1)
        return own

    def open_word(self, seq_id: int) -> int:
        """See `Reading.open_word`."""
        return self._held[seq_id].reading.open_word

    def held(self, seq_id: int) -> Sequence:
        """The sequence that `follow` returned last."""
        return self._held[seq_id].own

    def keep(self, seq_id: int) -> None:
        """Keep the KV of a text for later ones."""
        held = self._held.get(seq_id)
        if held is not None and self.memory is not None and not held.begin:
            self.memory.keep(held.own.id, held.own.tokens[: held.own.kv_len])

    def release(self, seq_id: int) -> None:
        """Forget a text. Unknown ids are ignored."""
        held = self._held.pop(seq_id, None)
        if held is not None:
            self.model.release(held.own.id)

    def _begin(self, length: int) -> int:
        """Where to begin to read a text of so many tokens: each time the context is full, half of it is left out."""
        half = max(1, self.model.context // 2)
        return -(-max(0, length + self.reserve - self.model.context) // half) * half
