"""Base class of lookup drafters: a state for each sequence, and where a draft ends.

A lookup drafter finds its draft tokens in the sequence's own text (`ReadableText`), so they do not depend on the
rest of the batch. Each token that followed a match has a probability to be accepted: the share of the occurrences that
went on with it, times what matches of this length are worth (`MatchLengthStats`). The draft ends where the product of
these falls below the cost of verifying one more row, as a share of a plain step.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, DrafterTraits
from slipstream.core.sequence import Sequence, source_of
from slipstream.core.target import TargetOut
from slipstream.drafters.acceptance_stats import MatchLengthStats

ROW_COST = 0.15
"""Cost of verifying one more row, as a share of a plain step, where it is not measured. That of SmolLM2 on two cores is
0.10 to 0.15 in 8 bits and 0.15 to 0.3 in 4 bits."""


MOST_INDEXED = 512
"""Tokens of a text with a prediction that are indexed before each draft, about 3 ms: all requests wait for them."""


class Index(Protocol):
    """Finds matches in one text."""

    def index(self, tokens: Seq[int]) -> None:
        """Add what is new in the text; `tokens` is all of it."""
        ...


S = TypeVar("S", bound=Index)

LEAD = 8
"""Tokens of the prompt's end that a source or a prediction is put behind."""


class ReadableText:
    """The text that lookup drafters copy from: a source and a prediction, if there are any, then the sequence's tokens.
    The end of the prompt is repeated before the source and before the prediction, so that an output which begins like
    one of them is found from its first token on."""

    def __init__(self, seq: Sequence):
        self._seq = seq
        lead = seq.tokens[max(0, seq.prompt - LEAD) : seq.prompt]
        self._ids = list[int]()
        for text in filter(None, (source_of(seq), seq.prediction)):
            self._ids += [*lead, *text]
        self._before = len(self._ids)  # how many of these come before the tokens

    @property
    def ids(self) -> list[int]:
        """Return all of it, not to be changed."""
        if not self._before:
            return self._seq.tokens
        self._ids += self._seq.tokens[len(self._ids) - self._before :]
        return self._ids


@dataclass(frozen=True)
class Continuation:
    """Holds the text after a match of `match` tokens. tokens: up to the first token that is not worth its row,
    included; draft: without it. expected: how many tokens of the draft are accepted. after: another drafter's tokens,
    which it follows."""

    match: int = 0
    tokens: Seq[int] = ()
    draft: Seq[int] = ()
    expected: float = 0.0
    after: Seq[int] = ()


NOTHING = Continuation()


@dataclass
class LookupState(Generic[S]):
    """State of one sequence. last: the continuation that gave the last draft; indexed: tokens in the store."""

    seq: Sequence
    store: S
    text: ReadableText
    indexed: int = 0
    stats: MatchLengthStats = field(default_factory=MatchLengthStats)
    last: Continuation = NOTHING

    def continuation(
        self,
        match: int,
        followers: Iterator[tuple[int, float]],
        budget: Budget,
        usual: MatchLengthStats | None,
    ) -> Continuation:
        """followers: the tokens after the match, each with its share of the occurrences of all before it."""
        tokens, probability, expected = list[int](), budget.reached, 0.0
        for token, share in followers:
            tokens.append(token)
            probability *= share * self.stats.rate(match + len(tokens) - 1, usual)
            if len(tokens) > budget.depth or probability < budget.row_cost(len(tokens) - 1):
                return Continuation(match, tokens, tokens[:-1], expected)
            expected += probability
        return Continuation(match, tokens, tokens, expected)

    def compare(self, run: Seq[int], usual: MatchLengthStats) -> None:
        """Learn from the emitted tokens, whether the last draft was verified or another drafter's was: no lossless rule
        emits a token that it has just rejected. A draft that follows another drafter's tokens is compared if these were
        emitted. usual: learns from them, too."""
        after = list(self.last.after)
        following = run[len(after) :] if list(run[: len(after)]) == after else ()
        for n, (token, emitted) in enumerate(zip(self.last.tokens, following, strict=False)):
            for stats in (self.stats, usual):
                stats.learn(self.last.match + n, token == emitted)
            if token != emitted:
                break
        self.last = NOTHING


class LookupDrafter(ABC, Generic[S]):
    """A lookup drafter without the lookup itself. row_cost: for budgets that name none. device: where the target
    wants its draft tokens."""

    traits = DrafterTraits(lookup=True, chains_only=True, reads_predictions=True, prices_rows=True)

    def __init__(self, row_cost: float, device: torch.device | str = "cpu") -> None:
        self.row_cost, self.device = row_cost, device
        self._states: dict[int, LookupState[S]] = {}
        self._usual = MatchLengthStats()  # of all requests

    @abstractmethod
    def _store(self) -> S:
        """An empty store for a new sequence."""

    @abstractmethod
    def _matches(self, state: LookupState[S], drafted: Seq[int]) -> Iterator[tuple[int, Iterator[tuple[int, float]]]]:
        """Matches of the end of the text and `drafted`: length, and `followers` as in `LookupState.continuation`."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        chains: list[Seq[int]] = [()] * len(seqs)
        for b, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            if budget.depth > 0:
                state = self._read(seq)
                state.last = self._best(state, (), budget)
                chains[b] = state.last.draft
        return Draft.chains(chains, device=self.device)

    def _read(self, seq: Sequence) -> LookupState[S]:
        """Index what is new in the text of a sequence, and return its state. It is created when it is first needed: a
        sequence for which speculation is off costs nothing."""
        state = self._states.get(seq.id)
        if state is None:
            state = self._states[seq.id] = LookupState(seq, self._store(), ReadableText(seq))
        text = state.text.ids
        state.indexed = min(len(text), state.indexed + MOST_INDEXED) if seq.prediction else len(text)
        state.store.index(text if state.indexed == len(text) else text[: state.indexed])
        return state

    def _best(self, state: LookupState[S], drafted: Seq[int], budget: Budget) -> Continuation:
        """Choose the match with the most expected accepted draft tokens; among equals, the first. Where rows have a
        measured cost, no seed repeats a sampled text anyway: there the record of other requests may be used, too."""
        ends = (budget, self._usual) if budget.row_costs else (replace(budget, row_costs=(self.row_cost,)), None)
        continuations = [state.continuation(*match, *ends) for match in self._matches(state, drafted)]
        return max(continuations, key=attrgetter("expected"), default=NOTHING)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        for b, seq in enumerate(seqs):
            if seq.id in self._states:
                self._states[seq.id].compare(verdict.run(draft, b), self._usual)

    def match_length(self, seq_id: int) -> int:
        return self._states[seq_id].last.match if seq_id in self._states else 0

    def continue_from(self, seq: Sequence, drafted: Seq[int], budget: Budget) -> tuple[list[int], int]:
        state = self._read(seq)
        best = self._best(state, drafted, budget)
        if state.last is NOTHING:  # it has no draft of its own to learn from
            state.last = replace(best, after=drafted)
        return list(best.draft), best.match

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
