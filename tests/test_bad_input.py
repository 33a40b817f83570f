"""Bad input of the Python interface: refused by name, before anything runs."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams, Structured
from slipstream.drafters.ngram import NgramDrafter
from slipstream.errors import ParameterError, PromptError, SlipstreamError
from slipstream.zoo import EMBEDDED, checkpoint_of
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import Tiny


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(tiny.target, executor="torch")


@pytest.mark.parametrize("token", [-1, 320, 10**6])
def test_a_token_id_outside_the_vocabulary(llm: LLM, token: int) -> None:
    with pytest.raises(PromptError, match=rf"the prompt contains id {token}, but the vocabulary is 0\.\.319"):
        llm.generate([5, token])
    with pytest.raises(PromptError, match=rf"the prediction contains id {token}"):
        llm.checks.prediction([5, token])
    if token > 0:
        with pytest.raises(ParameterError, match=rf"a parameter contains id {token}"):
            llm.generate([5], SamplingParams(logit_bias={token: 1.0}))


@pytest.mark.parametrize(("prompt", "said"), [([], "empty"), ("", "empty"), ([5] * 300, "context holds 192")])
def test_a_prompt_that_is_empty_or_too_long(llm: LLM, prompt: object, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        llm.generate([prompt])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"rol": "user", "content": "x"}], "message 0 of the conversation has no role: {'rol': 'user'"),
        ([{"role": "user", "content": "x"}, {"role": ["user"]}], "message 1 of the conversation has no role"),
        (["x"], "message 0 of the conversation is 'x'"), ([], "the conversation is [], but must be a list"),
        ({"role": "user", "content": "x"}, "must be a list of messages"),
        (5, "the conversation is 5, but must be a list"),
        ([{"role": "user"}], "chat template refuses this conversation. 'dict object' has no attribute 'content'"),
        ([{"role": "user", "content": 5}], "chat template refuses this conversation. Can only concatenate str"),
        ("a\ud800", "the conversation is not UTF-8 text: it has half of a surrogate pair, '\\ud800', at character"),
    ],
)  # fmt: skip
def test_a_conversation_that_is_none(llm: LLM, messages: object, said: str) -> None:
    with pytest.raises(PromptError, match=re.escape(said)):
        llm.chat(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "named", "fix"),
    [
        ("generate", {"max_tokens": 4}, "write params=SamplingParams(max_tokens=4)"),
        ("generate", {"max_new_tokens": 4}, "write params=SamplingParams(max_tokens=4)"),
        ("chat", {"temperature": 0.5}, "write params=SamplingParams(temperature=0.5)"),
        ("generate", {"stream": True}, "write: for chunk in llm.stream(prompt, params)"),
        ("generate", {"sampling_params": None}, "write 'params' instead"),
        ("stream", {"top_p": 0.5}, "write params=SamplingParams(top_p=0.5)"),
    ],
)
def test_arguments_of_other_programs_are_refused_with_what_to_write(llm, method, named, fix) -> None:
    with pytest.raises(ParameterError, match=re.escape(fix)):
        getattr(llm, method)("hi", **named)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("n", "Fix: give the same prompt several times"),
        ("prompt_logprobs", "Fix: send echo and logprobs to /v1/completions"),
        ("stop_strings", "did you mean 'stop'?"),
    ],
)
def test_sampling_parameters_of_other_programs_are_refused_with_what_to_write(name: str, fix: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(fix)) as fault:
        SamplingParams(**{name: 1})
    assert f"has no parameter {name!r}. Ignoring it" in str(fault.value)


@pytest.mark.parametrize(
    "template",
    ["{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 2.0 ** 9999 }}", "{{ messages[0].x.y.z }}", "{% for"],
)
def test_a_chat_template_that_fails_in_any_way(template: str, tiny: Tiny) -> None:
    broken = LLM(tiny.target, executor="torch")
    broken.tokenizer.chat_template = template
    with pytest.raises(PromptError, match="chat template refuses this conversation"):
        broken.chat("x")


def test_text_with_half_of_a_surrogate_pair(llm: LLM) -> None:
    half = "for \udce9"
    said = "is not UTF-8 text: it has byte 0xe9 at character 4"
    with pytest.raises(PromptError, match="the prompt " + said):
        llm.generate(half)
    with pytest.raises(PromptError, match="the prediction " + said):
        llm.checks.prediction(half)
    for name in ("stop", "bad_words"):
        with pytest.raises(ParameterError, match=f"{name} {said}"):
            SamplingParams(**{name: [half]})  # type: ignore[arg-type]
    for form in ({"regex": half}, {"choice": ["a", half]}, {"json_schema": {"const": half}}, {"grammar": half}):
        with pytest.raises(ParameterError, match=f"structured.{next(iter(form))} is not UTF-8 text"):
            Structured(**form)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model", "target"), ("speculative_model", "draft"), ("num_speculative_tokens", "draft_tokens"),
        ("exector", "executor"),
    ],
)  # fmt: skip
def test_a_parameter_of_another_program_is_answered_with_ours(name: str, meant: str) -> None:
    for given in ((), ("embedded",)):
        with pytest.raises(ParameterError, match=f"LLM has no parameter '{name}'. Fix: did you mean '{meant}'"):
            LLM(*given, **{name: "x"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (LLM, "no target was given"),
        *((lambda n=n: LLM(ToyTarget(8), max_batch=n), "max_batch is") for n in (0, 2.5, True, "8")),
    ],
)  # fmt: skip
def test_a_parameter_that_means_nothing_is_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        call()


@pytest.mark.parametrize(
    "given",
    [
        {"quantize": "int8"}, {"executor": "torch"}, {"dtype": "float64"}, {"device": "mars"}, {"device": "cpu"},
        {"threads": 5}, {"kv_dtype": "float16"},
    ],
)  # fmt: skip
def test_settings_of_loading_are_refused_with_a_loaded_target(given: dict[str, object]) -> None:
    (name, value), target = next(iter(given.items())), ToyTarget(8)
    with pytest.raises(ParameterError, match=f"{name}={value!r} was given with a loaded target") as caught:
        LLM(target, **given)  # type: ignore[arg-type]
    assert caught.value.why
    assert "Decoder.load" in caught.value.fix
    assert LLM(target, executor="auto", progress=print).target is target


def test_a_loaded_draft_model_keeps_its_own_settings(tiny: Tiny) -> None:
    """Those that are given are for the target, which is loaded with them."""
    draft = ToyTarget(320)
    assert LLM(tiny.target, draft, executor="torch", dtype="float64", threads=1, device="cpu").drafter.name == "model"


@pytest.mark.parametrize("draft", [None, "none", NgramDrafter()])
def test_drafter_options_are_refused_if_no_drafter_reads_them(draft: object) -> None:
    with pytest.raises(ParameterError, match="'max_ngram' were given with"):
        LLM(ToyTarget(8), draft, draft_options={"max_ngram": 3})
    with pytest.raises(ParameterError, match="No drafter would use them"):
        LLM(ToyTarget(8)).use(draft, max_ngram=3)
    with pytest.raises(ParameterError, match="must map names to values"):
        LLM(ToyTarget(8), "ngram", draft_options=["max_ngram"])  # type: ignore[arg-type]


@pytest.mark.parametrize("draft", ["ngram", NgramDrafter(), ToyTarget(8, seed=1), ["ngram", "suffix"]])
def test_the_quantisation_of_a_draft_model_is_refused_if_none_is_loaded(draft: object) -> None:
    with pytest.raises(ParameterError, match=r"draft_quantize is 'int8', but the drafter .* loads no draft model"):
        LLM(ToyTarget(8), draft, draft_quantize="int8")


WRONG_PROMPTS = [[1.5, 2], [[1.5, 2]], [2, 1.5], [[True, 2]], [["5"]], [[None]], 5, None, [5.0], [b"text"], [{"a": 1}]]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS)
def test_a_prompt_of_anything_but_text_and_integers_is_refused(prompt: object) -> None:
    with pytest.raises(PromptError, match=r"not a token id|a prompt is") as caught:
        LLM(ToyTarget(8)).generate(prompt)  # type: ignore[arg-type]
    assert caught.value.fix


def test_integers_of_every_kind_are_token_ids() -> None:
    llm, params = LLM(ToyTarget(8)), SamplingParams(max_tokens=3)
    wanted = llm.generate([[1, 2]], params)[0].token_ids
    for prompts in (
        [1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.array([1, 2])], [torch.tensor([1, 2])],
        np.array([[1, 2]]), [[np.int32(1), np.uint8(2)]], [np.int64(1), np.int64(2)], ((1, 2),), range(1, 3),
    ):  # fmt: skip
        assert [done.token_ids for done in llm.generate(prompts, params)] == [wanted]  # type: ignore[arg-type]
    assert llm.generate([]) == []


@pytest.mark.parametrize("count", [257, 300, 10**9, -1, True, 2.0, "4"])
def test_a_draft_length_that_no_step_verifies_is_refused(count: object) -> None:
    llm = LLM(ToyTarget(8), "ngram", draft_tokens=256)
    with pytest.raises(ParameterError, match="draft_tokens is"):
        LLM(ToyTarget(8), "ngram", draft_tokens=count)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="draft_tokens is"):
        llm.draft_tokens = count  # type: ignore[assignment]
    if not isinstance(count, float):
        with pytest.raises(ParameterError, match="draft_tokens is"):
            SamplingParams(draft_tokens=count)  # type: ignore[arg-type]
    done = llm.generate([[1, 2, 1, 2, 1, 2]], SamplingParams(max_tokens=300, draft_tokens=256))
    assert done[0].stats.drafter_faults == 0


@pytest.mark.parametrize(
    "given",
    [
        {"device": "nowhere"}, {"device": "vulkan"}, {"device": 5}, {"device": "meta"}, {"device": "cpu:3"},
        {"dtype": torch.int8}, {"dtype": 7},
        {"threads": 1.5}, {"threads": "2"}, {"threads": True}, {"executor": 5},
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_is_refused_by_name(tiny: Tiny, given: dict[str, object]) -> None:
    value = next(iter(given.values()))
    with pytest.raises(SlipstreamError, match=re.escape(repr(value))) as caught:
        LLM(tiny.target, **given)  # type: ignore[arg-type]
    assert caught.value.fix


@pytest.mark.parametrize("temperature", [1e-30, 1e-200, 1e-310, 5e-324])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_the_least_temperatures_are_greedy_in_every_way_of_decoding(tiny: Tiny, temperature: float, rule: str) -> None:
    """Also where several steps are one call, whose inverse temperature must not overflow."""
    for executor in ("native", "torch"):
        for draft in (None, "ngram"):
            llm = LLM(tiny.target, draft, executor=executor, threads=1, rule=rule)
            greedy = llm.generate([[5, 6, 5, 6]], SamplingParams(max_tokens=20, ignore_eos=True))[0]
            params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=1)
            assert llm.generate([[5, 6, 5, 6]], params)[0].token_ids == greedy.token_ids


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_draft_head_given_as_the_target_says_how_it_is_used(kind: str) -> None:
    head = checkpoint_of(EMBEDDED, kind)
    with pytest.raises(ParameterError, match=rf"is a draft head \({kind}\), not a model") as refused:
        LLM(head)
    assert f"--draft {head}" in refused.value.fix
