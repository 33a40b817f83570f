"""Token recycling (Luo et al. 2408.08696): what the target found likely once is what is guessed next time.

Every row that the target runs, guesses that fell included, says which tokens are likely behind the row's own token.
That is usually thrown away; here the best `candidates` of each row are kept in a matrix, one row for each token of the
vocabulary, the latest visit written over the earlier (2408.08696, section 3.1). A fixed tree of ranks is filled from
it, breadth first: a node's guess is the candidate of the node's rank behind its parent's token (section 3.2).

    matrix                          the tree (0,), (1,), (0, 0), (0, 1), behind a pending "the":
    the -> cat dog car
    cat -> sat ran is                    the ─┬─ cat(0) ─┬─ sat(2)
    dog -> (not met yet)                      │          └─ ran(3)
                                              └─ dog(1)

The paper's tree is drawn by hand and never changes. Here it is the optimal tree for the chance of each rank to be the
right one (`trees.optimal_tree`); the chances are counted from how guesses fared, and the tree is remade now and then,
as large as pays at `row_cost`, which may be not at all. row_cost 0 keeps one tree of `nodes` guesses, as in the paper.

Only one token of context is looked at, so guesses are poor one by one; it is their number that makes up for it. Every
guess is deterministic given earlier rounds, a point mass, so q is None. The matrix belongs to the request and begins
empty, so nothing depends on the rest of the batch; with `shared` all requests write into one, as in the paper, and
which text is sampled for a seed, though not its law, depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from slipstream.core.cost_curve import CostCurve
from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target, TargetOut
from slipstream.core.trees import Tree, best_count, optimal_tree
from slipstream.drafters.guard import MAX_NODES
from slipstream.errors import ParameterError

ASSUMED = (0.40, 0.14, 0.07, 0.045, 0.03, 0.022, 0.017, 0.014)
"""Chance of each rank to be the right one, where nothing has been counted: an assumption, corrected by counting."""
TRUST = 8  # tokens counted that weigh as much as the assumption
FADE = 127 / 128  # weight that the record keeps with each token counted
REMAKE = 8  # rounds between two trees


@dataclass(frozen=True)
class RecyclingConfig(Strict):
    """candidates  likely tokens kept behind each token (k; the paper's 8).
    nodes       most guesses in a tree (the paper's tree has 80: on a processor that verifies few rows at once, less).
    max_draft   deepest guess (the paper's 6); the engine's own limit applies as well.
    row_cost    what verifying one more row costs, as a share of a step: the tree is as large as pays at that, judged by
                how guesses fared. 0 always takes all `nodes`.
    shared      one matrix for all requests. A matrix takes 4 * candidates * (vocabulary + 1) bytes, and never grows.
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
        if not isinstance(self.shared, bool):
            raise ParameterError(f"shared is {self.shared!r}, must be True or False")
        if self.candidates > len(ASSUMED):
            raise ParameterError(f"candidates is {self.candidates}, at most {len(ASSUMED)} are kept of a token")
        if self.nodes > MAX_NODES:
            raise ParameterError(f"nodes is {self.nodes}, at most {MAX_NODES} guesses are verified")


class Shape:
    """The tree to fill: remade now and then from how often the candidate of each rank was the right one.

    That is counted at every token that is emitted behind a row of the matrix, whether or not it was guessed, so a tree
    that has shrunk to nothing grows again as soon as it would pay.
    """

    def __init__(self, config: RecyclingConfig):
        self.config = config
        self.judged = 0.0
        self.right = [0.0] * config.candidates
        self._rounds = 0
        self._make()

    def chances(self) -> list[float]:
        """Chance of the candidate of each rank to be the right one."""
        assumed = ASSUMED[: self.config.candidates]
        return [(r + a * TRUST) / (self.judged + TRUST) for r, a in zip(self.right, assumed, strict=True)]

    def learn(self, rank: int | None) -> None:
        """Take in which candidate was right; None: none was."""
        self.judged = self.judged * FADE + 1
        self.right = [r * FADE for r in self.right]
        if rank is not None:
            self.right[rank] += 1

    def plan(self, depth: int) -> _Plan:
        """The tree, no deeper than `depth`, for one round."""
        self._rounds += 1
        if self.config.row_cost and self._rounds % REMAKE == 0:
            self._make()
        return _plan(self._tree, depth)

    def _make(self) -> None:
        self._tree = _worth(tuple(self.chances()), self.config)


@lru_cache(maxsize=16)  # every request begins with the same
def _worth(chances: tuple[float, ...], config: RecyclingConfig) -> Tree:
    """The optimal tree at these chances, as large as pays."""
    tree = optimal_tree(chances, config.nodes, config.max_draft)
    if not config.row_cost:
        return tree
    return tree.keep(range(best_count(tree.chances(chances), CostCurve.flat(config.row_cost))))


@lru_cache(maxsize=256)
def _plan(tree: Tree, depth: int) -> _Plan:
    """How to fill the tree, no deeper than `depth`."""
    return _Plan(tree.cut(depth))


class _Plan:
    """How to fill a tree level by level, each in one indexing. Node i is kept at place i + 1, the root at 0."""

    def __init__(self, tree: Tree):
        self.parents = np.array(tree.parents, dtype=np.int64)
        self.levels = []  # (places, places of the parents, ranks) of each depth
        for depth in range(1, tree.height + 1):
            nodes = np.array([i for i, d in enumerate(tree.depths) if d == depth])
            self.levels.append((nodes + 1, self.parents[nodes] + 1, np.array(tree.ranks)[nodes]))

    def fill(self, matrix: np.ndarray, root: int) -> tuple[list[int], list[int]]:
        """(tokens, parents) of the tree behind the token `root`, without the places for which nothing is known."""
        tokens = np.empty(len(self.parents) + 1, dtype=np.int64)
        tokens[0] = root
        for places, above, ranks in self.levels:
            tokens[places] = matrix[
                tokens[above], ranks
            ]  # the row of token -1 holds nothing, so nothing hangs below it
        known = tokens[1:] >= 0
        if known.all():
            return tokens[1:].tolist(), self.parents.tolist()
        moved = np.concatenate((np.cumsum(known) - 1, [-1]))  # new index of each node; the last entry is the root's
        return tokens[1:][known].tolist(), moved[self.parents[known]].tolist()


@dataclass
class _State:
    matrix: np.ndarray  # int32 [V + 1, k]; -1: nothing known. The last row, that of "no token", stays empty
    shape: Shape


class RecyclingDrafter:
    """vocab_size: width V of the target's logits. device: where the target wants its draft tokens."""

    name = "recycling"
    taps: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, config: RecyclingConfig | None = None, device: torch.device | str = "cpu"):
        self.vocab_size, self.config, self.device = vocab_size, config or RecyclingConfig(), device
        self._shared = self._matrix() if self.config.shared else None
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
                # The latest write stands where a token ran twice: that of the text, not that of a guess that fell.
                state.matrix[ran, : likely.shape[1]] = likely[start + b :][rows]

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def _state(self, seq: Sequence) -> _State:
        """Made when first needed: a sequence for which speculation is off costs nothing."""
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
