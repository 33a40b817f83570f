"""`SharedTokens`: which tokens of two vocabularies stand for the same text."""

from __future__ import annotations

import logging
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import PairError
from slipstream.models.token_texts import ROLES, TokenTexts

log = logging.getLogger("slipstream")

FEW = 0.1
"""Below this share of the target's tokens a warning is logged: the others cannot be drafted."""


class SharedTokens:
    """Tokens of `ours` (the target's) and `theirs` (the draft model's) that write the same bytes, and special tokens
    with the same text or the same role. Each token has at most one counterpart.

    width  of the logits of the target and of the draft model: ids beyond them are never predicted.
    """

    def __init__(self, ours: TokenTexts, theirs: TokenTexts, width: tuple[int, int]):
        self.width = width
        self.sizes = len(ours.written), len(theirs.written)
        pairs = [
            (id_, their_id) for data, id_ in ours.id_of.items() if (their_id := theirs.id_of.get(data)) is not None
        ]
        self.texts = len(pairs)
        pairs += [(ours.special[name], theirs.special[name]) for name in ours.special.keys() & theirs.special.keys()]
        for role in ROLES:
            mine, other = ours.roles[role], theirs.roles[role]
            if mine is not None and other is not None:
                pairs = [pair for pair in pairs if mine != pair[0] and other != pair[1]]
                pairs.append((mine, other))
        found = sorted(pair for pair in pairs if pair[0] < width[0] and pair[1] < width[1])
        self.ours: NDArray[np.int64] = np.array([pair[0] for pair in found], np.int64)  # [S], ascending
        self.theirs: NDArray[np.int64] = np.array([pair[1] for pair in found], np.int64)  # [S]

    @cached_property
    def to_theirs(self) -> dict[int, int]:
        """Id of the target's -> id of the draft model's."""
        return dict(zip(self.ours.tolist(), self.theirs.tolist(), strict=True))

    @cached_property
    def to_ours(self) -> dict[int, int]:
        """Id of the draft model's -> id of the target's."""
        return dict(zip(self.theirs.tolist(), self.ours.tolist(), strict=True))

    @property
    def shares(self) -> tuple[float, float]:
        """Which share of the target's and of the draft model's tokens the other model has, too."""
        ours, theirs = (len(self.ours) / max(1, size) for size in self.sizes)
        return ours, theirs

    def __str__(self) -> str:
        ours, theirs = self.shares
        return (
            f"{len(self.ours)} tokens are shared, {ours:.0%} of the target's {self.sizes[0]} and {theirs:.0%} of the "
            f"draft model's {self.sizes[1]}"
        )

    def require_some(self) -> None:
        """Raise PairError if no token that writes text is shared; log a warning if few are."""
        if not self.texts or not len(self.ours):
            raise PairError(
                f"target and draft model share no token that writes text: {self}",
                why="draft_tokenizer='intersection' drafts shared tokens only",
                fix="set draft_tokenizer='string', which compares texts, or use another draft model",
            )
        if self.shares[0] < FEW:
            log.warning("%s: few draft tokens will be accepted; draft_tokenizer='string' needs no shared tokens", self)
