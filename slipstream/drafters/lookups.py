"""Base class of lookup drafters: a state for each sequence, and acceptance statistics by length of match.

A lookup drafter finds its draft tokens in the sequence's own text (`Sequence.readable`), so they do not depend on the
rest of the batch. They are compared with the emitted text whether they were verified or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import DrafterTraits
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.acceptance_stats import MatchLengthStats


@dataclass(kw_only=True)
class LookupState:
    """State of one sequence. match: length of the match that the last draft is based on."""

    match_stats: MatchLengthStats
    match: int = 0


S = TypeVar("S", bound=LookupState)


class LookupDrafter(ABC, Generic[S]):
    """A lookup drafter without the lookup itself. device: where the target wants its draft tokens."""

    traits = DrafterTraits(lookup=True, chains_only=True, reads_predictions=True)

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._states: dict[int, S] = {}

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        """A state is created when it is first needed: a sequence for which speculation is off costs nothing."""
        chains: list[Seq[int]] = []
        for seq, depth in zip(seqs, budget, strict=True):
            chains.append(self._chain(self._state(seq), seq, depth) if depth > 0 else ())
        draft = Draft.chains(chains, device=self.device)
        for b, seq in enumerate(seqs):
            if draft.nodes(b):
                state = self._states[seq.id]
                state.match_stats.remember(state.match, draft, b)
        return draft

    @abstractmethod
    def _state(self, seq: Sequence) -> S:
        """The state of a sequence, up to date with its tokens."""

    @abstractmethod
    def _chain(self, state: S, seq: Sequence, depth: int) -> Seq[int]:
        """At most `depth` draft tokens; notes the length of the match in the state."""

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
