"""`SamplingParams`: every field is honoured or refused, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("topp", "top_p"), ("max_token", "max_tokens")]
)
def test_an_unknown_parameter_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ParameterError, match=f"did you mean '{near}'"):
        SamplingParams(**{name: 1})


REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, math.nan, math.inf, "1", True, 1e308],
    "top_k": [-1, 1.0, True],
    "top_p": [0.0, 1.01, -1, math.nan],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0.0, -1, math.inf],
    "frequency_penalty": [2.1, -2.1, math.nan],
    "presence_penalty": [2.1, -2.1],
    "logit_bias": [{-1: 0.0}, {0: 101.0}, {0: math.nan}, {"0": 1.0}],
    "bad_words": [((),), ((-1,),), ("",)],
    "min_tokens": [-1, 1.5],
    "max_tokens": [0, -1, 2.0],
    "stop": ["", ("a", ""), (1,)],
    "stop_token_ids": [(-1,), ("a",)],
    "seed": [1.5, "a"],
    "logprobs": [-1],
    "draft_tokens": [-1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_outside_the_range_are_refused_by_name(name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises(ParameterError, match=name):
            SamplingParams(**{name: value})


def test_the_ends_of_every_range_are_allowed() -> None:
    SamplingParams(
        temperature=0, top_k=0, top_p=1, min_p=1, frequency_penalty=2, presence_penalty=-2, logit_bias={0: -100, 1: 100}
    )
    SamplingParams(top_p=1e-9, repetition_penalty=100, max_tokens=1, seed=-(2**63), logprobs=0, draft_tokens=0)
    SamplingParams(seed=2**64)


def test_a_single_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)


@pytest.mark.parametrize("field", [
    {"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"bad_words": ((1,),)},
    {"min_tokens": 1},
], ids=str)  # fmt: skip
def test_what_needs_the_history_says_so(field: dict) -> None:
    assert SamplingParams(**field).needs_history
    assert not SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1, logit_bias={1: 1.0}).needs_history
