"""Drafts the tokens that a grammar forces: the drafter `grammar`, which is asked before every other drafter.

No user names this drafter: it drafts for each request with structured output. Its draft tokens are nearly certain to be
accepted, so no policy limits their number, and their rows do not count as a cost of drafting. The drafter in use
observes such a step like any other, and drafts for the other requests. Its lookups also draft the text after the forced
tokens. Draft models and heads do not, because they would have to read the forced tokens first.
"""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import TypeAlias

import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter, DrafterTraits, read_prompts
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.acceptance_stats import DepthStats
from slipstream.drafters.hybrid import DraftPart, join_drafts

MOST_FORCED = 32
"""Largest number of forced tokens that are drafted in one step, unless the user gives a number."""
WHOLE = 0.85
"""Assumed probability that all tokens of a forced draft are accepted, before any such draft was verified."""

NamedTokens: TypeAlias = Seq[tuple[int, str]]
"""Draft tokens of a chain, each with the name of the drafter that proposed it."""


class FormDrafter(Drafter):
    """Proposes the first tokens of the forced text. After a draft that was not fully accepted, it proposes at most half
    as many tokens: a model that splits a word, or writes white space, in an unusual way does so for a while.

    chances  by sequence: the probability that its complete last draft is accepted; 0 if more text is forced.
    device   the device of the draft tokens.
    """

    name = "grammar"
    traits = DrafterTraits(chains_only=True)

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = device
        self.chances: dict[int, float] = {}
        self._last: dict[int, tuple[int, Seq[int]]] = {}  # sequence id -> (where its last draft began, the draft)
        self._stats: dict[int, DepthStats] = {}  # sequence id -> how often its complete drafts were accepted

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        chains = list[Seq[int]]()
        for seq, budget in zip(seqs, budgets, strict=True):
            forced = seq.constraint.find_forced(seq.output) if seq.constraint is not None and budget.depth > 0 else ()
            at, last = self._last.get(seq.id, (0, ()))
            right = seq.tokens[at : at + len(last)] == list(last)
            chains.append(forced[: budget.depth if right else min(budget.depth, max(1, len(last) // 2))])
            if forced:
                stats = self._stats.setdefault(seq.id, DepthStats(1, prior=WHOLE, weight=4.0, fade=31 / 32))
                if last:
                    stats.learn(int(right), not right)
                self.chances[seq.id] = stats.rate if len(chains[-1]) == len(forced) else 0.0
                self._last[seq.id] = len(seq.tokens), chains[-1]
        return Draft.chains(chains, device=self.device)

    def release(self, seq_id: int) -> None:
        self.chances.pop(seq_id, None)
        self._last.pop(seq_id, None)
        self._stats.pop(seq_id, None)


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
