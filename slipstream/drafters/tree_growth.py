"""Dynamic draft trees, grown level by level from a drafter's own distributions.

    deterministic  children are the most likely tokens; finally the nodes with the greatest path probabilities are kept
                   (EAGLE-2, 2406.16858, sections 4.1 and 4.2). q is None
    drawn          children are drawn without replacement, each from the parent's distribution without the earlier
                   siblings (Sequoia, 2402.12374, section 3.2). No drawn node is dropped: distributions and earlier
                   levels decide the number of children, before any child is drawn

`Tree` belongs to one sequence. The caller runs the nodes of `frontier` and passes their distributions to `add_level`.
"""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.dice import invert
from slipstream.core.draft import Draft, build_mask
from slipstream.core.random import SIBLINGS
from slipstream.core.sequence import Sequence, is_coupled
from slipstream.drafters.chains import Chain, join_probs
from slipstream.theory.trees import renumber

ROOT = -1


@dataclass
class Tree:
    """The tree of one sequence while it grows.

    depth    greatest depth. width: largest number of children of a node, and of nodes in a level that get children
             (drawn: of nodes in a level).
    nodes    largest number of nodes in the finished tree. drawn: whether children are drawn (see above).

    tokens      tokens of the nodes. q: the distribution that each drawn node was sampled from.
    path_probs  product of the probabilities along a node's path, an estimate of its acceptance probability.
    ran         nodes that were expanded, in this order.
    """

    seq: Sequence
    depth: int
    width: int
    nodes: int
    drawn: bool
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    path_probs: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    level: int = 0
    full: bool = False
    _uniforms: np.ndarray | None = None

    def frontier(self) -> list[int]:
        """Return the nodes whose distributions the next level needs: the most likely nodes of the last level."""
        if self.level >= self.depth or self.full:
            return []
        if self.level == 0:
            return [ROOT]
        last = [i for i in range(len(self.parents)) if self.depths[i] == self.level and self.path_probs[i] > 0]
        return sorted(sorted(last, key=lambda i: -self.path_probs[i])[: self.width])

    def slots(self, frontier: Seq[int], values: Seq[Seq[float]]) -> list[tuple[int, int]]:
        """Return the children of the next level, as (index in the frontier, rank). values[i]: the greatest
        probabilities of the distribution at frontier[i], decreasing. Drawn trees: only the best, within `nodes`."""
        offers = [
            ((self.path_probs[node] if node >= 0 else 1.0) * p, i, rank)
            for i, node in enumerate(frontier)
            for rank, p in enumerate(values[i][: self.width])
            if p > 0
        ]
        if not self.drawn:
            return [(i, rank) for _, i, rank in offers]
        levels_left = self.depth - self.level  # next level included; each should get a node
        most = min(self.width, max(1, self.nodes - len(self.parents) - (levels_left - 1)))
        most = min(most, self.nodes - len(self.parents))
        best = sorted(offers, key=lambda offer: -offer[0])[:most]  # stable: earlier siblings first
        return sorted((i, rank) for _, i, rank in best)

    def add(self, parent: int, token: int, p: float, q: Tensor | None = None) -> None:
        self.parents.append(parent)
        self.tokens.append(token)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.path_probs.append(p * (self.path_probs[parent] if parent >= 0 else 1.0))
        if q is not None:
            self.q.append(q)

    def uniform(self, node: int) -> float:
        """Return the random number in [0, 1) to draw this node with."""
        if self._uniforms is None:
            self._uniforms = self.seq.random.uniforms(SIBLINGS, len(self.seq.tokens), self.nodes)
        return float(self._uniforms[node])

    def path(self, node: int) -> list[int]:
        """Return the nodes from a child of the root down to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def visible(self, rows: Seq[int]) -> Tensor:
        """Return the attention mask between the rows of these nodes (parents before children), bool [n, n]."""
        return build_mask(renumber(self.parents, rows))


def forest(batch: int, trees: Mapping[int, Tree], vocab_size: int, device: torch.device) -> Draft:
    """Pack the trees, given by sequence index, into a draft; deterministic trees are reranked first."""
    chains = [Chain() for _ in range(batch)]
    parents: list[int] = []
    splits = [0]
    for b in range(batch):
        if tree := trees.get(b):
            kept = range(len(tree.parents)) if tree.drawn else rerank(tree.path_probs, tree.nodes)
            chains[b] = Chain([tree.tokens[i] for i in kept], torch.stack(tree.q) if tree.q else None)
            parents += renumber(tree.parents, kept)
        splits.append(len(parents))
    ids = [token for chain in chains for token in chain.tokens]
    return Draft.of(ids, parents, splits, join_probs(chains, vocab_size), device=device)


def rerank(path_probs: Seq[float], nodes: int) -> list[int]:
    """Return the `nodes` nodes with the greatest path probabilities, in increasing order. The parent of each is among
    them: a node is at most as likely as its parent, and of equal nodes the earlier one comes first."""
    return sorted(sorted(range(len(path_probs)), key=lambda i: -path_probs[i])[:nodes])


class _Child(NamedTuple):
    """A child to be drawn: its parent, the row of its distribution, and the number of earlier siblings."""

    tree: Tree
    parent: int
    row: int
    rank: int


def add_level(trees: Seq[Tree], frontiers: Seq[Seq[int]], probs: Tensor) -> None:
    """Add the next level to every tree. probs: float [F, V], the distributions at all trees' frontier nodes, packed."""
    best = probs.topk(min(max(tree.width for tree in trees), probs.shape[1]), -1)
    values, tokens = best.values.tolist(), best.indices.tolist()
    start, children = 0, list[_Child]()
    for tree, frontier in zip(trees, frontiers, strict=True):
        rows = range(start, start + len(frontier))
        start = rows.stop
        slots = tree.slots(frontier, [values[r] for r in rows])
        for i, rank in slots:
            if tree.drawn:
                children.append(_Child(tree, frontier[i], rows[i], rank))
            else:
                tree.add(frontier[i], tokens[rows[i]][rank], values[rows[i]][rank])
        tree.ran += [node for node in frontier if node >= 0]
        tree.level += 1
        tree.full = not slots
    if children:
        _draw(children, probs)


