"""How drafts are divided into passes, for every number of ids and rows."""

from __future__ import annotations

import random

import torch

from slipstream.core.draft import Draft
from slipstream.targets.gguf.tree_passes import leaf_paths, passes


def forest(shapes: list[list[int]]) -> Draft:
    splits = [0]
    for shape in shapes:
        splits.append(splits[-1] + len(shape))
    return Draft(torch.zeros(splits[-1], dtype=torch.int64), [p for s in shapes for p in s], splits)


def test_paths_lead_from_the_root_to_each_leaf() -> None:
    draft = forest([[-1, -1, 0, 0, 1], [], [-1, 0]])
    assert leaf_paths(draft, 0) == [[0, 2], [0, 3], [1, 4]]
    assert leaf_paths(draft, 1) == [[]]
    assert leaf_paths(draft, 2) == [[0, 1]]


def test_every_path_is_in_one_pass_and_no_pass_takes_more_than_there_is() -> None:
    chosen = random.Random(4)
    for _ in range(300):
        shapes = [[chosen.randrange(-1, i) for i in range(chosen.randrange(9))] for _ in range(chosen.randrange(1, 5))]
        draft, spare, rows = forest(shapes), chosen.randrange(6), 12 + chosen.randrange(12)
        pending = [chosen.randrange(1, rows - len(shape) + 1) for shape in shapes]
        made = passes(draft, pending, spare, rows)
        for b in range(len(shapes)):
            own = [part for each in made for part in each if part.b == b]
            assert [path for part in own for path in part.paths] == leaf_paths(draft, b)
            assert [part.first for part in own] == [True] + [False] * (len(own) - 1)
        for each in made:
            assert len({part.b for part in each}) == len(each)
            assert sum(len(part.paths) - 1 for part in each) <= spare
            assert sum(len(part.nodes) + part.first * pending[part.b] for part in each) <= rows


def test_with_enough_ids_there_is_one_pass() -> None:
    draft = forest([[-1, -1, 0], [-1, 0], [-1, -1, -1]])
    assert len(passes(draft, [1, 1, 1], 3, 64)) == 1
    assert len(passes(draft, [1, 1, 1], 2, 64)) == 2
