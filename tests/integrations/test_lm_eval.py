"""The model class of lm-evaluation-harness. Runs where the harness is installed: pip install 'slipstream[lm-eval]'."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.errors import ParameterError, PromptError
from tests.checkpoints import CONTEXT, Tiny
from tests.targets.huggingface.encoder_decoders import random_encoder_decoder

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from slipstream.integrations.lm_eval import SlipstreamLM, _sampling_params  # noqa: E402

EXACT: dict[str, Any] = {"executor": "torch", "dtype": "float64", "device": "cpu"}


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> SlipstreamLM:
    return SlipstreamLM(str(tiny.target), batch_size=3, max_gen_toks=16, **EXACT)


@pytest.fixture(scope="module")
def fast(tiny: Tiny) -> SlipstreamLM:
    return SlipstreamLM(LLM(tiny.target, tiny.draft, draft_tokens=4, max_batch=3, **EXACT), max_gen_toks=16)


def asked(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Tasks over a local file: one that generates, one of multiple choice, one of perplexity."""
    rows = [{"q": f"for name{i} in", "a": text, "answer": i % 2} for i, text in enumerate(("names", "x", "print", "("))]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
metadata: {{version: 1}}
"""
    (tmp_path / "generated.yaml").write_text(
        f"""task: generated
