"""Joins the drafts of several drafters, each for some sequences of the batch, into one draft.

A sequence has the draft of one drafter. Where that is a chain, tokens of a lookup may follow it. These are point
masses: deterministic given the chain, which may be sampled. What is drafted *after* a token may depend on it; only
siblings must not (see `core.rules`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from slipstream.core.draft import Draft, consecutive


@dataclass(frozen=True, eq=False)
class Part:
    """What is drafted for one sequence.

    draft  of the whole batch, of which it takes the nodes of this sequence.
    name   of the drafter that proposed it; "": the draft says, or it is not to be named.
    then   tokens after the last node of a chain; by: name of the drafter that they are of.
    """

    draft: Draft
    name: str = ""
    then: Seq[int] = ()
    by: str = ""


def join_drafts(parts: Seq[Part | None], vocab_size: int, device: torch.device | str = "cpu") -> Draft:
    """One draft for all sequences; None: nothing is drafted."""
    drafts = {id(part.draft): part for part in parts if part is not None}
    if not drafts:
        return Draft.empty(len(parts), device)
    only = next(iter(drafts.values()))
    if len(drafts) == 1 and not any(only.draft.nodes(b) if part is None else part.then for b, part in enumerate(parts)):
        return only.draft.named(only.name) if only.name else only.draft
    ids, parents, acceptable, by, splits = list[int](), list[int](), list[bool](), list[str](), [0]
    sampled: dict[int, tuple[Draft, list[int], list[int]]] = {}  # draft with q, its nodes, their places here
    for b, part in enumerate(parts):
        if part is not None:
            draft, nodes = part.draft, part.draft.nodes(b)
            if draft.q is not None:
                _, there, here = sampled.setdefault(id(draft), (draft, [], []))
                there += nodes
                here += range(len(ids), len(ids) + len(nodes))
            ids += [*(draft.ids[i] for i in nodes), *part.then]
            parents += [*(draft.parents[i] for i in nodes), *range(len(nodes) - 1, len(nodes) + len(part.then) - 1)]
            acceptable += [draft.acceptable is None or draft.acceptable[i] for i in nodes] + [True] * len(part.then)
            by += [part.name if draft.by is None else draft.by[i] for i in nodes] + [part.by] * len(part.then)
        splits.append(len(ids))
    q = None
    if sampled:
        q = torch.zeros(len(ids), vocab_size, dtype=torch.float64, device=device)  # [N, V]
        q[range(len(ids)), ids] = 1.0
        for draft, there, here in sampled.values():
            if there and draft.q is not None:
                q[consecutive(here)] = draft.q[consecutive(there)]
    return Draft.of(ids, parents, splits, q, None if all(acceptable) else acceptable, device, by if any(by) else None)
