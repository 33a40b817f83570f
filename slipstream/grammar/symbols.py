"""`Symbols`: an alphabet of bytes and special tokens, in which llguidance can follow a grammar byte by byte."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.grammar.spacing import SPACES
from slipstream.grammar.vocabulary import Vocabulary, make_tokens

SPECIAL = 0xFF
"""Byte that stands for a special token; it never occurs in UTF-8."""

KEPT = 512
"""Number of masks whose symbols are cached. The same masks occur again at later positions."""


class Allowed(NamedTuple):
    """The symbols that may follow at a position of the text.

    is_allowed  for each byte, whether it may follow.
    only        the only allowed symbol besides white space; None if there is none, or several.
    following   the allowed bytes besides white space.
    """

    is_allowed: Seq[bool]
    only: int | None
    following: bytes


class Symbols:
    """The symbols of one vocabulary. Byte b has the id `first + b`; special tokens have the smallest ids.

    keeps_ids  whether special tokens keep their ids, for grammars that name ids. Otherwise all ids are small, and
               llguidance computes a mask ten times as fast.
    tokens     llguidance's tokenizer that has only these symbols.
    token_of   id of a special symbol -> id of the token.
    """

    def __init__(self, vocabulary: Vocabulary, keeps_ids: bool):
        from llguidance import TokenizerWrapper

        self._written = vocabulary.written
        tokens = sorted(vocabulary.special)
        special = tokens if keeps_ids else list(range(len(tokens)))
        self._special, self.token_of = dict(zip(tokens, special, strict=True)), dict(zip(special, tokens, strict=True))
        self.first = vocabulary.tokens.vocab_size if keeps_ids else len(tokens)
        texts = [b""] * self.first + [bytes([byte]) for byte in range(256)] + [b"<end>"]
        for token, symbol in self._special.items():
            texts[symbol] = self._written[token]
        self.tokens = make_tokens(TokenizerWrapper(_Alphabet(texts, [*special, len(texts) - 1])), slices=[])
        self._ids = np.array([*special, *range(self.first, self.first + 256)])
        self._count = len(special)
        self._spaces = frozenset(self.first + byte for byte in SPACES)
        self._is_solid = ~np.isin(self._ids - self.first, list(SPACES))
        # Masks are reduced to the bytes that may hold a symbol's bit, because their hashes are computed in each step.
        low, high = (special[0] >> 3, (special[-1] >> 3) + 1) if special else (0, 0)
        self._parts = slice(low, high), slice(self.first >> 3, None)
        places = (self._ids >> 3) - low
        self._byte = np.where(self._ids < self.first, places, places - ((self.first >> 3) - high))
        self._bit = (1 << (self._ids & 7)).astype(np.uint8)
        self._read_parts = lru_cache(KEPT)(self._read_bits)
        self.of = lru_cache(None)(self._of)
        self.solid_of = lru_cache(None)(lambda token: self.solid(self.of(token)))

    def _of(self, token: int) -> tuple[int, ...]:
        """Return the symbols of a token."""
        if token in self._special:
            return (self._special[token],)
        return tuple(self.first + byte for byte in (self._written[token] if token < len(self._written) else b""))

    def of_text(self, tokens: Seq[int]) -> list[int]:
        """Return the symbols of several tokens."""
        return [symbol for token in tokens for symbol in self.of(token)]

    def solid(self, symbols: tuple[int, ...]) -> tuple[int, ...]:
        """Return these symbols without white space."""
        spaces = self._spaces
        return tuple(symbol for symbol in symbols if symbol not in spaces)

    def byte_of(self, symbol: int) -> int:
        """Return the byte of a symbol, and the byte `SPECIAL` for a special token."""
        return symbol - self.first if symbol >= self.first else SPECIAL

    def bytes_of(self, symbols: Seq[int]) -> bytes:
        """Return the bytes of symbols, as `byte_of`."""
        first = self.first
        return bytes([symbol - first if symbol >= first else SPECIAL for symbol in symbols])

    def read_mask(self, mask: bytes) -> Allowed:
        """Read a bit mask of llguidance."""
        special, single = self._parts
        return self._read_parts(mask[special] + mask[single])

    def _read_bits(self, bits: bytes) -> Allowed:
        """Read the parts of a bit mask that hold symbols."""
        allowed = (np.frombuffer(bits, np.uint8)[self._byte] & self._bit).astype(np.bool_)
        solid = np.flatnonzero(allowed & self._is_solid)
        following = bytes((solid[solid >= self._count] - self._count).tolist())
        return Allowed(allowed[self._count :].tolist(), self._find_only(solid), following)

    def _find_only(self, solid: NDArray[np.int64]) -> int | None:
        """Return the only symbol at these indices; None if there is none, or several. If the indices are a special
        token and the first byte of its name, return the special token, because no tokenizer spells this name in
        bytes."""
        if len(solid) > 2 or not len(solid):
            return None
        symbol = int(self._ids[solid[0]])
        if len(solid) == 1 or (
            symbol < self.first <= (other := int(self._ids[solid[1]]))
            and self._written[self.token_of[symbol]][0] == other - self.first
        ):
            return symbol
        return None

    def spaces(self, allowed: Allowed, gap: bytes) -> list[int]:
        """Return the symbols of the white space `gap` if it may follow; otherwise []."""
        return [self.first + byte for byte in gap] if all(allowed.is_allowed[byte] for byte in gap) else []


class _Alphabet:
    """The tokenizer for llguidance: one token for each byte and each special token."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, special[-1]

    def __call__(self, text: bytes) -> list[int]:
        return [self.eos_token_id - 256 + byte for byte in text]
