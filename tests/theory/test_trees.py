"""Fixed trees: the published figures, the dynamic programme as an oracle, and what verification makes of them."""

import random
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

from slipstream.core.rules import RULES
from slipstream.errors import ParameterError
from slipstream.theory.cost_curve import CostCurve
from slipstream.theory.trees import TreeShape, best_count, best_tree, expect_tokens, optimal_tree
from tests.core.exact import mean_accepted
from tests.core.worlds import Shape, probs, steady

TENTHS = (Fraction(5, 10), Fraction(2, 10), Fraction(1, 10))


def sequoia(rows: list[tuple[Fraction, ...]], nodes: int) -> Fraction:
    """Expected tokens of the best tree of `nodes` nodes, root included, by the dynamic programme over subtree sizes;
    rows[d]: chances of the ranks d levels below the root, none deeper than len(rows)."""

    @cache
    def whole(n: int, level: int) -> Fraction:
        return Fraction(0) if n == 0 else 1 + shared(n - 1, 0, level)

    @cache
    def shared(n: int, rank: int, level: int) -> Fraction:
        """n nodes among the children of one node, ranks from `rank` on."""
        if n == 0 or level == len(rows) or rank == len(rows[level]):
            return Fraction(0)
        return max(rows[level][rank] * whole(m, level + 1) + shared(n - m, rank + 1, level) for m in range(n + 1))

    return whole(nodes, 0)


@pytest.mark.parametrize(
    ("nodes", "tokens"),
    [(1, "1"), (2, "1.5"), (3, "1.75"), (4, "1.95"), (6, "2.175"), (8, "2.375"), (12, "2.5875"), (16, "2.75875")],
)
def test_the_optimal_tree_yields_the_published_figures(nodes: int, tokens: str) -> None:
    """Child acceptance (.5, .2, .1); `nodes` counts the root, as the papers do."""
    tree = optimal_tree(TENTHS, nodes - 1)
    assert len(tree) == nodes - 1
    assert expect_tokens(tree, TENTHS) == Fraction(tokens) == sequoia([TENTHS] * nodes, nodes)


@pytest.mark.parametrize("seed", range(8))
def test_best_first_equals_the_dynamic_programme_at_every_depth(seed: int) -> None:
    """Chances that differ from depth to depth, in no order, with zeros and ties."""
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 4)):
        weights = [rng.randint(0, 6) for _ in range(rng.randint(1, 4))]
        rows.append(tuple(Fraction(w, sum(weights) + rng.randint(1, 4)) for w in weights))
    for depth in range(1, len(rows) + 1):
        for n in range(14):
            tree = optimal_tree(rows, n, depth)
            assert tree.height <= depth
            assert expect_tokens(tree, rows) == sequoia(rows[:depth], n + 1)


def test_every_prefix_of_the_nodes_is_optimal_within_the_depth_and_none_is_drafted_in_vain() -> None:
    whole = optimal_tree(TENTHS, 40)
    chances = whole.chances(TENTHS)
    assert chances == sorted(chances, reverse=True)
    for n in range(40):
        assert whole.keep(range(n)) == optimal_tree(TENTHS, n)
    assert optimal_tree((0.9, 0.05), 8).height == 8
    shallow = optimal_tree((0.9, 0.05), 100, depth=2)
    assert shallow.height == 2
    assert len(shallow) == 2 + 4  # every path there is
    assert optimal_tree((0.9, 0.05), 100, depth=0) == TreeShape((), ())
    assert optimal_tree(((0.5, 0.0), (0.0,)), 10) == TreeShape((-1,), (0,))
    assert optimal_tree((), 10) == TreeShape((), ())


@pytest.mark.parametrize("nodes", [3, 6, 8])
def test_verification_accepts_the_predicted_number_of_tokens(nodes: int) -> None:
    """The production rule, enumerated: candidates whose ranks have these chances, as a tree of point masses."""
    tree = optimal_tree(TENTHS, nodes)
    world = replace(steady(probs(5, 2, 1, 2), probs(5, 2, 1, 2)), fixed=lambda text, node: tree.ranks[node])
    accepted = mean_accepted(RULES["rejection"], world, Shape(tree.parents, "p" * nodes))
    assert 1 + accepted == expect_tokens(tree, TENTHS)


def test_the_best_count_has_the_most_tokens_per_time_so_free_rows_are_all_used() -> None:
    rng = random.Random(1)
    for _ in range(30):
        chances = sorted((rng.random() for _ in range(12)), reverse=True)
        steps = [rng.choice([0.0, 0.01, 0.3]) for _ in range(12)]  # flat stretches and jumps, as kernels have them
        seconds = [1.0 + sum(steps[:i]) for i in range(13)]
        costs = CostCurve(tuple(range(1, 14)), tuple(seconds))
        rates = [(1 + sum(chances[:n])) / seconds[n] for n in range(13)]
        assert rates[best_count(chances, costs)] == pytest.approx(max(rates))
    assert len(best_tree(TENTHS, CostCurve.flat(0.0), most=30)) == 30
    assert len(best_tree(TENTHS, CostCurve.flat(0.6), most=30)) == 0
    assert len(best_tree(TENTHS, CostCurve.flat(0.4), most=30)) == 1


def test_a_shape_is_read_from_paths_in_any_order_full_or_cut_to_its_shallow_nodes() -> None:
    tree = TreeShape.of_paths([[1, 0], [0], [0, 1], [1], [0, 0]])
    assert tree == TreeShape((-1, -1, 0, 0, 1), (0, 1, 0, 1, 0))
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert tree.depths == (1, 1, 2, 2, 2)
    tree = TreeShape.full((3, 2, 1))
    assert len(tree) == 3 + 6 + 6
    assert set(tree.paths) >= {(2,), (2, 1), (2, 1, 0)}
    assert len(TreeShape.full(())) == 0
    tree = TreeShape.of_paths([[0], [0, 0], [0, 0, 0], [1], [1, 0]])
    assert tree.cut(3) is tree
    assert set(tree.cut(2).paths) == {(0,), (0, 0), (1,), (1, 0)}
    assert tree.cut(0) == TreeShape((), ())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: optimal_tree((0.6, 0.8), 4), "their sum at most 1"),  # shares of all ranks up to it
        (lambda: optimal_tree(((0.6, -0.1),), 4), "was given as acceptance probabilities"),
        (lambda: optimal_tree((float("nan"),), 4), "was given as acceptance probabilities"),
        (lambda: optimal_tree((0.5,), -1), "nodes >= 0"),
        (lambda: TreeShape.of_paths([[0, 1]]), "no parent"),
        (lambda: TreeShape.of_paths([[]]), "no parent"),
        (lambda: TreeShape.of_paths([[0], [0]]), "twice"),
        (lambda: TreeShape((0,), (0,)), "parent 0"),
        (lambda: TreeShape((-1,), (-1,)), "rank -1"),
        (lambda: TreeShape((-1,), ()), "1 parents but 0 ranks"),
    ],
)
def test_an_invalid_tree_is_refused(make, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        make()