def _draw(children: Seq[_Child], probs: Tensor) -> None:
    """Draw children: all first siblings of the level in one call, then all second siblings, and so on; each from the
    distribution without its earlier siblings."""
    numbers: list[int] = []  # index of the node that each child becomes
    ends: dict[int, int] = {}
    for child in children:
        numbers.append(ends.setdefault(id(child.tree), len(child.tree.parents)))
        ends[id(child.tree)] += 1
    left = probs.double().clone()  # [F, V]
    drawn: dict[int, tuple[int, Tensor]] = {}  # index in `children` -> token and its q
    for rank in range(1 + max(child.rank for child in children)):
        now = [n for n, child in enumerate(children) if child.rank == rank]
        rows = torch.tensor([children[n].row for n in now], device=probs.device)
        q = left[rows]
        q = q / q.sum(-1, keepdim=True)  # [n, V]
        picked = _pick(q, [children[n] for n in now], [numbers[n] for n in now])  # [n]
        left[rows, picked] = 0.0
        for k, token in enumerate(picked.tolist()):
            drawn[now[k]] = token, q[k]
    at = torch.tensor([[child.row for child in children], [drawn[n][0] for n in range(len(children))]])
    values = probs[at[0].to(probs.device), at[1].to(probs.device)].tolist()
    for n, child in enumerate(children):
        child.tree.add(child.parent, drawn[n][0], values[n], drawn[n][1])


def _pick(q: Tensor, children: Seq[_Child], numbers: Seq[int]) -> Tensor:
    """Pick a token from each distribution [n, V] -> int64 [n]. Under the rule `coupled`, the token is picked with the
    noise that the target will use at that position, so that similar distributions pick the same token. All siblings
    share this noise. They are the top candidates of one perturbed distribution, so they are drawn without replacement,
    too (Kool et al. 1903.06059)."""
    pairs = list(zip(children, numbers, strict=True))
    # In float64 like q: in float32, a number just below 1 would become 1, and children would be drawn from another q.
    u = [0.0 if is_coupled(child.tree.seq) else child.tree.uniform(n) for child, n in pairs]
    picked = invert(q, torch.tensor(u, dtype=torch.float64, device=q.device))
    for k, child in enumerate(children):
        if is_coupled(seq := child.tree.seq):
            above = child.tree.depths[child.parent] if child.parent >= 0 else 0
            noise = seq.random.gumbel(len(seq.tokens) + above, q.shape[-1])
            picked[k] = (q[k].log() + torch.from_numpy(noise).to(q.device)).argmax()
    return picked
