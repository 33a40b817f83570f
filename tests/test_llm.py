"""`LLM`: the Python interface. Exactness is tested elsewhere."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.backends.native.kernels.processor import has_bfloat16_dots
from slipstream.cli.loading import load
from slipstream.cli.options import ModelOptions
from slipstream.drafters.guard import Guard
from slipstream.drafters.none import NoDrafter
from slipstream.errors import ParameterError, PromptError, RuleError
from slipstream.measure.provenance import describe_engine
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import EXACT, Tiny

PROMPTS = ["def add(", "for name in", "café"]


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(str(tiny.target), str(tiny.draft), **EXACT, draft_tokens=4)


def greedy(n: int = 24, **more) -> SamplingParams:
    return SamplingParams(max_tokens=n, **more)


def test_a_completion_carries_everything(llm, plain):
    done = llm.generate("def add(", greedy())[0]
    assert done.token_ids == plain.generate("def add(", greedy())[0].token_ids
    assert done.text == llm.tokenizer.decode(done.token_ids, skip_special_tokens=True)
    assert (done.finish_reason, done.stop_cause, done.logprobs) == ("length", None, None)
    assert len(done.token_ids) == 24 == len(done.drafted) == done.stats.tokens
    assert sum(done.drafted) == done.stats.accepted > 0
    assert done.prompt_token_ids == llm.tokenizer.encode("def add(")


def test_results_are_in_the_order_of_the_prompts_for_any_batch(tiny, llm):
    alone = [llm.generate(prompt, greedy())[0].token_ids for prompt in PROMPTS]
    narrow = LLM(tiny.target, tiny.draft, max_batch=2, **EXACT, draft_tokens=4)
    for engine in (llm, narrow):
        assert [done.token_ids for done in engine.generate(PROMPTS, greedy())] == alone


def test_bad_words_given_as_one_string_forbid_that_word(plain):
    encoded = [tuple(plain.tokenizer.encode(form, add_special_tokens=False)) for form in ("name", " name")]
    for given in ("name", ("name",)):
        assert plain.sequence(PROMPTS[0], greedy(bad_words=given)).params.bad_words == tuple(encoded)


def test_each_prompt_may_have_its_own_parameters(llm):
    short, long = llm.generate(PROMPTS[:2], [greedy(3), greedy(9)])
    assert (len(short.token_ids), len(long.token_ids)) == (3, 9)
    with pytest.raises(ParameterError, match="params is a list of 1 for 2 prompts"):
        llm.generate(PROMPTS[:2], [greedy()])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_a_stream_adds_up_to_the_completion(llm, prompt, tokens):
    """The random model generates broken UTF-8, so texts may end inside a character."""
    chunks = list(llm.stream(prompt, greedy(tokens)))
    done = chunks[-1].completion
    assert done.token_ids == llm.generate(prompt, greedy(tokens))[0].token_ids
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    assert "".join(chunk.text for chunk in chunks) == "".join(piece.text for piece in pieces) == done.text
    assert [piece.token for piece in pieces] == done.token_ids
    assert [piece.drafted for piece in pieces] == done.drafted
    assert all(chunk.completion is None for chunk in chunks[:-1])


def test_a_sequence_can_be_read_while_it_is_generated_and_closing_a_stream_releases_everything(llm):
    stream = llm.stream(PROMPTS[0], greedy(60))
    next(stream)
    next(stream)
    stream.close()
    assert not llm.drafter._shadows
    assert llm.generate(PROMPTS[0], greedy())[0].token_ids == llm.generate(PROMPTS[0], greedy())[0].token_ids
    seq = llm.sequence(PROMPTS[0], greedy(40))
    steps = llm.follow(seq)
    shown = next(steps).text + next(steps).text
    steps.close()
    half = llm.completion(seq)
    assert half.text.startswith(shown)
    assert 2 <= len(half.token_ids) < 40
    assert half.token_ids == llm.generate(PROMPTS[0], greedy(40))[0].token_ids[: len(half.token_ids)]


@pytest.mark.parametrize("k", [0, 1, 4])
def test_stop_strings_cut_text_and_stream_alike(llm, plain, k):
    whole = plain.generate(PROMPTS[1], greedy(40))[0].text
    stop = whole[9:12]
    params = greedy(40, stop=[stop], draft_tokens=k)
    chunks = list(llm.stream(PROMPTS[1], params))
    done = chunks[-1].completion
    assert done.text == whole[: whole.find(stop)] == "".join(chunk.text for chunk in chunks)
    assert (done.finish_reason, done.stop_cause) == ("stop", stop)


def test_drafters_can_be_changed_between_requests(tiny, plain):
    llm = LLM(tiny.target, **EXACT, draft_tokens=4)
    expected = plain.generate(PROMPTS[0], greedy(60))[0].token_ids
    for draft, name in ((str(tiny.draft), "model"), ("ngram", "ngram"), (None, "none"), (NoDrafter(), "none")):
        llm.use(draft)
        assert llm.drafter.name == name
        assert isinstance(llm.engine().drafter, Guard), "what a faulty drafter does is in drafters/test_guard.py"
        assert llm.generate(PROMPTS[0], greedy(60))[0].token_ids == expected
    llm.use("ngram", max_ngram=2)
    with pytest.raises(ParameterError, match="did you mean 'max_ngram'"):
        llm.use("ngram", max_ngrams=2)


def test_loaded_models_are_used_directly(tiny, llm):
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (tiny.target, tiny.draft)]
    loaded = LLM(*models, tokenizer=llm.tokenizer, draft_tokens=4)
    assert loaded.generate(PROMPTS[0], greedy())[0].text == llm.generate(PROMPTS[0], greedy())[0].text
    without = LLM(*models, draft_tokens=4)
    ids = llm.tokenizer.encode(PROMPTS[0])
    done = without.generate(ids, greedy())[0]
    assert (done.text, done.token_ids) == ("", llm.generate(ids, greedy())[0].token_ids)
    with pytest.raises(PromptError, match="has no tokenizer"):
        without.generate("text")
    with pytest.raises(ParameterError, match="device"):
        LLM(models[0], device="meta", draft_tokens=4)


def test_loading_reports_progress(tiny):
    seen: list[tuple[int, int]] = []
    LLM(tiny.target, tiny.draft, progress=lambda done, total: seen.append((done, total)), **EXACT, draft_tokens=4)
    assert sum(done == total for done, total in seen) == 2
    assert all(0 < done <= total for done, total in seen)


def test_chat_follows_the_template(llm):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    done = llm.chat(messages, greedy(6))
    shown = llm.tokenizer.decode(done.prompt_token_ids)
    assert shown == "<|user|>\nBe brief.\n\nhi<|end|>\n<|assistant|>\n"
    said = llm.chat("hi", greedy(6))
    assert said.prompt_token_ids == llm.chat_prompt([{"role": "user", "content": "hi"}])
    assert said.token_ids == llm.generate([said.prompt_token_ids], greedy(6))[0].token_ids


@pytest.mark.parametrize(
    ("settings", "target", "draft"),
    [
        ({"quantize": "int8"}, "w8a16", "w8a8"), ({"quantize": "w8a8"}, "w8a8", "w8a8"),
        ({"quantize": "w8a16", "draft_quantize": "none"}, "w8a16", None), ({"draft_quantize": "int8"}, None, "w8a8"),
        ({"draft_quantize": "w8a16", "kv_dtype": "float16"}, None, "w8a16"), ({"kv_dtype": "q8_0"}, None, None),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_the_native_executor_reach_target_and_draft_and_are_recorded(tiny, settings, target, draft):
    """Through the options of the command line, as `slipstream generate` passes them."""
    llm = load(ModelOptions(target=str(tiny.target), draft=str(tiny.draft), executor="native", **settings), quiet=True)
    runtimes = [llm.target.capabilities.runtime, llm.drafter.model.capabilities.runtime]
    assert [runtime.quantize for runtime in runtimes] == [target, draft]
    kv_dtype = settings.get("kv_dtype", "float32")
    assert {runtime.kv_dtype for runtime in runtimes} == {kv_dtype}
    facts = describe_engine(llm)
    assert (facts["executor"], facts["quantize"], facts["kv_dtype"]) == ("native", target, kv_dtype)
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids) == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_dtype_on_a_cpu_chooses_the_executor(tiny, dtype):
    native = dtype == "float32" or (dtype == "bfloat16" and has_bfloat16_dots())
    llm = LLM(tiny.target, dtype=dtype, device="cpu", draft_tokens=4)
    assert (llm.target.capabilities.runtime.backend, describe_engine(llm)["dtype"]) == (
        "native" if native else "torch",
        dtype,
    )


def test_a_draft_model_in_files_has_a_format_of_its_own_as_an_option(tiny):
    llm = LLM(tiny.target, tiny.draft, executor="native", quantize="int8", draft_options={"quantize": "none"})
    assert llm.drafter.model.capabilities.runtime.quantize is None
    llm.use(tiny.draft, quantize="w8a16")
    assert llm.drafter.model.capabilities.runtime.quantize == "w8a16"
    with pytest.raises(ParameterError, match="quantize='int8' does not work with a loaded draft model"):
        llm.use(llm.drafter.model, quantize="int8")
    with pytest.raises(ParameterError, match="quantize is 'int3'"):
        llm.use(tiny.draft, quantize="int3")


@pytest.mark.parametrize(
    ("rule", "said"),
    [(5, "there is no rule"), (None, "there is no rule"), ("rejektion", "'rejection'")],
)
def test_what_is_no_rule_is_refused(llm: LLM, rule: object, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        llm.rule = rule  # type: ignore[assignment]


def test_sampling_parameters_as_a_dict_are_refused_with_the_way_to_write_them(llm: LLM) -> None:
    for given in ({"max_tokens": 2}, [{"max_tokens": 2}]):
        with pytest.raises(ParameterError, match=r"write SamplingParams\(max_tokens=\.\.\.\)"):
            llm.generate("x", given)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="params is a int"):
        llm.sequence("x", 3)  # type: ignore[arg-type]


def test_the_repr_is_one_line_that_names_the_parts(tiny: Tiny, llm: LLM) -> None:
    assert repr(llm) == (
        f"LLM(target={str(tiny.target)!r}, backend='torch', dtype='float64', drafter='model', draft_tokens=4, "
        "rule='rejection')"
    )
    quantised = LLM(tiny.target, "ngram", executor="native", quantize="int8", device="cpu", draft_tokens=4)
    assert "dtype='float32', quantize='w8a16', drafter='ngram', draft_tokens=4," in repr(quantised)
    around = LLM(AutoModelForCausalLM.from_pretrained(tiny.target), executor="torch", draft_tokens=4)
    assert repr(around).startswith("LLM(target='Decoder', backend='torch', dtype='float32', ")
    toy = LLM(ToyTarget(), draft_tokens=4)
    assert repr(toy) == "LLM(target='ToyTarget', drafter='none', draft_tokens=4, rule='rejection')"
