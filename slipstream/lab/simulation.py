"""Speculative decoding by chance: texts drawn guess by guess, to check the closed forms and to see what they hide.

A closed form gives the mean of the long run. Drawing texts shows the rest: the short rounds at the end of a text, how
far one request differs from the next, and what acceptance that varies between requests costs. Every figure has its
standard error. Costs are those of `theory.round_cost`: relative to one plain step of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.core.cost_curve import CostCurve
from slipstream.core.params import Strict, check_integer, check_number
from slipstream.core.theory import break_even, check_rates, expected_length
from slipstream.core.trees import Acceptance, Tree, expected_tokens, optimal_tree
from slipstream.errors import ParameterError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Setting(Strict):
    """What steps cost, as `theory.round_cost` takes it.

    c      a draft step over a plain step of the whole batch.
    costs  the target by rows; None: checking is free.
    batch  sequences a step; one that ends is replaced.
    host   extra fixed work of a round, in plain steps.
    """

    c: float = 0.05
    costs: CostCurve | None = None
    batch: int = 1
    host: float = 0.0

    def __post_init__(self) -> None:
        check_number("c", self.c, 0.0, float("inf"))
        check_number("host", self.host, 0.0, float("inf"))
        check_integer("batch", self.batch, 1)

    def round_cost(self, nodes: int, height: int) -> float:
        """Of a tree of so many guesses, drafted in `height` steps, in plain steps; a chain is a tree too."""
        if not nodes:
            return 1.0
        checking = 1 if self.costs is None else self.costs(self.batch * (nodes + 1)) / self.costs(self.batch)
        return checking + height * self.c + self.host


@dataclass(frozen=True)
class Sampled:
    """A mean with its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


@dataclass(frozen=True)
class Outcome(Strict):
    """What drawn texts came to.

    tau      tokens a round, and `speedup`: plain time over speculative time, both of all texts together.
    spread   10th, 50th and 90th percentile of the speed-up of a single text.
    histogram  share of the rounds that accept 0, 1, ... guesses.
    """

    texts: int
    tokens: int
    tau: Sampled
    speedup: Sampled
    spread: tuple[float, float, float]
    histogram: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"tau": vars(self.tau), "speedup": vars(self.speedup)}


def simulate_chain(
    rates: Seq[float],
    setting: Setting,
    tokens: int = 256,
    texts: int = 2000,
    seed: int = 0,
    spread: float = 0.0,
) -> Outcome:
    """Draw texts of `tokens` tokens, each round a chain of len(rates) guesses, less where the text is about to end.

    rates   share of the rounds whose guess at position 1, 2, ... stands (`theory.geometric_rates` of an alpha).
    spread  standard deviation between texts of the chance that a guess stands, given those before it: each text scales
            all of its chances to stand by a factor of its own, drawn from a beta law about the first one.
    Raises ParameterError for rates that cannot be, or a spread that no beta law has.
    """
    _check(tokens, texts)
    check_rates(rates)
    rng = np.random.default_rng(seed)
    before = np.array([1.0, *rates[:-1]])
    chances = np.divide(rates, before, out=np.zeros(len(rates)), where=before > 0)  # [K] given all before it
    own = np.broadcast_to(chances, (texts, len(rates)))  # [texts, K]
    if spread:
        own = np.clip(chances * (_beta(rng, float(chances[0]), spread, texts) / chances[0])[:, None], 0, 1)

    def accept(alive: NDArray[np.intp]) -> NDArray[np.int64]:
        stood = rng.random((len(alive), len(rates))) < own[alive]  # [alive, K]
        return np.cumprod(stood, axis=1).sum(axis=1)

    costs = [setting.round_cost(k, k) for k in range(len(rates) + 1)]
    return _draw(accept, costs, tokens, texts)


@dataclass(frozen=True)
class Row(Strict):
    """One draft length: the closed form beside what was drawn."""

    gamma: int
    tau: float
    cost: float
    break_even: float | None
    drawn: Outcome

    @property
    def speedup(self) -> float:
        return self.tau / self.cost

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"speedup": self.speedup, "drawn": self.drawn.as_dict()}


def compare_lengths(
    rates: Seq[float], gammas: Seq[int], setting: Setting, spread: float = 0.0, **drawing: int
) -> list[Row]:
    """For each draft length up to len(rates): closed form and drawing. `drawing`: tokens, texts, seed."""
    rows = []
    for gamma in gammas:
        part = list(rates[:gamma])
        rows.append(
            Row(
                gamma=gamma,
                tau=expected_length(part),
                cost=setting.round_cost(gamma, gamma),
                break_even=break_even(gamma, setting.c, setting.costs, setting.batch, setting.host),
                drawn=simulate_chain(part, setting, spread=spread, **drawing),
            )
        )
    return rows


