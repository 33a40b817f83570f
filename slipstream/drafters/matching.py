"""What `suffix` and `sam` share: both find the longest end of the text that occurred before and draft what followed.

They keep different indexes, because they look for different things. `suffix` needs how often each continuation
occurred, up to a depth: a suffix tree with counts. `sam` needs the latest occurrence of the longest match of any
length: a suffix automaton. Neither can give the other's drafts: counts in an automaton would have to be updated along
all links for every token, and a tree of bounded depth cuts long matches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from slipstream.core.draft import Draft
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.drafters.acceptance_stats import MatchLengthStats
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.lookups import LookupDrafter, LookupState
from slipstream.errors import ParameterError

END = -1  # marks the end of a document in a text
RECORDS = 16  # longer matches share one acceptance record


@dataclass(frozen=True)
class MatchConfig(Strict):
    """The options that both have; their own classes document them."""

    min_match: int = 1
    max_draft: int = 16
    spec_factor: float = 4.0
    row_cost: float = 0.05
    max_tokens: int = 1 << 17

    def __post_init__(self) -> None:
        for name, low in (("min_match", 1), ("max_draft", 1), ("max_tokens", 2)):
            check_integer(name, getattr(self, name), low)
        check_number("spec_factor", self.spec_factor, 0.0, 1000.0)
        check_number("row_cost", self.row_cost, 0.0, 0.7)
        if self.max_draft > MAX_NODES:
            raise ParameterError(f"max_draft is {self.max_draft}, at most {MAX_NODES} draft tokens are verified")


@dataclass(frozen=True)
class Continuation:
    """A tree of draft tokens for one sequence, after a match of `match` tokens; `score` is the expected number that
    are accepted."""

    match: int = 0
    score: float = 0.0
    tokens: Seq[int] = ()
    parents: Seq[int] = ()

    @staticmethod
    def chain(match: int, tokens: Seq[int]) -> Continuation:
        return Continuation(match, 0.0, tokens, range(-1, len(tokens) - 1))


@dataclass
class MatchState(LookupState):
    """index: of the sequence's text, with `extend(tokens)`; indexed: how many of its tokens are in there."""

    seq: Sequence
    index: Any
    indexed: int = 0


C = TypeVar("C", bound=MatchConfig)


class MatchDrafter(LookupDrafter[MatchState], Generic[C]):
    """device: where the target wants its draft tokens."""

    def __init__(self, config: C, device: torch.device | str = "cpu"):
        super().__init__()
        self.config = config
        self.device = device

    @abstractmethod
    def _index(self, seq: Sequence) -> Any:
        """An index for one sequence, without its tokens."""

    @abstractmethod
    def _best(self, state: MatchState, depth: int, ahead: Seq[int] = ()) -> Continuation:
        """What follows the longest match, up to `depth` deep. ahead: tokens taken to follow the text; then a chain."""

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        splits = [0]
        for seq, depth in zip(seqs, budget, strict=True):
            if depth > 0:
                state = self._state(seq)
                best = self._best(state, min(depth, self.config.max_draft))
                state.match = best.match
                tokens += best.tokens
                parents += best.parents
            splits.append(len(tokens))
        return self._remembered(seqs, Draft.of(tokens, parents, splits, device=self.device))

    def continue_from(self, seq: Sequence, drafted: Seq[int], depth: int) -> tuple[list[int], int]:
        """See `core.drafter.Lookup`."""
        best = self._best(self._states[seq.id], min(depth, self.config.max_draft), drafted)
        return list(best.tokens), best.match

    def _state(self, seq: Sequence) -> MatchState:
        """The state of a sequence, up to date with its tokens."""
        state = self._states.get(seq.id)
        if state is None:
            state = MatchState(seq, self._index(seq), match_stats=MatchLengthStats(self.config.row_cost, RECORDS))
            self._states[seq.id] = state
        text = seq.readable
        state.index.extend(text[state.indexed :])
        state.indexed = len(text)
        return state
