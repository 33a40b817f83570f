"""Simulated speculative decoding: texts drawn draft token by draft token, to check the closed forms against."""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.theory.forecast import StepCosts
from slipstream.theory.trees import Acceptance, Tree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sampled:
    """A mean with its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Drawn:
    """tau: tokens a step; speedup: plain time over speculative time; both of all texts together."""

    tau: Sampled
    speedup: Sampled


def draw_chains(rates: Seq[float], costs: StepCosts, tokens: int = 256, texts: int = 2000, seed: int = 0) -> Drawn:
    """Texts of `tokens` tokens, each step a chain of len(rates) draft tokens, fewer where the text is about to end.
    rates: share of the steps that accept the draft token at position 1, 2, ..."""
    rng = np.random.default_rng(seed)
    before = np.array([1.0, *rates[:-1]])
    chances = np.divide(rates, before, out=np.zeros(len(rates)), where=before > 0)  # [K] given all before it

    def accept(alive: int) -> Ints:
        accepted = rng.random((alive, len(rates))) < chances  # [alive, K]
        return np.cumprod(accepted, axis=1).sum(axis=1)

    return _draw(accept, [costs.step(k) for k in range(len(rates) + 1)], tokens, texts)


def draw_trees(
    tree: Tree, acceptance: Acceptance, costs: StepCosts, tokens: int = 256, texts: int = 2000, seed: int = 0
) -> Drawn:
    """The same with a tree a step, cut to the depth that the text has left; `acceptance` as in `core.trees`."""
    rng = np.random.default_rng(seed)
    reach = np.array([float(c) for c in tree.chances(acceptance)])  # [N]
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(i)
    widest = max(map(len, children.values()), default=0)
    edges = np.zeros((len(tree) + 1, widest))  # [N + 1, W]: chance that one of the first w children is accepted
    below = np.full((len(tree) + 1, widest + 1), -1)  # [N + 1, W + 1]: which child; the last column: none
    for parent, kids in children.items():
        mass = 1.0 if parent < 0 else reach[parent]
        edges[parent, : len(kids)] = np.cumsum(reach[kids]) / mass if mass else 0.0
        edges[parent, len(kids) :] = edges[parent, len(kids) - 1]
        below[parent, : len(kids)] = kids

    def accept(alive: int) -> Ints:
        node, depth = np.full(alive, -1), np.zeros(alive, dtype=np.int64)
        walking = np.ones(alive, dtype=bool)
        for _ in range(tree.height):
            child = (rng.random((alive, 1)) >= edges[node]).sum(axis=1)  # edges: the first that u falls below
            node = np.where(walking, below[node, np.minimum(child, widest)], node)
            walking &= node >= 0
            depth += walking
        return depth

    cut = [tree.cut(room) for room in range(tree.height + 1)]
    return _draw(accept, [costs.step(len(t)) - costs.c * (len(t) - t.height) for t in cut], tokens, texts)


def _draw(accept: Callable[[int], Ints], costs: Seq[float], tokens: int, texts: int) -> Drawn:
    """Step after step until every text is full. accept(n): how many draft tokens n texts accept; costs[k]: of a step
    that may draft k deep."""
    longest, cost = len(costs) - 1, np.asarray(costs)
    left, steps, spent = np.full(texts, tokens), np.zeros(texts), np.zeros(texts)
    while len(alive := np.flatnonzero(left)):
        room = np.minimum(left[alive] - 1, longest)
        left[alive] -= np.minimum(accept(len(alive)) if longest else 0, room) + 1
        steps[alive] += 1
        spent[alive] += cost[room]
    full = np.full(texts, float(tokens))
    return Drawn(_ratio(full, steps), _ratio(full, spent))


def _ratio(top: Floats, bottom: Floats) -> Sampled:
    """Ratio of the sums with its standard error, to first order (the delta method)."""
    value = top.sum() / bottom.sum()
    residual = top - value * bottom
    return Sampled(float(value), float(residual.std(ddof=1) / (bottom.mean() * np.sqrt(len(top)))))
