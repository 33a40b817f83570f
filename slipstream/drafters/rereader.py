"""`Rereader`: a draft model's sequences for texts whose tokens are another model's.

Where a text goes on, or its last words are split in another way, the draft model's KV cache is kept up to the first id
that differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.models.rereading import Reading, Vocabularies

RESERVE = 64
"""Room for draft tokens in the draft model's context. The same for every text and batch, so that a text is read in the
same way in every batch."""


@dataclass
class Text:
    """known: how many of the target's tokens have been read. begin: place in `reading.ids` of the first token of
    `sequence`, less those that begin every text."""

    reading: Reading
    sequence: Sequence
    known: int = 0
    begin: int = 0


class Rereader:
    """model: the draft model, any `Target`. vocabularies: its tokens and those of the texts.

    reserve  how many of the draft model's tokens fit into its context after every text.
    """

    def __init__(self, model: Target, vocabularies: Vocabularies):
        self.model, self.vocabularies = model, vocabularies
        self.memory = model.capabilities.memory
        self.reserve = min(RESERVE, model.context // 2)
        self._texts: dict[int, Text] = {}
        roles = vocabularies.draft.roles
        self._filler = next((id_ for role in ("bos", "eos") if (id_ := roles[role]) is not None), 0)

    def follow(self, seq: Sequence, length: int) -> Sequence:
        """The draft model's sequence for the first `length` tokens of a text, brought up to date; at least its last
        token is pending. A new text may begin with what was computed for an earlier one. A text that fills the draft
        model's context is read from a later point on."""
        text = self._texts.get(seq.id)
        cached = text is None and seq.prefix_cache and self.memory is not None
        if text is None:
            text = self._texts[seq.id] = Text(Reading(self.vocabularies), Sequence([], context=self.model.context))
        kept = text.reading.update(seq.tokens[:length], text.known)
        text.known = length
        ids = text.reading.ids
        begin = self._begin(len(ids))
        if begin != text.begin:
            self.model.release(text.sequence.id)
            text.sequence, text.begin, kept = Sequence([], context=self.model.context), begin, 0
        sequence = text.sequence
        if begin:
            ids = [*self.vocabularies.draft.begin, *ids[begin + len(self.vocabularies.draft.begin) :]]
            kept = max(0, kept - begin)
        ids = ids or [self._filler]
        if cached:
            assert self.memory is not None
            sequence.kv_len = self.memory.begin(sequence.id, ids, len(ids) - 1)
            sequence.tokens[:] = ids
            return sequence
        k, most = min(kept, sequence.kv_len), min(sequence.kv_len, len(ids), len(sequence.tokens))
        while k < most and ids[k] == sequence.tokens[k]:
            k += 1
        sequence.tokens[k:] = ids[k:]
        sequence.kv_len = min(k, len(ids) - 1)
        return sequence

    def open_word(self, seq_id: int) -> int:
        """See `Reading.open_word`."""
        return self._texts[seq_id].reading.open_word

    def keep(self, seq_id: int) -> None:
        """Keep the KV of a text for later ones."""
        text = self._texts.get(seq_id)
        if text is not None and self.memory is not None and not text.begin:
            self.memory.keep(text.sequence.id, text.sequence.tokens[: text.sequence.kv_len])

    def release(self, seq_id: int) -> None:
        """Forget a text. Unknown ids are ignored."""
        text = self._texts.pop(seq_id, None)
        if text is not None:
            self.model.release(text.sequence.id)

    def _begin(self, length: int) -> int:
        """Where to begin to read a text of so many tokens: each time the context is full, half of it is left out."""
        half = max(1, self.model.context // 2)
        return -(-max(0, length + self.reserve - self.model.context) // half) * half