output_type: generate_until
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["\\n", ";"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
{common}"""
    )
    (tmp_path / "chosen.yaml").write_text(
        f"""task: chosen
output_type: multiple_choice
doc_to_choice: [" names:", " other words"]
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
{common}"""
    )
    (tmp_path / "rolled.yaml").write_text(
        f"""task: rolled
output_type: loglikelihood_rolling
doc_to_target: "{{{{q}}}} {{{{a}}}}"
metric_list: [{{metric: word_perplexity}}]
{common}"""
    )
    return tmp_path


def test_the_score_of_a_task_is_the_same_with_speculation_on_and_off(
    plain: SlipstreamLM, fast: SlipstreamLM, tasks: Path
) -> None:
    found = []
    for model in (plain, fast):
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        found.append(
            lm_eval.simple_evaluate(
                model=model, tasks=["generated", "chosen", "rolled"], task_manager=manager, bootstrap_iters=0
            )
        )
    results = [
        {name: {k: v for k, v in each.items() if "," in k} for name, each in one["results"].items()} for one in found
    ]
    assert results[0] == results[1]
    assert set(results[0]) == {"generated", "chosen", "rolled"}
    for name in ("generated", "chosen", "rolled"):
        texts = [[sample["resps"] for sample in one["samples"][name]] for one in found]
        assert texts[0] == texts[1]
    assert plain.stats.proposed == 0
    assert fast.stats.accepted > 0
    assert found[1]["config"]["acceptance_rate"] == fast.stats.acceptance_rate


def test_generated_texts_end_before_until_and_by_max_gen_toks(plain: SlipstreamLM, fast: SlipstreamLM) -> None:
    whole = plain.llm.generate("def add(", SamplingParams(max_tokens=16))[0].text
    stop = whole[4:6]
    requests = [
        asked("def add(", {"until": [stop, "never there"], "max_gen_toks": 16}),
        asked("def add(", {"until": [], "max_gen_toks": 5}),
        asked("for", {"until": "", "do_sample": False, "temperature": 0.7}),
        asked("", {"max_new_tokens": 3}),
    ]
    for model in (plain, fast):
        cut, short, greedy, alone = model.generate_until(requests, disable_tqdm=True)
        assert cut == whole[: whole.find(stop)]
        assert short == plain.llm.generate("def add(", SamplingParams(max_tokens=5))[0].text
        assert greedy == plain.llm.generate("for", SamplingParams(max_tokens=16))[0].text
        assert alone == plain.llm.generate([plain.prefix_token_id], SamplingParams(max_tokens=3))[0].text


def test_sampled_texts_follow_the_seed_of_torch(plain: SlipstreamLM) -> None:
    request = asked("for", {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12})
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(plain.generate_until([request], disable_tqdm=True))
    assert found[0] == found[1] != found[2]


def test_a_context_that_leaves_no_room_loses_its_beginning(plain: SlipstreamLM) -> None:
    long = "for name in names:\n" * 60
    ids = plain.tok_encode(long)
    assert len(ids) > CONTEXT
    found = plain.generate_until([asked(long, {"max_gen_toks": 7})], disable_tqdm=True)
    assert found == [plain.llm.generate(ids[-(CONTEXT - 7) :], SamplingParams(max_tokens=7))[0].text]
    with pytest.raises(ParameterError, match=f"asks for {CONTEXT} tokens"):
        plain.generate_until([asked(long, {"max_gen_toks": CONTEXT})], disable_tqdm=True)


def direct(plain: SlipstreamLM, tiny: Tiny, text: list[int], scored: int) -> tuple[float, bool]:
    """Log-probability of the last `scored` tokens by one forward of transformers."""
    from tests.targets.reference import Reference

    logits = Reference(tiny.target, torch.float64)(text)[-scored - 1 : -1]
    logs = torch.log_softmax(logits, -1)
    return float(logs[range(scored), text[-scored:]].sum()), logits.argmax(-1).tolist() == text[-scored:]


def test_likelihoods_are_those_of_a_direct_forward(plain: SlipstreamLM, fast: SlipstreamLM, tiny: Tiny) -> None:
    pairs = [("def add(", "17 * x"), ("for name in ", " q"), ("", "print")]
    for model in (plain, fast):
        found = model.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
        for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
            if context:
                before, after = model._encode_pair(context, continuation)
            else:
                before, after = [model.prefix_token_id], model.tok_encode(continuation, add_special_tokens=False)
            assert after
            wanted = direct(plain, tiny, before + after, len(after))
            assert logprob == pytest.approx(wanted[0], abs=1e-8)
            assert is_greedy == wanted[1]
        greedy = plain.llm.generate("def add(", SamplingParams(max_tokens=4))[0].token_ids
        ids = model.tok_encode("def add(")
        scored = model._loglikelihood_tokens([(None, ids, greedy), (None, ids, greedy[::-1]), (None, ids, [])])
        assert [is_greedy for _, is_greedy in scored] == [True, False, True]
        assert scored[2][0] == 0.0


def test_rolling_likelihoods_predict_each_token_once(tiny: Tiny) -> None:
    """A window of 10 tokens: the first predicts 10; each later one predicts 10 more after one of context, and the last
    one is filled up with context."""
    model = SlipstreamLM(LLM(tiny.target, **EXACT), max_length=10)
    for text in ("for name in names:\n    print(name)\n", "x", ""):
        ids = model.tok_encode(text)
        total, done = 0.0, 0
        while done < len(ids):
            new = min(10, len(ids) - done)
            window = ([model.prefix_token_id, *ids])[max(0, done + new - 10) : done + new + 1]
            total += direct(model, tiny, window, new)[0]
            done += new
        found = model.loglikelihood_rolling([asked(text)], disable_tqdm=True)
        assert found == pytest.approx([total], abs=1e-8)


def test_a_context_is_cut_where_the_continuation_must_fit(plain: SlipstreamLM, tiny: Tiny) -> None:
    context, continuation = [65, 66, 67] * CONTEXT, [68, 69]
    ((logprob, _),) = plain._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
    assert logprob == pytest.approx(direct(plain, tiny, (context + continuation)[-CONTEXT - 1 :], 2)[0], abs=1e-8)
    with pytest.raises(PromptError, match=f"a continuation has {CONTEXT + 1} tokens"):
        plain._loglikelihood_tokens([(None, [1], [65] * (CONTEXT + 1))], disable_tqdm=True)


def test_chats_use_the_template(plain: SlipstreamLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    text = plain.apply_chat_template(chat)
    assert plain.tok_encode(text) == plain.llm.chat_prompt(chat)
    begun = plain.apply_chat_template([*chat, {"role": "assistant", "content": "wo"}], add_generation_prompt=False)
    assert begun.endswith("wo")
    assert plain.chat_template(True) == plain.tokenizer.chat_template
    assert "/" not in plain.tokenizer_name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"think": True}, "think=True"),
        ({"top_p": 3.0}, "top_p is 3.0"),
    ],
)
def test_what_a_task_sets_is_honoured_or_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        _sampling_params({"do_sample": True, **given}, 16)


def test_settings_of_tasks_reach_the_sampling_parameters() -> None:
    params = _sampling_params(
        {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "num_beams": 1, "until": ["a", ""]}, 16
    )
    assert (params.temperature, params.top_p, params.repetition_penalty) == (1.0, 0.9, 1.2)
    assert (params.max_tokens, params.stop) == (16, ("a",))
    assert _sampling_params({"temperature": 0.6}, 16).temperature == 0.6
    assert _sampling_params({"max_tokens": 3, "max_gen_toks": 4}, 16).max_tokens == 4


def test_the_harness_finds_it_by_name(tiny: Tiny) -> None:
    of = get_model("slipstream")
    model = of.create_from_arg_string(
        f"target={tiny.target},draft={tiny.draft},draft_tokens=2,executor=torch,dtype=float64",
        {"batch_size": "auto", "max_batch_size": 4, "device": None},
    )
    assert (model.llm.max_batch, model.llm.draft_tokens) == (4, 2)
    with pytest.raises(ParameterError, match="draft_length"):
        of.create_from_arg_string(f"target={tiny.target},draft_length=2")


def test_the_device_that_the_command_names_by_default_is_not_asked_for_where_it_is_missing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert SlipstreamLM(str(tiny.target), device="cuda:0").llm.target.device.type == "cpu"


def test_wrong_settings_are_refused(tiny: Tiny) -> None:
    llm = LLM(tiny.target, **EXACT)
    for given, said in (
        ({"draft": "ngram"}, "given with an LLM"),
        ({"max_length": CONTEXT + 1}, f"max_length is {CONTEXT + 1}"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
    ):
        with pytest.raises(ParameterError, match=said):
            SlipstreamLM(llm, **given)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="batch_size is 'many'"):
        SlipstreamLM(str(tiny.target), batch_size="many")


def test_an_encoder_decoder_is_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="the harness was given an encoder-decoder"):
        SlipstreamLM(LLM(random_encoder_decoder("t5")))
