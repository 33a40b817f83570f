"""`FreeText`: the part of a text before the form begins (the reasoning of a model)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.grammar.token_bytes import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True)
class Place:
    """Where a text stands.

    begin     index in the output from where on all tokens belong to the form; None: still in the free part.
    lead      tokens that write what the last free token wrote after the end of the free part: the form begins so.
    progress  in the free part: how many bytes of its end the text ends with.
    """

    begin: int | None
    lead: tuple[int, ...] = ()
    progress: int = 0


class FreeText:
    """The part of a text up to the first occurrence of `after`, which is found in bytes: it may begin and end within
    tokens. A token that ends it and goes on is allowed if the form may begin with the rest.

    after  None: there is no free part.
    """

    def __init__(self, vocabulary: Vocabulary, form: LLMatcher, after: str | None):
        self._vocabulary, self._form, self._after = vocabulary, form, (after or "").encode()
        self._rows: dict[int, NDArray[np.bool_]] = {}
        self.start = Place(0) if after is None else Place(None)

    def advance(self, place: Place, token: int, index: int) -> Place:
        """The place after one more token, which is at this index of the output."""
        if place.begin is not None:
            return place
        progress, rest = self._read(place.progress, self._vocabulary.written[token])
        return Place(None, progress=progress) if rest is None else Place(index + 1, self._tokens(rest))

    def allowed(self, place: Place) -> NDArray[np.bool_]:
        """Which tokens may follow in the free part: [V]."""
        if place.progress not in self._rows:
            row, begins = np.ones(self._vocabulary.size, np.bool_), {b"": True}
            for token, written in enumerate(self._vocabulary.written):
                rest = self._read(place.progress, written)[1]
                if rest is not None and rest not in begins:
                    begins[rest] = self._begins(rest)
                row[token] = rest is None or begins[rest]
            self._rows[place.progress] = row
        return self._rows[place.progress]

    def _read(self, progress: int, written: bytes) -> tuple[int, bytes | None]:
        """How many bytes of the end the text ends with after `written`; and what follows the end, if it is complete."""
        text = self._after[:progress] + written
        at = text.find(self._after)
        if at >= 0:
            return 0, text[at + len(self._after) :]
        longest = min(len(self._after) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(self._after[:n])), 0), None

    def _tokens(self, rest: bytes) -> tuple[int, ...]:
        return tuple(self._vocabulary.tokens.greedy_tokenize(rest.decode("utf-8"))) if rest else ()

    def _begins(self, rest: bytes) -> bool:
        """Whether the form may begin with these bytes."""
        try:
            tokens = self._tokens(rest)
        except UnicodeDecodeError:  # the beginning of a character, which no tokens of whole text write
            return False
        return self._form.deep_copy().validate_tokens(list(tokens)) == len(tokens)
