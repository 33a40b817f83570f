"""`FreeText`: the parts of a text that have no form: before the form begins, and between forms that are triggered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.core.structured import Structured
from slipstream.grammar.token_bytes import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

OPENING, REASONING, SEARCHING, UNBOUND = range(4)
"""What a free part is: perhaps the beginning of the reasoning; within it; where the form may begin; free to its end."""

SPACES = tuple(chr(code).encode() for code in range(0x3001) if chr(code).isspace())


@dataclass(frozen=True)
class Place:
    """Where a text stands.

    begin  index in the output from where on all tokens belong to the form; None: in a free part.
    lead   tokens that write what the last free token has already written of the form.
    stage  kind of the free part; held: its last bytes, where they may be the beginning of what ends it.
    """

    begin: int | None
    lead: tuple[int, ...] = ()
    stage: int = SEARCHING
    held: bytes = b""


class FreeText:
    """Finds in bytes what begins the form, `after` or a trigger: it may begin and end within tokens. A token that goes
    on behind it is allowed if the form may begin with the rest.

    Special tokens write nothing, as where texts are shown, but for those that `after` and the trigger name.

    form  a matcher at the beginning of the form.
    """

    def __init__(self, vocabulary: Vocabulary, form: LLMatcher, structured: Structured):
        after, trigger = structured.after, structured.trigger
        self._vocabulary, self._form = vocabulary, form
        self._first, self.repeats = trigger is not None and trigger.first, trigger is not None and trigger.repeats
        self._included = trigger is not None  # whether the mark is part of the form
        texts = trigger.texts if trigger is not None else [] if after is None else [after]
        self._marks = [text.encode() for text in texts]
        begin, end = (trigger and trigger.reasoning) or ("", "")
        self._opening, self._closing = begin.encode(), end.encode()
        self._rows: dict[tuple[int, bytes], NDArray[np.bool_]] = {}
        stage = SEARCHING if not end else OPENING if begin else REASONING
        self.start = Place(None, stage=stage) if self._marks else Place(0)
        if self._marks:
            named = (*self._marks, self._opening, self._closing)
            special = vocabulary.special
            self._written = [
                b"" if token in special and not any(written in mark for mark in named) else written
                for token, written in enumerate(vocabulary.written)
            ]
            last = {mark[-1:] for mark in self._marks}
            self._may_end = [token for token, written in enumerate(self._written) if any(b in written for b in last)]

    def advance(self, place: Place, token: int, index: int) -> Place:
        """The place after one more token, which is at this index of the output."""
        if place.begin is not None:
            return place
        stage, waiting, possible = self._read(place.stage, place.held + self._written[token])
        return Place(None, (), stage, waiting) if possible is None else Place(index + 1, self._tokens(possible))

    def allowed(self, place: Place) -> NDArray[np.bool_]:
        """Which tokens may follow in a free part: [V]."""
        key = place.stage, place.held
        if key not in self._rows:
            row, begins = np.ones(self._vocabulary.size, np.bool_), {b"": True}
            for token in self._may_end:
                possible = self._read(place.stage, place.held + self._written[token])[2]
                if possible is not None and possible not in begins:
                    begins[possible] = self._begins(possible)
                row[token] = possible is None or begins[possible]
            self._rows[key] = row
        return self._rows[key]

    def _read(self, stage: int, text: bytes) -> tuple[int, bytes, bytes | None]:
        """Stage and held bytes after a free part that ends with `text`; and what there is of the form, if it has
        begun."""
        if stage == OPENING:
            text = _stripped(text)
            if _undecided(text, [self._opening]):
                return OPENING, text, None
            stage = SEARCHING
            if text.startswith(self._opening):
                stage, text = REASONING, text[len(self._opening) :]
        if stage == REASONING:
            _, closing, rest = text.partition(self._closing)
            if not closing:
                return REASONING, _held(text, [self._closing]), None
            stage, text = SEARCHING, rest
        if stage == SEARCHING and self._first:
            text = _stripped(text)
            if any(text.startswith(mark) for mark in self._marks):
                return SEARCHING, b"", text
            return (SEARCHING, text, None) if _undecided(text, self._marks) else (UNBOUND, b"", None)
        if stage == SEARCHING:
            places = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
            if places:
                at, mark = min(places)
                return SEARCHING, b"", text[at if self._included else at + len(mark) :]
            return SEARCHING, _held(text, self._marks), None
        return UNBOUND, b"", None

    def _tokens(self, beginning: bytes) -> tuple[int, ...]:
        return tuple(self._vocabulary.tokens.greedy_tokenize(beginning.decode("utf-8"))) if beginning else ()

    def _begins(self, beginning: bytes) -> bool:
        """Whether the form may begin with these bytes."""
        try:
            tokens = self._tokens(beginning)
        except UnicodeDecodeError:  # the beginning of a character, which no tokens of whole text write
            return False
        return self._form.deep_copy().validate_tokens(list(tokens)) == len(tokens)


def _stripped(text: bytes) -> bytes:
    """Without the white space at its beginning."""
    while space := next((each for each in SPACES if text.startswith(each)), b""):
        text = text[len(space) :]
    return text


def _undecided(text: bytes, marks: list[bytes]) -> bool:
    """Whether a text without white space before it may become one that begins with a mark."""
    return any(len(text) < len(each) and each.startswith(text) for each in (*marks, *SPACES))


def _held(text: bytes, marks: list[bytes]) -> bytes:
    """The longest end of a text that is a beginning of a mark, and not all of it."""
    longest = max(map(len, marks)) - 1
    ends = (text[at:] for at in range(max(0, len(text) - longest), len(text)))
    return next((end for end in ends if any(len(end) < len(mark) and mark.startswith(end) for mark in marks)), b"")
