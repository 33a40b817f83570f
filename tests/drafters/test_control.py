from __future__ import annotations

import pytest

from slipstream.drafters.control import KINDS, Control
from slipstream.errors import ParameterError
from slipstream.theory.closed_forms import best_gamma


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_draft_token_is_always_drafted(kind: str) -> None:
    assert Control(kind, threshold=0.99, draft_cost=100.0).more([])


def test_fixed_never_stops() -> None:
    assert Control().more([0.5, 1e-9])


def test_confidence_continues_while_the_chains_probability_reaches_the_threshold() -> None:
    control = Control("confidence", threshold=0.3)
    assert control.more([0.9, 0.3])
    assert not control.more([0.9, 0.29])
    assert Control("confidence", threshold=0.0).more([0.0])


def test_gain_stops_where_the_next_draft_token_yields_less_than_the_step_so_far() -> None:
    """By hand; each draft token costs 0.2 + 0.05 = 1/4 of a decode step.

    One draft token with probability 0.5: the step yields 1.5 tokens in 1.25 steps, 1.2 per step. The next one would be
    accepted with 0.5 * 0.5 = 0.25 and yield 0.25 / 0.25 = 1.0 < 1.2. With 0.6: 1.6 / 1.25 = 1.28 < 0.36 / 0.25 = 1.44.
    Two draft tokens with probabilities 0.8 and 0.4 (mean ratio sqrt(0.4) = 0.632):
    2.2 / 1.5 = 1.467 > 0.253 / 0.25 = 1.012. With 0.9 and 0.81: 2.71 / 1.5 = 1.807 < 0.729 / 0.25 = 2.916.
    """
    control = Control("gain", draft_cost=0.2, row_cost=0.05)
    assert not control.more([0.5])
    assert control.more([0.6])
    assert not control.more([0.8, 0.4])
    assert control.more([0.9, 0.81])


@pytest.mark.parametrize(("alpha", "c"), [(0.5, 0.02), (0.6, 0.05), (0.7, 0.1), (0.8, 0.05), (0.8, 0.1), (0.9, 0.1)])
def test_gain_with_constant_acceptance_ends_at_the_best_draft_length(alpha: float, c: float) -> None:
    """If every draft token is accepted with probability alpha, the speed-up rises as long as one more draft token
    yields more per time than the step so far: the rule stops at the optimum of Leviathan et al. (2211.17192, theorem
    3.8)."""
    control = Control("gain", draft_cost=c, row_cost=0.0)
    path_probs: list[float] = []
    while control.more(path_probs):
        path_probs.append(alpha ** (len(path_probs) + 1))
    assert len(path_probs) == best_gamma(alpha, c)


def test_free_draft_tokens_are_all_drafted() -> None:
    assert Control("gain", draft_cost=0.0, row_cost=0.0).more([0.01, 0.001])


def test_a_chain_that_cannot_be_accepted_is_not_extended() -> None:
    assert not Control("gain").more([0.5, 0.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "gains"}, "did you mean 'gain'"),
        ({"threshold": 1.0}, "threshold"),
        ({"threshold": -0.1}, "threshold"),
        ({"draft_cost": -1.0}, "draft_cost"),
        ({"row_cost": float("nan")}, "row_cost"),
        ({"rowcost": 0.1}, "did you mean 'row_cost'"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Control(**options)
