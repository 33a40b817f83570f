"""How drafts are divided into passes of llama.cpp, which has few sequence ids and rows for a pass.

Each path from the root of a tree to a leaf needs a sequence id of its own. Where there are fewer ids than paths, a tree
is run in several passes with fewer branches each, at the end with a chain in each; nodes that such parts share are run
again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.draft import Draft


@dataclass(frozen=True)
class Part:
    """What a pass runs of sequence `b` of a batch.

    paths  from the root to each leaf, as nodes counted within the sequence; [[]] without a draft.
    first  whether it is the first part of its sequence, which runs the pending tokens, too.
    """

    b: int
    paths: Seq[Seq[int]]
    first: bool

    @property
    def nodes(self) -> list[int]:
        """All nodes, parents first."""
        return sorted({node for path in self.paths for node in path})


def leaf_paths(draft: Draft, b: int) -> list[list[int]]:
    """The path to each leaf of sequence `b`, in the order of the leaves; [[]] if nothing is drafted for it."""
    parents = draft.parents[draft.splits[b] : draft.splits[b + 1]]
    if not parents:
        return [[]]
    inner, paths = set(parents), []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            paths.append(path[::-1])
    return paths


def passes(draft: Draft, pending: Seq[int], spare: int, rows: int) -> list[list[Part]]:
    """The parts of each pass.

    pending  rows of pending tokens of each sequence. spare: ids that are free, beside one for each sequence. rows: most
             rows of a pass; a sequence's pending tokens and its nodes must fit into one.
    """
    made: list[list[Part]] = [[]]
    ids_left, rows_left = spare, rows
    for b in range(draft.batch):
        paths, first = leaf_paths(draft, b), True
        while paths:
            part = Part(b, paths[: 1 + ids_left], first)
            needed = len(part.nodes) + (pending[b] if first else 0)
            cut = len(part.paths) < len(paths)
            if made[-1] and (needed > rows_left or cut):
                made.append([])
                ids_left, rows_left = spare, rows
                continue
            made[-1].append(part)
            ids_left, rows_left = ids_left - len(part.paths) + 1, rows_left - needed
            paths, first = paths[len(part.paths) :], False
            if paths:
                made.append([])
                ids_left, rows_left = spare, rows
    return made
