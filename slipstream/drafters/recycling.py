"""Token recycling (Luo et al. 2408.08696): drafts the tokens that the target found likely after the same token before.

Every row that the target runs, rejected draft tokens included, shows which tokens are likely after the row's token.
Here the best `candidates` of each row are kept in a matrix with one row per token of the vocabulary; later rows
overwrite earlier ones (2408.08696, section 3.1). A fixed tree of ranks is filled from it, breadth first: a node of rank
r is candidate r after its parent's token (section 3.2).

    matrix                          the tree (0,), (1,), (0, 0), (0, 1), after a pending "the":
    the -> cat dog car
    cat -> sat ran is                    the ─┬─ cat(0) ─┬─ sat(2)
    dog -> (not met yet)                      │          └─ ran(3)
                                              └─ dog(1)

The paper's tree is made by hand and never changes. Here it is the optimal tree for the acceptance rate of each rank
(`trees.optimal_tree`). The rates are counted during decoding, and the tree is rebuilt now and then, with the number of
nodes that saves the most time at `row_cost`, possibly 0. row_cost 0 keeps one tree of `nodes` draft tokens, as in the
paper.

The context is a single token, so the acceptance rate per draft token is low; many draft tokens make up for it. Every
draft token is deterministic given earlier steps (a point mass), so q is None. The matrix belongs to the request and is
empty at first, so nothing depends on the rest of the batch. With `shared`, all requests use one matrix, as in the
paper; the text sampled for a seed, but not its distribution, then depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import DrafterTraits
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.drafters.guard import MAX_NODES
from slipstream.errors import ParameterError
from slipstream.theory.cost_curve import CostCurve
from slipstream.theory.trees import Tree, best_count, optimal_tree

ASSUMED = (0.40, 0.14, 0.07, 0.045, 0.03, 0.022, 0.017, 0.014)
"""Assumed acceptance rate of each rank before anything has been counted."""
TRUST = 8  # weight of the assumption, in counted tokens
FADE = 127 / 128  # weight that the record keeps with each counted token
REBUILD = 8  # steps after which the tree is rebuilt


@dataclass(frozen=True)
class RecyclingConfig(Strict):
    """candidates  likely tokens kept for each token (k; 8 in the paper).
    nodes       most draft tokens in a tree (80 in the paper; use fewer if verifying many rows at once is slow).
    max_draft   greatest depth (6 in the paper); the engine's own limit applies as well.
    row_cost    cost of verifying one more row, as a share of a step: the tree has the size that saves the most time at
                the acceptance rates counted. 0: always all `nodes`.
    shared      one matrix for all requests. A matrix takes 4 * candidates * (vocabulary + 1) bytes and does not grow.
    """

    candidates: int = 8
    nodes: int = 24
    max_draft: int = 6
    row_cost: float = 0.05
    shared: bool = False

    def __post_init__(self) -> None:
        for name in ("candidates", "nodes", "max_draft"):
            check_integer(name, getattr(self, name), 1)
        check_number("row_cost", self.row_cost, 0.0, 1.0)
        if self.candidates > len(ASSUMED):
            raise ParameterError(f"candidates is {self.candidates}, at most {len(ASSUMED)} are kept for a token")
        if self.nodes > MAX_NODES:
            raise ParameterError(f"nodes is {self.nodes}, at most {MAX_NODES} draft tokens are verified")


class Shape:
    """The tree to fill, rebuilt now and then from the acceptance rate of each rank.

    A rank is counted as accepted if its candidate is the token emitted next, whether it was drafted or not. So a tree
    that has shrunk to nothing grows again as soon as it would save time.
    """

    def __init__(self, config: RecyclingConfig):
        self.config = config
        self.compared = 0.0
        self.accepted = [0.0] * config.candidates
        self._steps = 0
        self._rebuild()

    def rates(self) -> list[float]:
        """Estimated acceptance rate of each rank."""
        assumed = ASSUMED[: self.config.candidates]
        return [(n + a * TRUST) / (self.compared + TRUST) for n, a in zip(self.accepted, assumed, strict=True)]

    def learn(self, rank: int | None) -> None:
        """Count the rank of the emitted token; None: it was not a candidate."""
        self.compared = self.compared * FADE + 1
        self.accepted = [n * FADE for n in self.accepted]
        if rank is not None:
            self.accepted[rank] += 1

    def plan(self, depth: int) -> _Plan:
        """The tree for one step, at most `depth` deep."""
        self._steps += 1
        if self.config.row_cost and self._steps % REBUILD == 0:
            self._rebuild()
        return _plan(self._tree, depth)

    def _rebuild(self) -> None:
        self._tree = _best_tree(tuple(self.rates()), self.config)


@lru_cache(maxsize=16)  # every request starts with the same tree
def _best_tree(rates: tuple[float, ...], config: RecyclingConfig) -> Tree:
    """The optimal tree at these acceptance rates, of the size that saves the most time."""
    tree = optimal_tree(rates, config.nodes, config.max_draft)
    if not config.row_cost:
        return tree
    return tree.keep(range(best_count(tree.chances(rates), CostCurve.flat(config.row_cost))))


@lru_cache(maxsize=256)
def _plan(tree: Tree, depth: int) -> _Plan:
    """How to fill the tree, at most `depth` deep."""
    return _Plan(tree.cut(depth))


class _Plan:
    """How to fill a tree level by level, one indexing operation each. Node i is at index i + 1, the root at 0."""

    def __init__(self, tree: Tree):
        self.parents = np.array(tree.parents, dtype=np.int64)
        self.levels = []  # (indices, indices of the parents, ranks) at each depth
        for depth in range(1, tree.height + 1):
            nodes = np.array([i for i, d in enumerate(tree.depths) if d == depth])
            self.levels.append((nodes + 1, self.parents[nodes] + 1, np.array(tree.ranks)[nodes]))

    def fill(self, matrix: np.ndarray, root: int) -> tuple[list[int], list[int]]:
        """(tokens, parents) of the tree after the token `root`, without nodes for which no candidate is known."""
        tokens = np.empty(len(self.parents) + 1, dtype=np.int64)
        tokens[0] = root
        for places, above, ranks in self.levels:
            tokens[places] = matrix[tokens[above], ranks]  # the row of token -1 is empty, so it gets no children
        known = tokens[1:] >= 0
        if known.all():
            return tokens[1:].tolist(), self.parents.tolist()
        moved = np.concatenate((np.cumsum(known) - 1, [-1]))  # new index of each node; the last entry is the root's
        return tokens[1:][known].tolist(), moved[self.parents[known]].tolist()


@dataclass
class _State:
    matrix: np.ndarray  # int32 [V + 1, k]; -1: unknown. The last row, for "no token", stays empty
    shape: Shape


class RecyclingDrafter:
    """vocab_size: width V of the target's logits. device: where the target wants its draft tokens."""

    name = "recycling"

    def __init__(self, vocab_size: int, config: RecyclingConfig | None = None, device: torch.device | str = "cpu"):
        self.vocab_size, self.config, self.device = vocab_size, config or RecyclingConfig(), device
        self._shared = self._matrix() if self.config.shared else None
        self.traits = DrafterTraits(remembers=self.config.shared)
        self._states: dict[int, _State] = {}

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        splits = [0]
        for seq, depth in zip(seqs, budget, strict=True):
            if depth > 0:
                state = self._state(seq)
                filled = state.shape.plan(min(depth, self.config.max_draft)).fill(state.matrix, seq.tokens[-1])
                tokens += filled[0]
                parents += filled[1]
            splits.append(len(tokens))
        return Draft.of(tokens, parents, splits, device=self.device)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        if not any(seq.id in self._states for seq in seqs):
            return
        likely = out.logits.topk(min(self.config.candidates, out.logits.shape[-1])).indices.cpu().numpy()  # [B + N, k]
        for b, seq in enumerate(seqs):
            state = self._states.get(seq.id)
            if state is not None:
                start, path = draft.splits[b], verdict.path[b]
                text = seq.tokens[-len(verdict.run(draft, b)) - 1 :]  # from the pending token on
                for before, after in pairwise(text):
                    row = state.matrix[before].tolist()
                    if row[0] >= 0:
                        state.shape.learn(row.index(after) if after in row else None)
                ran = [text[0], *draft.ids[start : draft.splits[b + 1]], text[0], *(draft.ids[start + i] for i in path)]
                rows = [*range(draft.splits[b + 1] - start + 1), 0, *(1 + i for i in path)]
                # If a token ran twice, the last write is kept: that of the text, not that of a rejected draft token.
                state.matrix[ran, : likely.shape[1]] = likely[start + b :][rows]

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def _state(self, seq: Sequence) -> _State:
        """Created when it is first needed: a sequence for which speculation is off costs nothing."""
        state = self._states.get(seq.id)
        if state is None:
            matrix = self._matrix() if self._shared is None else self._shared
            state = self._states[seq.id] = _State(matrix, Shape(self.config))
        return state

    def _matrix(self) -> np.ndarray:
        return np.full((self.vocab_size + 1, self.config.candidates), -1, dtype=np.int32)


def make(target: Target, **options: Any) -> RecyclingDrafter:
    """See `registry`; options as in `RecyclingConfig`."""
    return RecyclingDrafter(target.vocab_size, RecyclingConfig(**options), target.device)
