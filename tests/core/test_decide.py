"""The short cut of greedy decoding decides the same as the full distribution."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES, verify
from slipstream.core.sequence import Sequence
from slipstream.core.step import decide, dice
from slipstream.core.warp import distributions, first_maxima
from slipstream.errors import TargetError


@pytest.mark.parametrize("rule", ["greedy", "rejection", "coupled"])
def test_greedy_decisions_equal_those_of_the_full_distribution(rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    seqs = [Sequence([1, 2], SamplingParams(seed=b)) for b in range(3)]
    for _ in range(50):
        tokens = torch.randint(3, (7,), generator=generator)
        draft = Draft(tokens, [-1, -1, 0, 1, -1, 0, 1], [0, 4, 4, 7])
        logits = torch.randint(3, (10, 3), generator=generator).float()  # ties abound
        dense = verify(draft, distributions(logits, seqs, draft), RULES[rule], dice(seqs, draft))
        assert decide(seqs, draft, logits, RULES[rule]) == dense


def test_the_first_of_equal_maxima_is_taken() -> None:
    assert first_maxima(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])) == [1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(TargetError, match="NaN"):
        first_maxima(torch.tensor([[0.0, bad, 2.0]]))
