"""Axes of a measurement, and predictions next to measurements."""

import pytest

from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.measure.arms import Arm, Cell, line_up
from slipstream.measure.benchmark import BenchConfig, bench, choose_x_axis, find_axes, predict_arm
from slipstream.measure.configs import Contender
from slipstream.theory.cost_curve import CostCurve
from tests.targets.toy import ToyTarget


def test_axes_are_what_has_several_values_and_the_numeric_one_with_most_is_the_x_axis():
    lengths = [Contender("x", "x", k) for k in (3, 4)]
    assert find_axes(lengths, {"temperature": (0.0,), "batch": (1, 2)}) == {"draft_tokens": [3, 4], "batch": [1, 2]}
    apart = [Contender("x", "x", 3), Contender("y", "y", 4)]  # each with its own length only
    assert find_axes(apart, {}) == {"drafter": ["x", "y"]}
    assert choose_x_axis({"drafter": ("a", "b", "c"), "batch": (2, 4), "draft_tokens": (2, 3)}) == "batch"
    assert choose_x_axis({"drafter": ("a", "b"), "context": (None, 256)}) is None


def test_too_many_arms_are_refused(tiny_llm, contenders, prompt_set):
    with pytest.raises(ParameterError, match="the options give 120 combinations"):
        bench(tiny_llm, contenders[:1], prompt_set, BenchConfig(batches=tuple(range(1, 61))))


def test_every_setting_has_a_point_and_chains_have_a_prediction(grid_result):
    points = grid_result.data.arms
    assert [point.draft_tokens for point in points] == [0, 1, 2, 3]
    assert grid_result.settings["x"] == "draft_tokens"
    assert grid_result.settings["axes"] == {"draft_tokens": [1, 2, 3]}
    for point in points[1:]:
        assert point.texts == "identical"
        assert point.predicted.speedup > 0
        assert 1 <= point.predicted.mean_acceptance_length <= point.draft_tokens + 1
    assert points[0].predicted is None


@pytest.mark.parametrize("tree", [False, True])
def test_a_prediction_from_known_cells_is_one_of_chains_only(tree):
    """All draft tokens are accepted, a step costs 10 ms for any number of rows, a draft 2 ms: 4 tokens in 12 ms against
    10 ms each."""
    llm = LLM(ToyTarget(vocab=8), draft_tokens=4)
    params = SamplingParams(max_tokens=41)
    plain = Arm("plain", llm, params=params)
    runs = line_up([plain, Arm("x", llm, None, 3, params=params, against=plain)], [[1, 2]])
    slow, fast = SpecStats(), SpecStats()
    for _ in range(41):
        slow.count([], 0, 1)
    slow.seconds |= {"target": 0.41}
    fast.count([], 0, 1)
    for _ in range(10):
        fast.count([1, 1, 2, 3] if tree else [1, 2, 3], 3, 4)
    fast.seconds |= {"target": 0.11, "draft": 0.022}
    runs[0].cells = [[Cell(0.41, 41, 0.01, slow)]]
    runs[1].cells = [[Cell(0.132, 41, 0.01, fast)]]
    prediction = predict_arm(runs[1], runs, CostCurve((1, 4), (1.0, 1.0)))
    if tree:
        assert prediction is None
        return
    assert prediction.mean_acceptance_length == pytest.approx(4)
    assert prediction.tokens_per_second == pytest.approx(41 / 0.13, rel=0.02)
    assert prediction.speedup == pytest.approx(0.41 / 0.13, rel=0.02)
