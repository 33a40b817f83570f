"""Shapes of fixed draft trees and their expected number of accepted tokens: pure maths on host numbers.

A shape says which candidate goes where before any token is known. `acceptance` is the probability that the candidate of
a rank (0: the drafter's first choice) is accepted, given that its parent is accepted:

        (.5, .2, .1)               equal at every depth
        ((.6, .2), (.4, .1))       by depth; no deeper nodes

Only one of several siblings can be accepted, so a row sums to at most 1. The probability that a node is accepted is the
product along its path, and a step yields one token (the target's own) plus the sum over the nodes. Hence the best tree
of n nodes consists of the n most likely paths, found best first; it equals the dynamic programme of Sequoia
(2402.12374, section 3.1) and EAGLE-2's reranking (2406.16858, section 4.2).

The papers count the root (the pending token) among the nodes. Here only draft tokens count, so a paper's n is n - 1
here. Exact fractions as input give exact fractions as result.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import count, product
from typing import Any

from slipstream.errors import ParameterError
from slipstream.settings import MOST_DRAFT_TOKENS
from slipstream.theory.cost_curve import CostCurve

Number = Any  # float or fractions.Fraction, the same throughout one call

Acceptance = Seq[Number] | Seq[Seq[Number]]
"""Probabilities by [rank], or by [depth][rank]."""


@dataclass(frozen=True)
class TreeShape:
    """The shape of a fixed draft tree. A worked example, the tree of `draft.Draft`:

        root ─┬─ first choice ─┬─ first choice      parents = (-1, -1, 0, 0, 1)
              │                └─ second choice     ranks   = ( 0,  1, 0, 1, 0)
              └─ second choice ── first choice      paths   = ((0,), (1,), (0, 0), (0, 1), (1, 0))

    parents  as in `Draft` for one sequence: the parent's index, smaller than the node's own; -1 is the root.
    ranks    rank of each node among the drafter's candidates, counted from 0.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks):
            raise ParameterError(f"a tree has {len(self.parents)} parents but {len(self.ranks)} ranks")
        for i, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if not -1 <= parent < i or rank < 0:
                raise ParameterError(f"node {i} of a tree has the invalid parent {parent} or rank {rank}")
        if len(set(self.paths)) < len(self):
            twice = next(path for path in self.paths if self.paths.count(path) > 1)
            raise ParameterError(f"path {twice} is twice in a tree", why="siblings must differ", fix="remove one")

    @staticmethod
    def of_paths(paths: Seq[Seq[int]]) -> TreeShape:
        """Make a shape from paths of ranks, in any order, as in Medusa's `medusa_choices`: [[0], [1], [0, 0]]."""
        places: dict[tuple[int, ...], int] = {(): -1}
        parents, ranks = list[int](), list[int]()
        for path in sorted((tuple(p) for p in paths), key=lambda path: (len(path), path)):
            if not path or path[:-1] not in places:
                raise ParameterError(
                    f"path {list(path)} of a tree has no parent", fix="list the path of each parent, too"
                )
            places.setdefault(path, len(parents))
            parents.append(places[path[:-1]])
            ranks.append(path[-1])
        return TreeShape(tuple(parents), tuple(ranks))

    @staticmethod
    def full(branches: Seq[int]) -> TreeShape:
        """Make the shape of all combinations of the first branches[d] candidates at depth d (2401.10774, 2.1.2)."""
        return TreeShape.of_paths(
            [path for d in range(len(branches)) for path in product(*map(range, branches[: d + 1]))]
        )

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node: 1 for a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def height(self) -> int:
        return max(self.depths, default=0)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Ranks from the root down to each node."""
        paths: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*(() if parent < 0 else paths[parent]), rank))
        return tuple(paths)

    def keep(self, nodes: Seq[int]) -> TreeShape:
        """Return the tree of only these nodes, which are increasing and include each node's parent."""
        return TreeShape(renumber(self.parents, nodes), tuple(self.ranks[i] for i in nodes))

    def cut(self, depth: int) -> TreeShape:
        """Return the tree without its nodes deeper than `depth`."""
        return self if depth >= self.height else self.keep([i for i, d in enumerate(self.depths) if d <= depth])

    def chances(self, acceptance: Acceptance) -> list[Number]:
        """Return the probability that each node is accepted; 0 for nodes without an entry in `acceptance`."""
        at, chances = by_depth(acceptance), list[Number]()
        for parent, rank, depth in zip(self.parents, self.ranks, self.depths, strict=True):
            row = at(depth)
            rate = row[rank] if rank < len(row) else 0
            chances.append(rate if parent < 0 else chances[parent] * rate)
        return chances


