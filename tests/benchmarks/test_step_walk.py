"""How much code a newcomer has to read to follow one step: bounds that grow only for a reason."""

from dataclasses import fields

import pytest

from benchmarks.step_walk import step_walk, walk
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence

pytest.importorskip("numba")


def test_a_step_with_a_draft_model_runs_through_few_files_and_functions() -> None:
    seen = step_walk()
    assert len(seen.files) <= 20, seen.files
    assert len(seen.functions) <= 110, seen.functions


def test_a_walk_counts_each_function_once_and_hops_between_files() -> None:
    seen = walk(lambda: [Draft.empty(1).batch for _ in range(3)])
    assert (seen.files, seen.hops, len(seen.functions), [*seen.calls.values()]) == (["core/draft.py"], 0, 1, [3])
    assert walk(lambda: Sequence([1]).room).hops > 0


def test_a_sequence_has_few_attributes() -> None:
    properties = [name for name, value in vars(Sequence).items() if isinstance(value, property)]
    assert len(fields(Sequence)) + len(properties) <= 26
