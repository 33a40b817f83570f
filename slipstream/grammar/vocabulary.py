"""`Vocabulary`: the bytes that each token of a model writes, for llguidance."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ParameterError
from slipstream.grammar.spacing import SPACES
from slipstream.tokens.folder_tokenizer import backend_of
from slipstream.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

END = "<|slipstream: end of text|>"
"""Extra end-of-text token for llguidance, which needs such a token and otherwise takes token 0. The model's own tokens
are not used for this, because each request has its own stop ids."""


class Vocabulary:
    """The ids of a target's logits, and the bytes that they write.

    tokens  llguidance's tokenizer. size: width V of the logits; ids from `tokens.vocab_size` on are padding.
    """

    def __init__(self, tokens: LLTokenizer, size: int):
        self.tokens, self.size = tokens, size
        self._ends = [token for token in tokens.eos_tokens if token < size]

    @staticmethod
    def of(tokenizer: Tokenizer | None, size: int) -> Vocabulary:
        """Make the vocabulary of a fast tokenizer of transformers, or a `FolderTokenizer`. Raises ParameterError for
        other tokenizers, and if llguidance is not installed."""
        if tokenizer is None:
            raise _explain_impossible("the target has no tokenizer", "give token ids in logit_bias or bad_words")
        backend = backend_of(tokenizer)
        if backend is None:
            raise _explain_impossible(
                f"the class of its tokenizer is {type(tokenizer).__name__}", "give a fast tokenizer of transformers"
            )
        from tokenizers import AddedToken, Tokenizer as Backend

        copied = Backend.from_str(backend.to_str())
        copied.no_padding()
        copied.no_truncation()
        copied.add_special_tokens([AddedToken(END, special=True)])
        try:
            return Vocabulary(make_tokens(copied.to_str(), eos_token=copied.token_to_id(END)), size)
        except ValueError as fault:  # the bytes of its tokens are unknown
            raise _explain_impossible(
                f"llguidance cannot read the tokenizer ({fault})", "give a tokenizer whose tokens are bytes"
            ) from fault

    @staticmethod
    def of_bytes() -> Vocabulary:
        """Make a vocabulary with one id for each byte, which does not depend on a model. Raises ParameterError if
        llguidance is not installed."""
        tokens = make_tokens("byte")
        return Vocabulary(tokens, tokens.vocab_size)

    def row(self, mask: bytes) -> NDArray[np.bool_]:
        """Convert a bit mask of llguidance to booleans [V], without llguidance's end-of-text token."""
        row = np.zeros(self.size, np.bool_)
        known = min(self.size, 8 * len(mask))
        row[:known] = np.unpackbits(np.frombuffer(mask, np.uint8), count=known, bitorder="little")
        row[self._ends] = False
        return row

    @cached_property
    def written(self) -> list[bytes]:
        """The bytes that each id writes; a special token writes its name. Padding writes nothing."""
        known = min(self.size, self.tokens.vocab_size)
        return [self.tokens.decode_bytes([token]) for token in range(known)] + [b""] * (self.size - known)

    @cached_property
    def single_bytes(self) -> NDArray[np.int64]:
        """One token for each byte that is not white space, if the vocabulary has a token that writes only this byte."""
        found = {text: token for token, text in enumerate(self.written) if len(text) == 1 and text not in SPACES}
        return np.array(sorted(found.values()), np.int64)

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self.written)

    def has_longer(self, text: bytes) -> bool:
        """Return whether some token begins with this text and is longer."""
        at = bisect_right(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)

    @cached_property
    def special(self) -> frozenset[int]:
        known = min(self.size, self.tokens.vocab_size)
        return frozenset(token for token in range(known) if self.tokens.is_special_token(token))


def make_tokens(*given: Any, **named: Any) -> LLTokenizer:
    """Make a tokenizer of llguidance. Raises ParameterError if llguidance is not installed."""
    try:
        from llguidance import LLTokenizer
    except ImportError as fault:
        raise _explain_impossible("llguidance is not installed", "pip install 'slipstream[grammar]'") from fault
    return LLTokenizer(*given, **named)


def _explain_impossible(what: str, fix: str) -> ParameterError:
    return ParameterError(
        f"structured output is not possible with this target: {what}",
        why="a grammar is checked against the bytes of each token",
        fix=fix,
    )
