"""Trees that grow with the text, level by level, from a drafter's own laws.

    likeliest   children are the most likely tokens; at the end the nodes of the greatest path products are kept
                (EAGLE-2, 2406.16858, sections 4.1 and 4.2). Deterministic, so q is None
    drawn       children are drawn without replacement, each from its node's law without the elder siblings
                (Sequoia, 2402.12374, section 3.2). Nothing that was drawn is dropped again: how many children a node
                gets is decided by laws and by earlier levels, before any of them is drawn

`Tree` is one sequence's; whoever computes the laws runs `frontier` nodes and hands their laws to a level. Where a chain
with its laws is there already, `add_branches` makes a comb of it: alternatives beside each guess, nothing below them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.cost_curve import CostCurve
from slipstream.core.dice import invert
from slipstream.core.draft import visible
from slipstream.core.random import SIBLINGS
from slipstream.core.sequence import Sequence
from slipstream.core.trees import best_count, renumbered

ROOT = -1


@dataclass
class Tree:
    """One sequence's tree while it grows.

    depth    no deeper than this; width: most children of a node, and most nodes of a level that get any (drawn: most
             nodes of a level).
    nodes    most nodes in the end; costs: fewer where they do not pay.
    drawn    whether children are drawn (see above).

    columns  candidate of each node, an index into the laws; chances: path product of the laws, an estimate of the
             chance that the node stands; q: law that each drawn node came from.
    ran      nodes that were expanded, in this order.
    """

    seq: Sequence
    depth: int
    width: int
    nodes: int
    drawn: bool
    costs: CostCurve | None = None
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    level: int = 0
    full: bool = False
    _uniforms: np.ndarray | None = None
    _yield: float = 1.0  # drawn: expected tokens of a round with the nodes so far

    def frontier(self) -> list[int]:
        """Nodes whose laws the next level needs: the likeliest of the last one."""
        if self.level >= self.depth or self.full:
            return []
        if self.level == 0:
            return [ROOT]
        last = [i for i in range(len(self.parents)) if self.depths[i] == self.level and self.chances[i] > 0]
        return sorted(sorted(last, key=lambda i: -self.chances[i])[: self.width])

    def slots(self, frontier: Seq[int], values: Seq[Seq[float]]) -> list[tuple[int, int]]:
        """Which children the next level has, as (place in the frontier, rank), and a first estimate of their chances:
        values[i] are the greatest probabilities of the law at frontier[i], falling. Drawn trees: only so many of the
        best as the nodes allow, none that does not pay."""
        offers = [
            ((self.chances[node] if node >= 0 else 1.0) * p, i, rank)
            for i, node in enumerate(frontier)
            for rank, p in enumerate(values[i][: self.width])
            if p > 0
        ]
        if not self.drawn:
            return [(i, rank) for _, i, rank in offers]
        levels_left = self.depth - self.level  # the next one included; each should get a node
        most = min(self.width, max(1, self.nodes - len(self.parents) - (levels_left - 1)))
        most = min(most, self.nodes - len(self.parents))
        return sorted(self._paying(offers, most))

    def _paying(self, offers: Seq[tuple[float, int, int]], most: int) -> list[tuple[int, int]]:
        """The best of (chance, place, rank), at most so many, while they pay."""
        taken: list[tuple[int, int]] = []
        for chance, i, rank in sorted(offers, key=lambda offer: -offer[0])[:most]:  # stable: elder siblings first
            if self.costs is not None:
                n = len(self.parents) + len(taken)
                if (self._yield + chance) / self.costs(2 + n) <= self._yield / self.costs(1 + n):
                    break
            self._yield += chance
            taken.append((i, rank))
        return taken

    def add(self, parent: int, column: int, chance: float, q: Tensor | None = None) -> None:
        self.parents.append(parent)
        self.columns.append(column)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.chances.append(chance * (self.chances[parent] if parent >= 0 else 1.0))
        if q is not None:
            self.q.append(q)

    def uniform(self, node: int) -> float:
        """The number that draws this node."""
        if self._uniforms is None:
            self._uniforms = self.seq.random.uniforms(SIBLINGS, len(self.seq.tokens), self.nodes)
        return float(self._uniforms[node])

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`, both ends included, the root itself left out."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def visible(self, rows: Seq[int]) -> Tensor:
        """What the rows of these nodes (a parent before its children) see of each other, bool [n, n]."""
        return visible(renumbered(self.parents, rows))

    def kept(self) -> list[int]:
        """The nodes to propose, in an order in which parents come first."""
        return list(range(len(self.parents))) if self.drawn else rerank(self.chances, self.nodes, self.costs)

    def finish(self, nodes: Seq[int]) -> tuple[list[int], tuple[int, ...]]:
        """Candidates and parents of the tree of these nodes alone."""
        return [self.columns[i] for i in nodes], renumbered(self.parents, nodes)


def rerank(chances: Seq[float], nodes: int, costs: CostCurve | None = None) -> list[int]:
    """The `nodes` of the greatest chances, increasing; by `costs` only as many as pay. A node's chance is at most its
    parent's, and of equals the elder goes first, so no node is kept without its parent."""
    best = sorted(range(len(chances)), key=lambda i: -chances[i])[:nodes]
    if costs is not None:
        best = best[: best_count([chances[i] for i in best], costs)]
    return sorted(best)


