"""`prune`: draft tokens that a constraint forbids are cut before the target runs them.

Only those that were chosen deterministically. To cut a token that was drawn from q because it is forbidden biases the
output: with p = (.5, .5, 0) and q = (.6, .2, .2), the texts (.6, .4, 0) would follow. Such a token stays, verification
rejects it (p is 0), and the next token is drawn from norm((p - q)+).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.warp import allowed_after, histories


def prune(seqs: Seq[Sequence], draft: Draft) -> Draft:
    """The draft without point masses that the constraints of the sequences forbid, and without what hangs below them.
    A tree with nodes that may not be accepted stays as it is: its drafter finds them by their places."""
    if not len(draft) or all(seq.constraint is None for seq in seqs):
        return draft
    kept: list[int] = []  # packed nodes
    parents: list[int] = []
    splits = [0]
    for b, seq in enumerate(seqs):
        place = {-1: -1}  # node -> its new index in the sequence
        nodes = draft.nodes(b)
        whole = draft.acceptable is not None and not all(draft.acceptable[i] for i in nodes)
        allowed = allowed_after(seq, histories(seq, draft, b)) if nodes and not whole else None
        for i in nodes:
            parent = draft.parents[i]
            forbidden = allowed is not None and not allowed[parent + 1, draft.ids[i]]
            if parent in place and not (forbidden and _certain(draft, i)):
                place[i - draft.splits[b]] = len(kept) - splits[-1]
                kept.append(i)
                parents.append(place[parent])
        splits.append(len(kept))
    if len(kept) == len(draft):
        return draft
    q = None if draft.q is None else draft.q[kept]
    acceptable = None if draft.acceptable is None else [draft.acceptable[i] for i in kept]
    by = None if draft.by is None else [draft.by[i] for i in kept]
    return Draft.of([draft.ids[i] for i in kept], parents, splits, q, acceptable, draft.tokens.device, by)


def _certain(draft: Draft, i: int) -> bool:
    """Whether packed node i was no choice: then to cut it depends on nothing that was drawn for it."""
    return draft.q is None or float(draft.q[i, draft.ids[i]]) == 1.0
