"""`SamplingParams`: every field is applied or refused by name."""

import json
from dataclasses import asdict, fields

import numpy as np
import pytest

from slipstream.core.params import SamplingParams
from slipstream.errors import ParameterError
from tests.core.changed_parameters import REFUSED


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("topp", "top_p"), ("max_token", "max_tokens")]
)
def test_an_unknown_parameter_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ParameterError, match=f"no parameter '{name}'.*did you mean '{near}'"):
        SamplingParams(**{name: 1})


def test_every_field_has_values_that_are_refused() -> None:
    assert set(REFUSED) == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize("name", REFUSED)
def test_values_outside_the_range_are_refused_by_name(name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises(ParameterError, match=name):
            SamplingParams(**{name: value})


def test_the_ends_of_every_range_are_allowed_and_a_single_string_is_not_split() -> None:
    SamplingParams(
        temperature=0, top_k=0, top_p=1, min_p=1, frequency_penalty=2, presence_penalty=-2, logit_bias={0: -100, 1: 100}
    )
    SamplingParams(top_p=1e-9, repetition_penalty=100, max_tokens=1, seed=-(2**63), logprobs=0, draft_tokens=0)
    SamplingParams(seed=2**64)
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(bad_words="foo").bad_words == ("foo",)


def test_numpy_numbers_are_stored_as_the_python_numbers_they_equal() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.75), seed=np.uint64(2**63 + 1),
        logit_bias={np.int32(2): np.float16(1.5)}, bad_words=np.array([[1, 2], [3, 4]]),
        stop_token_ids=np.array([5, 6], dtype=np.uint8),
    )  # fmt: skip
    assert params == SamplingParams(
        temperature=0.5, top_k=3, top_p=0.75, seed=2**63 + 1, logit_bias={2: 1.5}, bad_words=((1, 2), (3, 4)),
        stop_token_ids=(5, 6),
    )  # fmt: skip
    assert json.loads(json.dumps(asdict(params)))["seed"] == 2**63 + 1  # json refuses numbers of NumPy


def test_lists_are_stored_as_tuples_so_that_later_changes_do_not_reach_a_request() -> None:
    words, biases = [[1, 2]], {3: 1.0}
    params = SamplingParams(bad_words=words, logit_bias=biases)
    words[0][0], biases[3] = 7, 9.0
    assert (params.bad_words, params.logit_bias) == (((1, 2),), {3: 1.0})
    assert SamplingParams(bad_words=[], logit_bias={}, stop=[]) == SamplingParams()
