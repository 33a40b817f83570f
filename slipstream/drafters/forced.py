"""Drafts the tokens that a grammar forces: the drafter `grammar`, which is asked before every other drafter.

No user names this drafter: it drafts for each request with structured output. Its draft tokens are nearly certain to be
accepted, so no policy limits their number, and their rows do not count as a cost of drafting. The drafter in use
observes such a step like any other, and drafts for the other requests. Its lookups also draft the text after the forced
tokens. Draft models and heads do not, because they would have to read the forced tokens first.
"""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter, DrafterTraits, read_prompts
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.acceptance_stats import SpellingStats
from slipstream.drafters.hybrid import DraftPart, join_drafts

MOST_FORCED = 32
"""Largest number of forced tokens that are drafted in one step, unless the user gives a number."""

NamedTokens: TypeAlias = Seq[tuple[int, str]]
"""Draft tokens of a chain, each with the name of the drafter that proposed it."""


@dataclass
class FormState:
    """State of one sequence.

    stats   how often its draft tokens were accepted.
    at      length of the sequence when text was last forced.
    last    the tokens that were forced then. length: how many of them were drafted. classes: see `SpellingStats`.
    chance  the probability that the complete last draft is accepted; 0 if more text is forced.
    learns  whether other drafts learn from this sequence.
    """

    seq: Sequence
    stats: SpellingStats = field(default_factory=SpellingStats)
    at: int = 0
    last: Seq[int] = ()
    length: int = 0
    classes: tuple[int, int] = (0, 0)
    chance: float = 0.0
    learns: bool = False


class FormDrafter(Drafter):
    """Proposes the first tokens of the forced text.

    If rows have a price (see `Budget`), a seed does not repeat its text anyway. Then the draft has the tokens in which
    the target wrote this text before, also in other requests, and it ends where a token costs more than it gains.
    Otherwise, after a draft that was not fully accepted, it proposes at most half as many tokens: a model that splits a
    word, or writes white space, in an unusual way does so for a while.

    device   the device of the draft tokens.
    """

    name = "grammar"
    traits = DrafterTraits(chains_only=True)

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = device
        self._states: dict[int, FormState] = {}
        self._usual = SpellingStats()  # of all requests whose rows have a price

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return Draft.chains([self._draft(*each) for each in zip(seqs, budgets, strict=True)], device=self.device)

    def chance(self, seq_id: int) -> float:
        """Return the probability that the complete last draft is accepted; 0 if more text is forced."""
        return self._states[seq_id].chance if seq_id in self._states else 0.0

    def _draft(self, seq: Sequence, budget: Budget) -> Seq[int]:
        if seq.constraint is None or budget.depth <= 0:
            return ()
        is_priced = bool(budget.row_costs)
        forced, confidence = seq.constraint.find_forced(seq.output, as_before=is_priced)
        if not forced:
            return ()
        state = self._states.get(seq.id)
        if state is None:
            state = self._states[seq.id] = FormState(seq)
        is_right, most = self._learn(state), budget.depth
        state.learns = is_priced
        if not is_priced and not is_right:
            most = min(most, max(1, state.length // 2))
        state.classes = SpellingStats.classes(confidence, is_right)
        first, further = (state.stats.rate(at, self._usual if is_priced else None) for at in state.classes)
        length, chance = 0, 1.0
        while length < min(most, len(forced)):
            reached = chance * (further if length else first)
            if is_priced and reached < budget.row_cost(length):
                break
            length, chance = length + 1, reached
        state.at, state.last, state.length = len(seq.tokens), forced, length
        state.chance = chance if length == len(forced) else 0.0
        return forced[:length]

    def _learn(self, state: FormState) -> bool:
        """Learn which of the forced tokens were emitted, drafted or not. Returns whether all drafted tokens were."""
        right = 0
        for token, one in zip(state.seq.tokens[state.at :], state.last, strict=False):
            for stats in (state.stats, self._usual) if state.learns else (state.stats,):
                stats.learn(state.classes[right > 0], token == one)
            if token != one:
                break
            right += 1
        return right >= state.length

    def release(self, seq_id: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None and state.learns and state.seq.constraint is not None:
            state.seq.constraint.find_forced(state.seq.output, as_before=True)  # learns the end of the text


class ForcedFirst(Drafter):
    """The drafter of a step in which some requests have forced tokens.

    forced   id of a sequence -> the draft that begins with its forced tokens.
    drafter  sees the first `shown` sequences, and drafts for those of them without forced tokens.
    """

    def __init__(self, forced: Mapping[int, NamedTokens], drafter: Drafter, shown: int, vocab_size: int):
        self._forced, self._drafter, self._shown, self._vocab_size = forced, drafter, shown, vocab_size
        self.name, self.traits = drafter.name, replace(drafter.traits, drafts=True)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        rows = [self._forced.get(seq.id, ())[: each.depth] for seq, each in zip(seqs, budgets, strict=True)]
        left = [Budget(0) if seq.id in self._forced else each for seq, each in zip(seqs, budgets, strict=True)]
        others = self._drafter.propose(seqs[: self._shown], left[: self._shown]).pad(len(seqs) - self._shown)
        names = [name for row in rows for _, name in row]
        forced = Draft.chains([[token for token, _ in row] for row in rows], device=others.tokens.device, by=names)
        parts = [DraftPart(forced if row else others) for row in rows]
        return join_drafts(parts, self._vocab_size, others.tokens.device).with_drawn(others.drawn)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        if self._shown:
            self._drafter.observe(seqs[: self._shown], draft, out, verdict)

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        """Pass the prompts on to the drafter: see `PromptReader`."""
        read_prompts(self._drafter, seqs, out)

    def release(self, seq_id: int) -> None:
        self._drafter.release(seq_id)