def renumber(parents: Seq[int], nodes: Seq[int]) -> tuple[int, ...]:
    """Return the parents' indices among `nodes`, which are increasing and include each node's parent."""
    new = {-1: -1} | {old: i for i, old in enumerate(nodes)}
    return tuple(new[parents[i]] for i in nodes)


def by_depth(acceptance: Acceptance) -> Callable[[int], Seq[Number]]:
    """Return a function: depth, counted from 1 -> probabilities of its ranks; () below the last row. Raises
    ParameterError unless each row has probabilities of mutually exclusive events."""
    values: list[Any] = list(acceptance)
    nested = bool(values) and isinstance(values[0], (list, tuple))
    rows: list[Seq[Number]] = values if nested else [values]
    for row in rows:
        if any(not 0 <= a <= 1 for a in row) or sum(row) > 1 + 1e-6:
            raise ParameterError(
                f"{tuple(row)} was given as acceptance probabilities of siblings",
                why="each must be in [0, 1] and their sum at most 1, because only one sibling can be accepted",
                fix="give each rank its own probability, not the sum up to this rank",
            )

    def at(depth: int) -> Seq[Number]:
        return (rows[depth - 1] if depth <= len(rows) else ()) if nested else rows[0]

    return at


def optimal_tree(acceptance: Acceptance, nodes: int, depth: int | None = None) -> TreeShape:
    """Return the tree of (at most) `nodes` draft tokens, none deeper than `depth`, with the most expected tokens.

    Nodes are ordered by probability, so the first m nodes are the optimal tree of m nodes. There are fewer than `nodes`
    if no other path has a positive probability. Ties go to the shallower node, then to the smaller ranks."""
    at = by_depth(acceptance)
    if nodes < 0:
        raise ParameterError(f"a tree with {nodes} nodes was requested", fix="give a number of nodes >= 0")
    parents, ranks, order = list[int](), list[int](), count()
    waiting: list[tuple[Number, int, int, int, int]] = []  # (-chance, depth, arrival, parent, rank), likeliest first

    def offer(parent: int, below: int, chance: Number) -> None:
        if depth is None or below <= depth:
            for rank, rate in enumerate(at(below)):
                if chance * rate > 0:
                    heapq.heappush(waiting, (-chance * rate, below, next(order), parent, rank))

    offer(-1, 1, 1)
    while waiting and len(parents) < nodes:
        chance, below, _, parent, rank = heapq.heappop(waiting)
        parents.append(parent)
        ranks.append(rank)
        offer(len(parents) - 1, below + 1, -chance)
    return TreeShape(tuple(parents), tuple(ranks))


def expect_tokens(tree: TreeShape, acceptance: Acceptance) -> Number:
    """Return the expected tokens of one step: the target's own token, plus every node's acceptance probability."""
    return 1 + sum(tree.chances(acceptance))


def best_count(chances: Seq[Number], costs: CostCurve) -> int:
    """Return how many nodes, most likely first, to verify: the count with the most expected tokens per unit of time,
    the smallest among equals; 0 if no draft token pays. chances: decreasing, as in an optimal tree."""
    best, most, tokens = 0, 1.0, 1.0
    for n, chance in enumerate(chances, start=1):
        tokens += float(chance)
        rate = tokens / (costs(1 + n) / costs(1))
        if rate > most * (1 + 1e-12):
            best, most = n, rate
    return best


def best_tree(
    acceptance: Acceptance, costs: CostCurve, most: int = MOST_DRAFT_TOKENS, depth: int | None = None
) -> TreeShape:
    """Return the optimal tree with the node count that pays best at these costs, at most `most` nodes."""
    tree = optimal_tree(acceptance, most, depth)
    return tree.keep(range(best_count(tree.chances(acceptance), costs)))
