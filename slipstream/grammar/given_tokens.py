"""`GivenTokens`: the form of a text that is known: its tokens are emitted, and their log-probabilities found out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ParameterError


class GivenTokens:
    """See `Constraint`. tokens: the whole text. vocab_size: width V of the target's logits.

    Raises ParameterError for ids outside the vocabulary.
    """

    def __init__(self, tokens: Seq[int], vocab_size: int):
        outside = next((token for token in tokens if token >= vocab_size), None)
        if outside is not None:
            raise ParameterError(f"structured.tokens holds id {outside}, the vocabulary is 0..{vocab_size - 1}")
        self._tokens, self._vocab_size = tuple(tokens), vocab_size

    def allowed(self, output: Seq[int], tails: Seq[Seq[int]]) -> NDArray[np.bool_]:
        """See `Constraint`."""
        rows = np.ones((len(tails), self._vocab_size), np.bool_)
        for row, tail in zip(rows, tails, strict=True):
            at = len(output) + len(tail)
            if at < len(self._tokens) and tuple(tail) == self._tokens[len(output) : at]:
                row[:] = False
                row[self._tokens[at]] = True
        return rows

    def complete(self, output: Seq[int], tail: Seq[int]) -> bool:
        """See `Constraint`."""
        return len(output) + len(tail) >= len(self._tokens)
