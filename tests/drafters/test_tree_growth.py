"""Growing trees: EAGLE-2's rerank against the optimal trees of Sequoia, and closure under parents."""

import random

import numpy as np
import pytest
import torch

from slipstream.core.dice import invert
from slipstream.core.sequence import Sequence
from slipstream.drafters.tree_growth import Tree, add_level, rerank
from slipstream.theory.trees import expect_tokens, optimal_tree

CHANCES = (0.5, 0.2, 0.1)


def grown(depth: int, nodes: int, width: int = 4**6, probs: tuple[float, ...] = (*CHANCES, 0.2)) -> Tree:
    """A tree in which every node has the same distribution over four candidates; the last one is never expanded."""
    tree = Tree(Sequence([0]), depth, width, nodes, drawn=False)
    while frontier := tree.frontier():
        rows = torch.tensor([probs] * len(frontier), dtype=torch.float64)
        rows[:, len(CHANCES) :] = 0
        add_level([tree], [frontier], rows)
    return tree


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 5, 7, 11, 15])
def test_the_rerank_of_a_grown_tree_is_the_optimal_tree(nodes: int) -> None:
    tree = grown(6, nodes)
    kept = rerank(tree.path_probs, tree.nodes)
    assert len(kept) == nodes
    optimal = expect_tokens(optimal_tree(CHANCES, nodes), CHANCES)
    assert 1 + sum(tree.path_probs[i] for i in kept) == pytest.approx(optimal, abs=1e-12)


def test_no_node_is_kept_without_its_parent() -> None:
    rng = random.Random(0)
    for _ in range(200):
        parents, path_probs = list[int](), list[float]()
        for i in range(30):
            parents.append(rng.randrange(-1, i))
            above = path_probs[parents[i]] if parents[i] >= 0 else 1.0
            path_probs.append(above * rng.choice((1.0, 0.5, 0.5, 0.1)))  # certain children tie with their parents
        kept = rerank(path_probs, rng.randrange(1, 30))
        assert all(parents[i] < 0 or parents[i] in kept for i in kept)


def test_a_narrow_tree_expands_the_most_probable_nodes_of_a_level() -> None:
    tree = grown(3, 100, width=2)
    assert [tree.depths.count(d) for d in (1, 2, 3)] == [2, 4, 4]
    expanded = sorted((tree.path_probs[i] for i in tree.ran if tree.depths[i] == 2), reverse=True)
    assert expanded == pytest.approx([0.25, 0.1])


def drawn(uniforms: list[float], probs: list[float]) -> Tree:
    """Siblings below the root, drawn with these random numbers."""
    tree = Tree(Sequence([0]), 1, len(uniforms), len(uniforms), drawn=True)
    tree._uniforms = np.array(uniforms)
    add_level([tree], [tree.frontier()], torch.tensor([probs], dtype=torch.float64))
    return tree


LAST = 1 - 2.0**-53  # the largest random number


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24, 1 - 2.0**-25, 1 - 2.0**-26, LAST])
def test_a_sibling_can_be_drawn_with_every_random_number(u: float) -> None:
    """Also with one that float32 rounds to 1."""
    for probs in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25, 0.0]):
        tree = drawn([u, u], probs)
        for token, q in zip(tree.tokens, tree.q, strict=True):
            assert q[token] > 0
            assert float(q.sum()) == pytest.approx(1, abs=1e-12)


def test_siblings_are_drawn_from_exactly_the_q_that_is_stated() -> None:
    """Random numbers within a float32's rounding of where one token ends and the next begins."""
    probs = [0.3, 0.1, 0.35, 0.25]
    ends = torch.tensor(probs, dtype=torch.float64).cumsum(0)[:-1].tolist()
    for u in (min(max(end + step, 0.0), LAST) for end in ends for step in (-1e-8, -1e-15, 0.0, 1e-15, 1e-8)):
        tree = drawn([u], probs)
        assert tree.tokens[-1] == int(invert(tree.q[-1][None], torch.tensor([u], dtype=torch.float64)))
