"""Base class of lookup drafters: a state for each sequence, and acceptance statistics by length of match.

A lookup drafter finds its draft tokens in the sequence's own text (`Sequence.readable`), so they do not depend on the
rest of the batch. They are compared with the emitted text whether they were verified or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import DrafterTraits
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.acceptance_stats import MatchLengthStats


class Index(Protocol):
    """Finds matches in one text."""

    def index(self, tokens: Seq[int]) -> None:
        """Add what is new in the text; `tokens` is all of it."""
        ...


S = TypeVar("S", bound=Index)


@dataclass
class LookupState(Generic[S]):
    """State of one sequence. match: length of the match that the last draft is based on."""

    seq: Sequence
    store: S
    match_stats: MatchLengthStats
    match: int = 0


class LookupDrafter(ABC, Generic[S]):
    """A lookup drafter without the lookup itself. device: where the target wants its draft tokens."""

    traits = DrafterTraits(lookup=True, chains_only=True, reads_predictions=True)

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._states: dict[int, LookupState[S]] = {}

    @abstractmethod
    def _new(self) -> tuple[S, MatchLengthStats]:
        """An empty store for a new sequence, and the record of its matches."""

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        """A state is created when it is first needed: a sequence for which speculation is off costs nothing."""
        chains: list[list[int]] = [[] for _ in seqs]
        for b, (seq, depth) in enumerate(zip(seqs, budget, strict=True)):
            if depth > 0:
                state = self._states.get(seq.id)
                if state is None:
                    state = self._states[seq.id] = LookupState(seq, *self._new())
                state.store.index(seq.readable)
                chains[b], state.match = self.continue_from(seq, (), depth)
        draft = Draft.chains(chains, device=self.device)
        for b, seq in enumerate(seqs):
            if chains[b]:
                state = self._states[seq.id]
                state.match_stats.remember(state.match, draft, b)
        return draft

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for b, seq in enumerate(seqs):
            if seq.id in self._states:
                self._states[seq.id].match_stats.compare(verdict.run(draft, b))

    def match_length(self, seq_id: int) -> int:
        return self._states[seq_id].match if seq_id in self._states else 0

    @abstractmethod
    def continue_from(self, seq: Sequence, drafted: Seq[int], depth: int) -> tuple[list[int], int]:
        """See `core.drafter.Lookup`."""

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
