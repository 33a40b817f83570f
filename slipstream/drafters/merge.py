"""Merges the drafts of several drafters into one draft.

Equal draft tokens are shared: two drafts with a common prefix share its nodes.

    base  the ── cat ── sat        ngram  the ── cat ── ran        merged  the ── cat ─┬─ sat
                                                                                        └─ ran

Sampled draft tokens need care. A draft token must not be correlated with an earlier sibling; otherwise its q is not its
distribution at the time it is tried. Drafters use the same random numbers of the sequence's stream, so only the first
of several sampled drafts of a sequence is taken. It comes before all others and is taken whole: sampled draft tokens
are never left out because of their values. Deterministic draft tokens may be added anywhere after it, and the decision
to add one may even depend on the sampled tokens: after a sampled sibling is rejected, the remaining distribution is
correct whatever is tried next.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from slipstream.core.draft import Draft, consecutive
from slipstream.core.sequence import Sequence
from slipstream.drafters.guard import MAX_NODES


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a draft to take for one sequence.

    nodes  most draft tokens to add that no earlier part has; the first part is taken whole.
    name   of the drafter that proposed it; None: not to be named.
    """

    draft: Draft
    nodes: int = 2**31
    name: str | None = None


def merge(seqs: Seq[Sequence], parts: Seq[Seq[Part]], vocab_size: int, device: torch.device | str = "cpu") -> Draft:
    """One draft for all sequences. parts[b]: the parts for sequence b, the base first."""
    if not any(parts):
        return Draft.empty(len(seqs), device)
    whole = {id(own[0].draft): own[0] for own in parts if len(own) == 1}
    if len(whole) == 1:
        only = next(iter(whole.values()))
        drafts = [[part.draft for part in own] for own in parts]
        if all(own == [only.draft] if own else not only.draft.nodes(b) for b, own in enumerate(drafts)):
            return only.draft if only.name is None else only.draft.named(only.name)
    merged, sampled = _Forest(), _SampledNodes()
    for b, (seq, own) in enumerate(zip(seqs, parts, strict=True)):
        merged.add(b, _sampled_first(seq, b, own, sampled))
    return merged.draft(vocab_size, device)


def _sampled_first(seq: Sequence, b: int, parts: Seq[Part], sampled: _SampledNodes) -> list[Part]:
    """The first sampled part, then the deterministic ones."""
    if len(parts) < 2 or seq.params.greedy:
        return list(parts)
    drawn = [part for part in parts if sampled.any_in(part.draft, b)]
    return drawn[:1] + [part for part in parts if part not in drawn]


class _SampledNodes:
    """Which nodes of a draft were sampled; those with a point mass as q were not."""

    def __init__(self) -> None:
        self._sampled: dict[int, list[bool]] = {}  # id(draft) -> for each node, whether it was sampled

    def any_in(self, draft: Draft, b: int) -> bool:
        """Whether sequence b has sampled nodes in `draft`."""
        if draft.q is None:
            return False
        if id(draft) not in self._sampled:  # one copy from the device for the whole draft
            self._sampled[id(draft)] = (draft.q.gather(1, draft.tokens[:, None])[:, 0] < 1).tolist()
        return any(self._sampled[id(draft)][draft.splits[b] : draft.splits[b + 1]])


class _Forest:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.acceptable: list[bool] = []
        self.by: list[str] = []
        self.splits = [0]
        self.point_masses: list[int] = []  # nodes without q
        self.sampled: dict[
            int, tuple[Draft, list[int], list[int]]
        ] = {}  # id(draft with q) -> (it, its nodes, nodes here)

    def add(self, b: int, parts: Seq[Part]) -> None:
        """The tree of one sequence."""
        shared: dict[tuple[int, int], int] = {}  # (parent, token) -> acceptable node of an earlier part
        for rank, part in enumerate(parts):
            fresh = self._grow(b, part, shared, part.nodes if rank else 2**31)
            shared = fresh | shared
        self.splits.append(len(self.tokens))

    def _grow(self, b: int, part: Part, shared: dict[tuple[int, int], int], most: int) -> dict[tuple[int, int], int]:
        """Add a part's nodes; returns the new acceptable ones by (parent, token), the first of equal siblings."""
        draft, start, first = part.draft, self.splits[-1], part.draft.splits[b]
        fresh: dict[tuple[int, int], int] = {}
        place = {-1: -1}  # node of the part -> node here
        added = 0
        for i in draft.nodes(b):
            parent = place.get(draft.parents[i])
            if parent is None:
                continue
            acceptable = draft.acceptable is None or draft.acceptable[i]
            known = shared.get((parent, draft.ids[i])) if acceptable else None
            if known is not None:
                place[i - first] = known
            elif added < most and len(self.tokens) - start < MAX_NODES:
                node = len(self.tokens) - start
                place[i - first] = node
                if acceptable:
                    fresh.setdefault((parent, draft.ids[i]), node)
                self._append(part, i, parent, acceptable)
                added += 1
        return fresh

    def _append(self, part: Part, i: int, parent: int, acceptable: bool) -> None:
        draft = part.draft
        if draft.q is not None:
            _, nodes, here = self.sampled.setdefault(id(draft), (draft, [], []))
            nodes.append(i)
            here.append(len(self.tokens))
        else:
            self.point_masses.append(len(self.tokens))
        self.tokens.append(draft.ids[i])
        self.parents.append(parent)
        self.acceptable.append(acceptable)
        self.by.append((part.name or "") if draft.by is None else draft.by[i])

    def draft(self, vocab_size: int, device: torch.device | str) -> Draft:
        q = None
        if self.sampled:
            q = torch.zeros(len(self.tokens), vocab_size, dtype=torch.float64, device=device)  # [N, V]
            for source, nodes, here in self.sampled.values():
                assert source.q is not None
                q[consecutive(here)] = source.q[consecutive(nodes)]
            if self.point_masses:
                q[self.point_masses, [self.tokens[i] for i in self.point_masses]] = 1.0
        acceptable = None if all(self.acceptable) else self.acceptable
        by = self.by if any(self.by) else None
        return Draft.of(self.tokens, self.parents, self.splits, q, acceptable, device, by)