def simulate_tree(
    tree: Tree, acceptance: Acceptance, setting: Setting, tokens: int = 256, texts: int = 2000, seed: int = 0
) -> Outcome:
    """The same with a tree a round, cut to the depth that the text has left; `acceptance` as in `core.trees`."""
    _check(tokens, texts)
    rng = np.random.default_rng(seed)
    reach = np.array([float(c) for c in tree.chances(acceptance)])  # [N]
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(i)
    widest = max(map(len, children.values()), default=0)
    edges = np.zeros((len(tree) + 1, widest))  # [N + 1, W]: chance that one of the first w children stands; last: root
    below = np.full((len(tree) + 1, widest + 1), -1)  # [N + 1, W + 1]: which child; the last column: none
    for parent, kids in children.items():
        mass = 1.0 if parent < 0 else reach[parent]
        edges[parent, : len(kids)] = np.cumsum(reach[kids]) / mass if mass else 0.0
        edges[parent, len(kids) :] = edges[parent, len(kids) - 1]
        below[parent, : len(kids)] = kids

    def accept(alive: NDArray[np.intp]) -> NDArray[np.int64]:
        node, depth = np.full(len(alive), -1), np.zeros(len(alive), dtype=np.int64)
        walking = np.ones(len(alive), dtype=bool)
        for _ in range(tree.height):
            child = (rng.random((len(alive), 1)) >= edges[node]).sum(axis=1)  # edges: the first that u falls below
            node = np.where(walking, below[node, np.minimum(child, widest)], node)
            walking &= node >= 0
            depth += walking
        return depth

    cut = [tree.cut(room) for room in range(tree.height + 1)]
    return _draw(accept, [setting.round_cost(len(t), t.height) for t in cut], tokens, texts)


def best_tree(acceptance: Acceptance, setting: Setting, most: int = 64, deepest: int = 16) -> tuple[Tree, float]:
    """The tree of the greatest expected speed-up, and that speed-up: over all depths and node counts, since each level
    costs a draft step and each node a row. An empty tree and 1 if none pays."""
    check_integer("nodes", most, 1)
    best, gain = Tree((), ()), 1.0
    for depth in range(1, deepest + 1):
        whole = optimal_tree(acceptance, most, depth)
        if whole.height < depth:
            break
        tokens = 1.0
        for n, chance in enumerate(whole.chances(acceptance), start=1):
            tokens += float(chance)
            if n >= depth and tokens / setting.round_cost(n, depth) > gain * (1 + 1e-12):
                tree = whole.keep(range(n))
                if tree.height == depth:
                    best, gain = tree, tokens / setting.round_cost(n, depth)
    return best, gain


def tree_speedup(tree: Tree, acceptance: Acceptance, setting: Setting) -> float:
    """Expected speed-up of a tree a round, in the long run."""
    return float(expected_tokens(tree, acceptance)) / setting.round_cost(len(tree), tree.height)


def _draw(accept: Any, costs: Seq[float], tokens: int, texts: int) -> Outcome:
    """Round after round until every text is full; accept(texts at work) draws how many guesses stand. costs[k]: of a
    round that may draft k deep."""
    longest, cost = len(costs) - 1, np.asarray(costs)
    left, rounds, spent = np.full(texts, tokens), np.zeros(texts), np.zeros(texts)
    histogram = np.zeros(longest + 1)
    while len(alive := np.flatnonzero(left)):
        room = np.minimum(left[alive] - 1, longest)
        stood = np.minimum(accept(alive) if longest else 0, room)
        np.add.at(histogram, stood, 1)
        left[alive] -= stood + 1
        rounds[alive] += 1
        spent[alive] += cost[room]
    own = np.percentile(tokens / spent, [10, 50, 90])
    return Outcome(
        texts=texts,
        tokens=tokens,
        tau=_ratio(np.full(texts, float(tokens)), rounds),
        speedup=_ratio(np.full(texts, float(tokens)), spent),
        spread=(float(own[0]), float(own[1]), float(own[2])),
        histogram=tuple(float(h) for h in histogram / histogram.sum()),
    )


def _ratio(top: Floats, bottom: Floats) -> Sampled:
    """Ratio of the sums with its standard error, to first order (the delta method)."""
    value = top.sum() / bottom.sum()
    residual = top - value * bottom
    error = residual.std(ddof=1) / (bottom.mean() * np.sqrt(len(top))) if len(top) > 1 else float("nan")
    return Sampled(float(value), float(error))


def _beta(rng: np.random.Generator, mean: float, deviation: float, texts: int) -> Floats:
    most = (mean * (1 - mean)) ** 0.5
    if not 0 < deviation < most:
        raise ParameterError(
            f"an acceptance rate of {mean:g} cannot vary by {deviation:g} between texts",
            why=f"it stays within [0, 1], so its standard deviation is below {most:.3g}",
            fix="choose a smaller spread",
        )
    weight = mean * (1 - mean) / deviation**2 - 1
    return rng.beta(mean * weight, (1 - mean) * weight, texts)


def _check(tokens: int, texts: int) -> None:
    check_integer("tokens", tokens, 1)
    check_integer("texts", texts, 2)
