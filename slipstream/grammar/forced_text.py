"""`ForcedText`: finds the tokens of the text that a grammar forces next.

A schema forces names, quotes and brackets, but hardly ever a single token, because several tokens may write the
beginning of the same text. So the grammar is followed byte by byte while only one text can follow. The tokenizer then
splits this text, as a continuation of the last token. Optional white space is predicted from white space earlier in the
output (see `Spacing`). The last token is left out if it depends on the bytes that follow:

    text so far              {"city": "Paris",
    forced                    "unit": "                    then c or f
    its tokens after `,`    ` "`  `unit`  `":`  ` "`      the last token is the same before c and before f

A model often writes forced text in other tokens, or with other white space. So a `ForcedSpelling` remembers the tokens
in which the target wrote a forced text, and these are drafted the next time.

The result is a draft, which the target verifies, so a wrong guess costs time but does not change the output.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.core.structured import Forced
from slipstream.grammar.spacing import Spacing
from slipstream.grammar.symbols import SPECIAL, Symbols
from slipstream.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("slipstream")

AHEAD = 256
"""Largest number of forced bytes that are followed. A grammar may force an endless text."""

REMEMBERED = 2**14
"""Largest number of forced texts of a grammar whose tokens are cached."""

MOST_SPELLINGS = 2**12
"""Largest number of spellings that are remembered; the oldest is forgotten first."""

CERTAIN = 3
"""Largest confidence in a spelling, which needs as many other spellings in a row to be replaced."""

USUAL = b"aA0"
"""Bytes that stand for all bytes that may follow a forced text, if they are allowed. A tokenizer splits a text in the
same way before most bytes, so not all bytes are tried."""

MOST_COMPARED = 4
"""If none of the bytes `USUAL` may follow, this number of other bytes is tried."""

_SPECIAL = re.compile(rb"\xff\[(\d+)\]")
"""How llguidance writes a special token in forced text."""

_WORD = re.compile(rb"[0-9A-Za-z\x80-\xff]*\Z")


ForcedPlace: TypeAlias = tuple[int | None, tuple[int, ...]]
"""The last token of a text, and the symbols that are forced after it."""


@dataclass(slots=True)
class ForcedSpelling:
    """The tokens in which the target probably writes a forced text.

    solid       the forced symbols without white space.
    confidence  how often the target wrote these tokens and not others, up to `CERTAIN`; 0: never.
    """

    solid: tuple[int, ...]
    tokens: tuple[int, ...]
    confidence: int = 0

    def learn(self, tokens: tuple[int, ...]) -> None:
        """Learn in which tokens the target wrote the text."""
        if tokens == self.tokens:
            self.confidence += self.confidence < CERTAIN
        elif self.confidence > 1:
            self.confidence -= 1
        else:
            self.tokens, self.confidence = tokens, 1


class SpelledForm:
    """A grammar that is followed byte by byte. All requests with this grammar share it.

    grammar    an llguidance matcher over `symbols`, at the beginning of the grammar.
    spellings  of forced texts, shared by all forms with these symbols, because most schemas have names in common.
    """

    def __init__(
        self, vocabulary: Vocabulary, symbols: Symbols, grammar: LLMatcher, spellings: dict[ForcedPlace, ForcedSpelling]
    ):
        self.symbols, self.grammar, self.spellings = symbols, grammar, spellings
        self.tokens = lru_cache(REMEMBERED)(self._tokens)
        self._vocabulary = vocabulary
        self._is_told = False
        if grammar.is_error():
            self.tell(grammar.get_error())

    def tell(self, reason: str) -> None:
        """Warn once that forced text is not drafted any more."""
        if not self._is_told:
            self._is_told = True
            line = reason.strip().split("\n")[0]
            log.warning("text that a grammar forces is no longer drafted: %s. The output is not affected.", line)

    def is_open(self, allowed: NDArray[np.bool_]) -> bool:
        """Return whether different bytes may follow besides white space, so that no text is forced. allowed: [V], the
        tokens that may follow. This is quicker than to ask the grammar, and is so within most strings and numbers."""
        return int(np.count_nonzero(allowed.take(self._vocabulary.single_bytes))) > 1

    def spelling(self, place: ForcedPlace, follow: bytes | None) -> ForcedSpelling:
        """Return the spelling of a forced text; before the target has written it, this is the tokenizer's. follow: see
        `_tokens`."""
        known = self.spellings.get(place)
        if known is None:
            if len(self.spellings) >= MOST_SPELLINGS:
                self.spellings.pop(next(iter(self.spellings)), None)
            known = self.spellings[place] = ForcedSpelling(self.symbols.solid(place[1]), self.tokens(*place, follow))
        return known

    def read(self, forced: bytes) -> list[int]:
        """Turn the forced text that llguidance returns into symbols."""
        found, first, at = list[int](), self.symbols.first, 0
        if SPECIAL not in forced:  # the usual case
            return [first + byte for byte in forced]
        for special in _SPECIAL.finditer(forced):
            found += [first + byte for byte in forced[at : special.start()]]
            found.append(int(special[1]))
            at = special.end()
        return found + [first + byte for byte in forced[at:]]

    def _tokens(self, last: int | None, ahead: tuple[int, ...], follow: bytes | None) -> tuple[int, ...]:
        """Return the tokens that write the symbols `ahead` after the token `last`.

        follow  bytes that may come next, as examples; b"": the text ends here; None: unknown.
        """
        tokens, run = list[int](), bytearray()
        for symbol in ahead:
            if symbol >= self.symbols.first:
                run.append(symbol - self.symbols.first)
                continue
            special = self.symbols.token_of[symbol]
            tokens += [*self._split(last, bytes(run)), special]
            last, run = special, bytearray()
        if follow is None:
            return (*tokens, *self._split(last, bytes(run))[:-1])
        ways = [self._split(last, bytes(run), bytes([byte])) for byte in follow] or [self._split(last, bytes(run))]
        common = 0
        while all(len(way) > common and way[common] == ways[0][common] for way in ways):
            common += 1
        found = ways[0][:common]
        if any(_last_word(bytes([byte])) for byte in follow):
            found = self._without_last_word(found, bytes(run))
        return (*tokens, *found)

    def _without_last_word(self, tokens: list[int], text: bytes) -> list[int]:
        """Cut off last tokens that the model may replace by a longer token. `text` ends within a word, and the
        vocabulary may have a token that begins at one of the last tokens and reaches beyond the end of `text`. Returns
        the tokens before the first position where this is possible."""
        written, cut = self._vocabulary.written, len(tokens)
        rest = text[sum(len(written[token]) for token in tokens) :]
        for n in reversed(range(len(tokens))):
            rest = written[tokens[n]] + rest
            if len(rest) > 1 + len(_last_word(text)):  # a word's token includes the space before it
                break
            if self._vocabulary.has_longer(rest):
                cut = n
        return tokens[:cut]

    def _split(self, last: int | None, data: bytes, follow: bytes = b"") -> list[int]:
        """Return the tokens of `data` that are complete if `follow` comes next."""
        written, split = self._vocabulary.written, self._vocabulary.tokens.tokenize_bytes
        before = b"" if last is None or last in self._vocabulary.special else written[last]
        tokens = split(before + data + follow)
        if before:  # the tokenizer may split `before` differently from the model
            tokens = tokens[1:] if tokens[:1] == [last] else split(data + follow)
        complete, at = list[int](), 0
        for token in tokens:
            text = written[token] if token < len(written) else b""
            if not text or data[at : at + len(text)] != text:  # the unknown token does not write the text either
                break
            complete.append(token)
            at += len(text)
        return complete


class ForcedText:
    """Follows the output of one request along its grammar, and keeps the text that is forced next."""

    def __init__(self, form: SpelledForm):
        self._form = form
        self._begin()

    def _begin(self) -> None:
        self._text: list[int] = []
        self._matcher = self._form.grammar.deep_copy()  # has consumed `_text` and `_ahead`
        self._spacing = Spacing()
        self._ahead: list[int] = []  # forced symbols
        self._follow: bytes | None = None  # see `SpelledForm._tokens`
        # Forced texts that are not complete yet, and where they begin.
        self._asked: list[tuple[ForcedSpelling, int]] = []
        self._is_lost = self._matcher.is_error()

    def tokens(self, text: list[int], allowed: NDArray[np.bool_] | None, as_before: bool) -> Forced:
        """Return the tokens that are forced after `text`, which begins where the grammar begins.

        allowed    [V], the tokens that may follow; None: the text is over.
        as_before  whether to return the tokens in which the target usually writes this forced text, and to learn them.
        """
        known = len(self._text)
        if text[:known] != self._text:
            self._begin()
            known = 0
        if len(text) > known:
            self._read(self._form.symbols.of_text(text[known:]))
            if self._asked:
                self._asked = [one for one in self._asked if not self._learn(*one, text)]
        self._text = text
        if allowed is None:
            return Forced()
        if not self._ahead and not self._is_lost and (self._spacing.expect(None) or not self._form.is_open(allowed)):
            self._look_ahead()
        if not self._ahead or self._is_lost:
            return Forced()
        place = text[-1] if text else None, tuple(self._ahead)
        if not as_before:
            return Forced(self._form.tokens(*place, self._follow))
        spelling = self._form.spelling(place, self._follow)
        self._asked.append((spelling, len(text)))
        return Forced(spelling.tokens, spelling.confidence)

    def _learn(self, spelling: ForcedSpelling, at: int, text: list[int]) -> bool:
        """Learn the tokens of the forced text that begins at `text[at]`. White space may differ from the prediction,
        and a last token that reaches beyond the forced text is left out. Return False if the text is not complete."""
        known, solid, done, end = spelling.tokens, spelling.solid, 0, at
        if known and spelling.confidence and tuple(text[at : at + len(known)]) == known:  # the usual case
            spelling.learn(known)
            return True
        while done < len(solid) and end < len(text):
            more = self._form.symbols.solid_of(text[end])
            if solid[done : done + len(more)] != more:
                break
            done, end = done + len(more), end + 1
        if done < len(solid) and end == len(text):
            return False
        spelling.learn(tuple(text[at:end]))
        return True

    def _read(self, symbols: list[int]) -> None:
        """Advance by the symbols of new tokens of the output."""
        if self._is_lost:
            return
        ahead, same = self._ahead, 0
        if symbols == ahead[: len(symbols)]:
            same = len(symbols)
        while same < min(len(symbols), len(ahead)) and symbols[same] == ahead[same]:
            same += 1
        if same < len(symbols):
            if same < len(ahead):
                self._matcher.rollback(len(ahead) - same)
            rest = symbols[same:]
            self._is_lost = self._matcher.try_consume_tokens(rest) < len(rest)
            same = len(ahead)
        self._ahead = ahead[same:]
        self._spacing.read(self._form.symbols.bytes_of(symbols), learns=True)

    def _look_ahead(self) -> None:
        """Collect forced symbols in `_ahead` while only one text can follow."""
        matcher, symbols, spacing = self._matcher, self._form.symbols, self._spacing.copy()
        self._follow, goes_on, is_sure = None, True, False
        while goes_on and len(self._ahead) < AHEAD:
            found = [] if is_sure else self._form.read(matcher.compute_ff_bytes())[:AHEAD]
            is_sure = bool(found)  # nothing but white space can follow what llguidance returns
            if not found and not matcher.is_error():
                allowed = symbols.read_mask(matcher.compute_bitmask())
                only = allowed.only
                gap = spacing.expect(None if only is None else symbols.byte_of(only))
                found = symbols.spaces(allowed, gap) + ([] if only is None else [only])
                goes_on = only is not None
                self._follow = None if goes_on else _pick_bytes(allowed.following)
            count = matcher.try_consume_tokens(found) if found else 0
            if matcher.is_error():
                self._form.tell(matcher.get_error())
                self._is_lost = True
                return
            self._ahead += found[:count]
            spacing.read(symbols.bytes_of(found[:count]))
            goes_on = goes_on and count == len(found)


def _last_word(text: bytes) -> bytes:
    """Return the letters and digits at the end of a text."""
    return _WORD.search(text)[0]  # type: ignore[index]  # the pattern also matches the empty word


def _pick_bytes(following: bytes) -> bytes:
    """Choose a few of the bytes that may follow, which stand for all of them."""
    usual = bytes(byte for byte in USUAL if byte in following)
    return usual or following[:MOST_COMPARED]
