"""Bad input of the Python interface: refused by name, before anything runs."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import ParameterError, PromptError
from tests.checkpoints import Tiny


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(tiny.target, executor="torch")


@pytest.mark.parametrize("token", [-1, 320, 10**6])
def test_a_token_id_outside_the_vocabulary(llm: LLM, token: int) -> None:
    with pytest.raises(PromptError, match=rf"the prompt holds id {token}, the vocabulary is 0\.\.319"):
        llm.generate([5, token])
    if token > 0:
        with pytest.raises(ParameterError, match=rf"a parameter names id {token}"):
            llm.generate([5], SamplingParams(logit_bias={token: 1.0}))


@pytest.mark.parametrize("prompt", [[], ""], ids=repr)
def test_an_empty_prompt(llm: LLM, prompt: object) -> None:
    with pytest.raises(PromptError, match="empty"):
        llm.generate([prompt])  # type: ignore[list-item]


def test_an_unknown_parameter() -> None:
    with pytest.raises(ParameterError, match=r"no parameter 'temprature'.*did you mean 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_the_removed_openvino_executor_is_refused_with_a_fix(tiny: Tiny) -> None:
    gone = "does not exist any more. The OpenVINO executor was removed because the native executor is faster. Fix: omit"
    with pytest.raises(ParameterError, match="(?i)" + gone):
        LLM(tiny.target, executor="openvino")
