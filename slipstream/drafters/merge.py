"""Join the drafts of several drafters into one forest that verification can take.

Guesses that agree are shared: where two drafts begin alike, their paths run together.

    base  the ── cat ── sat        ngram  the ── cat ── ran        merged  the ── cat ─┬─ sat
                                                                                        └─ ran

Sampled guesses need care. A guess must not be correlated with an earlier sibling's, or its q is not the law that it
has at its trial. So of several sampled drafts of one sequence only the first is taken (all of them draw the same
numbers of the sequence's stream), it comes before all others, and it is taken whole: sampled guesses are never left
out for what they are. Deterministic guesses may hang anywhere behind it. Whether such a guess is added may even depend
on what was drawn: with a sampled sibling rejected, the law that is left comes out right whatever is tried next.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence


@dataclass(frozen=True, eq=False)
class Part:
    """What to take of a draft for one sequence.

    depth  no guess deeper than this.
    nodes  at most so many of its guesses that no earlier part has; the first part is taken whole.
    """

    draft: Draft
    depth: int = 2**31
    nodes: int = 2**31


def merge(seqs: Seq[Sequence], parts: Seq[Seq[Part]], vocab_size: int, device: torch.device | str = "cpu") -> Draft:
    """One draft for all sequences: parts[b] are what sequence b takes, the base first."""
    if not any(parts):
        return Draft.empty(len(seqs), device)
    whole = {id(own[0].draft): own[0].draft for own in parts if len(own) == 1}
    if len(whole) == 1:
        draft = next(iter(whole.values()))
        if all(_is_all_of(own, draft, b) for b, own in enumerate(parts)):
            return draft
    made, chance = _Forest(), _Chance()
    for b, (seq, own) in enumerate(zip(seqs, parts, strict=True)):
        made.add(b, _sampled_first(seq, b, own, chance))
    return made.draft(vocab_size, device)


def _is_all_of(own: Seq[Part], draft: Draft, b: int) -> bool:
    """Whether sequence b takes exactly what `draft` holds for it."""
    if not own:
        return not draft.nodes(b)
    return (
        len(own) == 1
        and own[0].draft is draft
        and max((draft.depths[i] for i in draft.nodes(b)), default=0) <= (own[0].depth)
    )


def _sampled_first(seq: Sequence, b: int, parts: Seq[Part], chance: _Chance) -> list[Part]:
    """The first sampled part, then the deterministic ones."""
    if len(parts) < 2 or seq.params.greedy:
        return list(parts)
    sampled = [part for part in parts if chance.in_guesses(part.draft, b)]
    return sampled[:1] + [part for part in parts if part not in sampled]


class _Chance:
    """Whether chance had a part in the guesses of drafts: where a law is a point mass it had none."""

    def __init__(self) -> None:
        self._drawn: dict[int, list[bool]] = {}  # draft -> for each node, whether it was drawn

    def in_guesses(self, draft: Draft, b: int) -> bool:
        if draft.q is None:
            return False
        if id(draft) not in self._drawn:  # one look at the device for the whole draft
            self._drawn[id(draft)] = (draft.q.gather(1, draft.tokens[:, None])[:, 0] < 1).tolist()
        return any(self._drawn[id(draft)][draft.splits[b] : draft.splits[b + 1]])


def _range(index: list[int]) -> slice | list[int]:
    """The same rows as a slice where they lie one after another, as those of a chain do: copied at once."""
    first, last = index[0], index[-1] + 1
    return slice(first, last) if index == list(range(first, last)) else index


class _Forest:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.acceptable: list[bool] = []
        self.splits = [0]
        self.sure: list[int] = []  # nodes without a law: point masses
        self.distributions: dict[
            int, tuple[Draft, list[int], list[int]]
        ] = {}  # draft with q -> (it, its nodes, nodes here)

    def add(self, b: int, parts: Seq[Part]) -> None:
        """The tree of one sequence."""
        shared: dict[tuple[int, int], int] = {}  # (parent, token) -> voting node of an earlier part
        for rank, part in enumerate(parts):
            fresh = self._grow(b, part, shared, part.nodes if rank else 2**31)
            shared = fresh | shared
        self.splits.append(len(self.tokens))

    def _grow(self, b: int, part: Part, shared: dict[tuple[int, int], int], most: int) -> dict[tuple[int, int], int]:
        """Add a part's guesses; returns the new ones that vote, the first of equal siblings."""
        draft, start, first = part.draft, self.splits[-1], part.draft.splits[b]
        fresh: dict[tuple[int, int], int] = {}
        place = {-1: -1}  # node of the part -> node here
        added = 0
        for i in draft.nodes(b):
            parent = place.get(draft.parents[i])
            if parent is None or draft.depths[i] > part.depth:
                continue
            acceptable = draft.acceptable is None or draft.acceptable[i]
            known = shared.get((parent, draft.ids[i])) if acceptable else None
            if known is not None:
                place[i - first] = known
            elif added < most:
                node = len(self.tokens) - start
                place[i - first] = node
                if acceptable:
                    fresh.setdefault((parent, draft.ids[i]), node)
                self._append(draft, i, parent, acceptable)
                added += 1
        return fresh

    def _append(self, draft: Draft, i: int, parent: int, acceptable: bool) -> None:
        if draft.q is not None:
            _, nodes, here = self.distributions.setdefault(id(draft), (draft, [], []))
            nodes.append(i)
            here.append(len(self.tokens))
        else:
            self.sure.append(len(self.tokens))
        self.tokens.append(draft.ids[i])
        self.parents.append(parent)
        self.acceptable.append(acceptable)

    def draft(self, vocab_size: int, device: torch.device | str) -> Draft:
        q = None
        if self.distributions:
            q = torch.zeros(len(self.tokens), vocab_size, dtype=torch.float64, device=device)  # [N, V]
            for source, nodes, here in self.distributions.values():
                assert source.q is not None
                q[_range(here)] = source.q[_range(nodes)]
            if self.sure:
                q[self.sure, [self.tokens[i] for i in self.sure]] = 1.0
        acceptable = None if all(self.acceptable) else self.acceptable
        return Draft.of(self.tokens, self.parents, self.splits, q, acceptable, device)
