"""`Guard`: a faulty drafter cannot change the text.

Verification makes every *well-formed* draft lossless. The guard handles the rest: a drafter that raises, or returns an
invalid draft, only costs speed.

This holds only if the fault does not depend on the drawn tokens: dropping a draft because of its tokens biases the
output. So drafters that sample keep the tokens that they drew before a fault (see `chains`), and a tree for a target
that runs only chains is not dropped but cut to its first children.
"""

import logging
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from time import perf_counter
from typing import cast

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter, Lookup, PrefixKeeper, parts, read_prompts
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.errors import DraftError
from slipstream.settings import MOST_DRAFT_TOKENS

log = logging.getLogger("slipstream")

MAX_NODES = MOST_DRAFT_TOKENS
"""Most draft tokens for one sequence in one step; a drafter that proposes more is faulty."""
LEAST_MATCH = 3
"""Shortest match with which a lookup continues other draft tokens: after a match of `": "` alone, only one token in
five was accepted."""


class Guard:
    """Wraps a drafter. After a fault the step continues with plain decoding. The fault is counted for every sequence of
    the batch; only the first fault is logged."""

    def __init__(self, drafter: Drafter, target: Target):
        self.drafter, self.target = drafter, target
        self.name, self.faults = drafter.name, 0
        self.seconds = 0.0  # total time of the drafter's calls
        self.traits = replace(drafter.traits, composite=False, lookup=False, keeps_prefixes=True)
        all_parts = parts(drafter)
        self._keepers = [cast(PrefixKeeper, part) for part in all_parts if part.traits.keeps_prefixes]
        self._lookups = [cast(Lookup, part) for part in all_parts if part.traits.lookup]
        self.reads_all = any(part.traits.taps and not part.traits.keeps_prefixes for part in all_parts)
        """Whether a member reads hidden states but cannot reuse a cached prefix, so it has to see the whole text."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        depths = [budget.depth for budget in budgets]
        if any(depths):
            with self._guard("propose", seqs):
                draft = self.drafter.propose(seqs, budgets)
                if not isinstance(draft, Draft):
                    raise DraftError(f"the drafter's propose returned a {type(draft).__name__}, not a Draft")
                draft.check(depths, self.target.vocab_size, MAX_NODES)
                draft = draft if draft.is_chain or self.target.capabilities.trees else first_children(draft)
                return draft.with_name(self.name)
        return Draft.empty(len(seqs), self.target.device)

    def continue_from(self, seq: Sequence, drafted: Seq[int], budget: Budget) -> list[tuple[int, str]]:
        """Return draft tokens that lookups find after other draft tokens, each with the name of its lookup."""
        with self._guard("continue_from", [seq]):
            for lookup in self._lookups if seq.prediction or not self.traits.predicted_lookups else ():
                found, match = lookup.continue_from(seq, drafted, budget)
                Draft.chains([found]).check([budget.depth], self.target.vocab_size, MAX_NODES)
                if found and match >= LEAST_MATCH:
                    return [(token, lookup.name) for token in found]
        return []

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        with self._guard("observe", seqs):
            self.drafter.observe(seqs, draft, out, verdict)

    def read_prompts(self, seqs: Seq[Sequence], out: TargetOut) -> None:
        with self._guard("read_prompts", seqs):
            read_prompts(self.drafter, seqs, out)

    def most_nodes(self, depth: int) -> int:
        """Return the largest number of draft tokens for one sequence that a draft of this depth can have."""
        chains = self.traits.chains_only or not self.target.capabilities.trees
        return depth if chains else min(MAX_NODES, depth * MAX_NODES)

    def match_prefix(self, seq: Sequence) -> int:
        if self.reads_all:
            return 0
        with self._guard("match_prefix", [seq]):
            return min((part.match_prefix(seq) for part in self._keepers), default=len(seq.tokens))
        return 0

    def begin(self, seq: Sequence, length: int) -> None:
        with self._guard("begin", [seq]):
            for part in self._keepers:
                part.begin(seq, length)

    def keep(self, seq: Sequence) -> None:
        with self._guard("keep", [seq]):
            for part in self._keepers:
                part.keep(seq)

    def release(self, seq_id: int) -> None:
        with self._guard("release"):
            self.drafter.release(seq_id)

    @contextmanager
    def _guard(self, where: str, seqs: Seq[Sequence] = ()) -> Iterator[None]:
        """Catch and count any exception of the drafter."""
        began = perf_counter()
        try:
            yield
        except Exception as fault:
            self._count(seqs, where, fault)
        finally:
            self.seconds += perf_counter() - began

    def _count(self, seqs: Seq[Sequence], where: str, fault: Exception) -> None:
        self.faults += 1
        first = self.faults == 1  # `release` below may fail, too
        for seq in seqs:
            seq.stats.drafter_faults += 1
            self.release(seq.id)  # after a fault, the drafter's state of the sequence is unknown
        if first:
            kind = "" if isinstance(fault, DraftError) else f"{type(fault).__name__}: "
            reason = str(fault).rstrip(".")
            log.warning(
                f"drafter {self.name!r} failed in {where} ({kind}{reason}). Falling back to plain decoding; the text "
                "is not affected. Further faults are counted, not logged."
            )


def first_children(draft: Draft) -> Draft:
    """Cut each tree to the chain of its first acceptable children. All later siblings are removed, so the choice does
    not depend on the drawn tokens."""
    kept: list[list[int]] = []  # packed nodes of each sequence's chain
    for b in range(draft.batch):
        children, node = draft.children(b), -1
        kept.append([])
        while node in children:
            node = children[node][0]
            kept[b].append(draft.splits[b] + node)
    nodes = [i for chain in kept for i in chain]
    parents = [n - 1 for chain in kept for n in range(len(chain))]
    return draft.only(nodes, parents, [0, *accumulate(map(len, kept))])
