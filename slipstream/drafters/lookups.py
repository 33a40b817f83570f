"""Base class of lookup drafters: keeps a state for each sequence, and decides where a draft ends.

A lookup drafter finds its draft tokens in the sequence's own text (`ReadableText`), so they do not depend on the rest
of the batch. The acceptance probability of a token after a match is estimated as a product: the share of the match's
occurrences that went on with this token, times the acceptance rate of matches of this length (`MatchLengthStats`). The
draft ends where the product along the draft falls below the cost of verifying one more row, as a share of a plain step.
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
"""Cost of verifying one more row, as a share of a plain step, if it is not measured. For SmolLM2 on two cores it is
0.10 to 0.15 in 8 bits and 0.15 to 0.3 in 4 bits."""


MOST_INDEXED = 512
"""Tokens that are indexed before each draft if the text has a prediction. This takes 3 ms, and all requests wait."""


class Index(Protocol):
    """Finds matches in one text."""

    def index(self, tokens: Seq[int]) -> None:
        """Add the new tokens of the text; `tokens` is the whole text."""
        ...


S = TypeVar("S", bound=Index)

LEAD = 8
"""Number of tokens of the prompt's end that are repeated before a source or a prediction."""


class ReadableText:
    """The text that lookup drafters copy from: a source and a prediction, if there are any, then the sequence's tokens.
    The end of the prompt is repeated before the source and before the prediction, so that an output which begins like
    the source or the prediction is found from its first token on."""

    def __init__(self, seq: Sequence):
        self._seq = seq
        lead = seq.tokens[max(0, seq.prompt - LEAD) : seq.prompt]
        self._ids = list[int]()
        for text in filter(None, (source_of(seq), seq.prediction)):
            self._ids += [*lead, *text]
        self._before = len(self._ids)  # number of ids before the sequence's tokens

    @property
    def ids(self) -> list[int]:
        """Return the whole text. The list must not be changed."""
        if not self._before:
            return self._seq.tokens
        self._ids += self._seq.tokens[len(self._ids) - self._before :]
        return self._ids


@dataclass(frozen=True)
class Continuation:
    """Holds the text after a match of `match` tokens. tokens: up to and including the first token that is not worth the
    cost of verifying it; draft: `tokens` without that last one. expected: expected number of accepted draft tokens.
    after: another drafter's draft tokens that come before these."""

    match: int = 0
    tokens: Seq[int] = ()
    draft: Seq[int] = ()
    expected: float = 0.0
    after: Seq[int] = ()


NOTHING = Continuation()


@dataclass
class LookupState(Generic[S]):
    """State of one sequence. last: continuation of the last draft. indexed: number of tokens in the store."""

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
        """Return the draft after a match. followers: the tokens after the match, each with its share of the occurrences
        of the string before it."""
        tokens, probability, expected = list[int](), budget.reached, 0.0
        for token, share in followers:
            tokens.append(token)
            probability *= share * self.stats.rate(match + len(tokens) - 1, usual)
            if len(tokens) > budget.depth or probability < budget.row_cost(len(tokens) - 1):
                return Continuation(match, tokens, tokens[:-1], expected)
            expected += probability
        return Continuation(match, tokens, tokens, expected)

    def compare(self, run: Seq[int], usual: MatchLengthStats) -> None:
        """Learn from the emitted tokens which draft tokens were right, even if another drafter's draft was verified: no
        lossless rule emits a token that it has just rejected. A draft after another drafter's tokens is compared only
        if those tokens were emitted. usual: the record of all requests, which learns, too."""
        after = list(self.last.after)
        following = run[len(after) :] if list(run[: len(after)]) == after else ()
        for n, (token, emitted) in enumerate(zip(self.last.tokens, following, strict=False)):
            for stats in (self.stats, usual):
                stats.learn(self.last.match + n, token == emitted)
            if token != emitted:
                break
        self.last = NOTHING


class LookupDrafter(ABC, Generic[S]):
    """A lookup drafter without the lookup itself. row_cost: used for budgets without row costs. device: the device of
    the draft tokens."""

    traits = DrafterTraits(lookup=True, chains_only=True, reads_predictions=True, prices_rows=True)

    def __init__(self, row_cost: float, device: torch.device | str = "cpu") -> None:
        self.row_cost, self.device = row_cost, device
        self._states: dict[int, LookupState[S]] = {}
        self._usual = MatchLengthStats()  # statistics of all requests

    @abstractmethod
    def _store(self) -> S:
        """Return an empty store for a new sequence."""

    @abstractmethod
    def _matches(self, state: LookupState[S], drafted: Seq[int]) -> Iterator[tuple[int, Iterator[tuple[int, float]]]]:
        """Yield matches of the end of text + `drafted`: length, and `followers` as in `LookupState.continuation`."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        chains: list[Seq[int]] = [()] * len(seqs)
        for b, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            if budget.depth > 0:
                state = self._read(seq)
                state.last = self._best(state, (), budget)
                chains[b] = state.last.draft
        return Draft.chains(chains, device=self.device)

    def _read(self, seq: Sequence) -> LookupState[S]:
        """Index the new tokens of a sequence, and return its state. The state is created when it is first needed: a
        sequence for which speculation is off costs nothing."""
        state = self._states.get(seq.id)
        if state is None:
            state = self._states[seq.id] = LookupState(seq, self._store(), ReadableText(seq))
        text = state.text.ids
        state.indexed = min(len(text), state.indexed + MOST_INDEXED) if seq.prediction else len(text)
        state.store.index(text if state.indexed == len(text) else text[: state.indexed])
        return state

    def _best(self, state: LookupState[S], drafted: Seq[int], budget: Budget) -> Continuation:
        """Return the continuation with the most expected accepted draft tokens; among equals, the first. If row costs
        are measured, a seed does not repeat a sampled text anyway, so the record of other requests is used, too."""
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
        if state.last is NOTHING:  # there is no draft of this lookup to learn from
            state.last = replace(best, after=drafted)
        return list(best.draft), best.match

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
