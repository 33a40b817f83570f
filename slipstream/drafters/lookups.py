"""What the drafters that look their guesses up share: a state for each sequence, and a record of how matches fared.

A lookup guesses from the sequence's own text, so what it says of one does not depend on the rest of the batch, and
whether its guesses were right is judged by the text that came, whoever drafted it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.odds import Odds


@dataclass(kw_only=True)
class LookupState:
    """What a lookup knows of one sequence. match: length of the match that the last draft began with."""

    odds: Odds
    match: int = 0


S = TypeVar("S", bound=LookupState)


class LookupDrafter(ABC, Generic[S]):
    """Everything of a lookup but the looking up. A state is made by `propose` when first needed: a sequence for which
    speculation is off costs nothing."""

    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._states: dict[int, S] = {}

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for b, seq in enumerate(seqs):
            if seq.id in self._states:
                self._states[seq.id].odds.judge(verdict.run(draft, b))

    def match_length(self, seq_id: int) -> int:
        """See `hybrid.Lookup`."""
        return self._states[seq_id].match if seq_id in self._states else 0

    @abstractmethod
    def continue_from(self, seq: Sequence, guesses: Seq[int], depth: int) -> tuple[list[int], int]:
        """See `hybrid.Lookup`."""

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def _tried(self, seqs: Seq[Sequence], draft: Draft) -> Draft:
        """The draft, noted in the records of the sequences that it guesses for."""
        for b, seq in enumerate(seqs):
            if draft.nodes(b):
                state = self._states[seq.id]
                state.odds.try_out(state.match, draft, b)
        return draft