class _Child(NamedTuple):
    """A child to be drawn: its parent, the packed row of the law there, and how many elder siblings it has."""

    tree: Tree
    parent: int
    row: int
    rank: int


def add_level(trees: Seq[Tree], frontiers: Seq[Seq[int]], probs: Tensor, ids: Tensor) -> None:
    """Give every tree its next level. law: float [F, C], the laws at the frontier nodes of all trees, packed; ids:
    target id of each candidate, int64 [C]."""
    best = probs.topk(min(max(tree.width for tree in trees), probs.shape[1]), -1)
    values, columns = best.values.tolist(), best.indices.tolist()
    start, children = 0, list[_Child]()
    for tree, frontier in zip(trees, frontiers, strict=True):
        rows = range(start, start + len(frontier))
        start = rows.stop
        slots = tree.slots(frontier, [values[r] for r in rows])
        for i, rank in slots:
            if tree.drawn:
                children.append(_Child(tree, frontier[i], rows[i], rank))
            else:
                tree.add(frontier[i], columns[rows[i]][rank], values[rows[i]][rank])
        tree.ran += [node for node in frontier if node >= 0]
        tree.level += 1
        tree.full = not slots
    if children:
        _draw(children, probs, ids)


def _draw(children: Seq[_Child], probs: Tensor, ids: Tensor) -> None:
    """Draw children: all first-born of the level at once, then all second, each from what its elder siblings left."""
    numbers: list[int] = []  # of the node that each child becomes
    ends: dict[int, int] = {}
    for child in children:
        numbers.append(ends.setdefault(id(child.tree), len(child.tree.parents)))
        ends[id(child.tree)] += 1
    left = probs.double().clone()  # [F, C]
    drawn: dict[int, tuple[int, Tensor]] = {}  # place in `children` -> candidate and its law
    for rank in range(1 + max(child.rank for child in children)):
        now = [n for n, child in enumerate(children) if child.rank == rank]
        rows = torch.tensor([children[n].row for n in now], device=probs.device)
        q = left[rows]
        q = q / q.sum(-1, keepdim=True)  # [n, C]
        picked = _pick(q, [children[n] for n in now], [numbers[n] for n in now], ids)  # [n]
        left[rows, picked] = 0.0
        for k, column in enumerate(picked.tolist()):
            drawn[now[k]] = column, q[k]
    at = torch.tensor([[child.row for child in children], [drawn[n][0] for n in range(len(children))]])
    chances = probs[at[0].to(probs.device), at[1].to(probs.device)].tolist()
    for n, child in enumerate(children):
        child.tree.add(child.parent, drawn[n][0], chances[n], drawn[n][1])


def _pick(q: Tensor, children: Seq[_Child], numbers: Seq[int], ids: Tensor) -> Tensor:
    """A candidate from each law [n, C] -> int64 [n]. Under the rule `coupled` with the noise that the target will use
    at that place, so that near laws pick equal tokens; it is the same for all siblings, which makes them the top ones
    of one perturbed law: drawn without replacement, too (Kool et al. 1903.06059)."""
    pairs = list(zip(children, numbers, strict=True))
    u = torch.tensor([0.0 if child.tree.seq.coupled else child.tree.uniform(n) for child, n in pairs])
    picked = invert(q, u.to(q))
    for k, child in enumerate(children):
        if (seq := child.tree.seq).coupled:
            above = child.tree.depths[child.parent] if child.parent >= 0 else 0
            noise = seq.random.gumbel(len(seq.tokens) + above, int(ids[-1]) + 1)
            picked[k] = (q[k].log() + torch.from_numpy(noise).to(q.device)[ids]).argmax()
    return picked


def add_branches(trees: Seq[Tree], spines: Seq[Seq[int]], probs: Tensor, ids: Tensor) -> None:
    """Give each (empty) tree a chain of candidates and, beside its guesses, the likeliest other ones or drawn ones.

    law: float64 [N, C], the law of every guess of the chains, packed; drawn chains must be drawn from it. Drawn: how
    many siblings a guess gets depends on laws and on the chain, and the chain itself is never cut.
    """
    flat = torch.tensor([column for spine in spines for column in spine], device=probs.device)[:, None]  # [N, 1]
    own = probs.gather(1, flat)[:, 0].tolist()
    left = probs.scatter(1, flat, 0.0)
    most = max(0, min(max(tree.width for tree in trees), probs.shape[1]) - 1)
    best = left.topk(most, -1)
    values, columns = best.values.tolist(), best.indices.tolist()
    start, children = 0, list[_Child]()
    for tree, spine in zip(trees, spines, strict=True):
        rows = range(start, start + len(spine))
        start = rows.stop
        for i, row in enumerate(rows):
            tree.add(i - 1, spine[i], own[row], probs[row] if tree.drawn else None)
        above = [1.0, *tree.chances]
        offers = [(above[i] * p, i, rank) for i, row in enumerate(rows) for rank, p in enumerate(values[row]) if p > 0]
        if tree.drawn:
            tree._yield += sum(tree.chances)
            taken = sorted(tree._paying(offers, max(0, tree.nodes - len(spine))))
            children += [_Child(tree, i - 1, rows[i], rank) for i, rank in taken]
        else:
            for _, i, rank in offers:
                tree.add(i - 1, columns[rows[i]][rank], values[rows[i]][rank])
    if children:
        _draw(children, left, ids)
