"""`/v1/completions` gives the texts of `LLM.generate`, whole and as streams."""

from dataclasses import replace

import pytest

from slipstream import LLM, SamplingParams
from tests.server.hosting import Host, hosted
from tests.tiny_checkpoints import EXACT, Tiny
from tests.tokens.tokenizer_kinds import sentencepiece

PATH = "/v1/completions"
PROMPTS = ["def add(a, b):\n", "class Stack:\n    def push(self"]


def test_greedy_texts_are_those_of_generate_also_of_token_ids(host: Host, pair: LLM) -> None:
    answer = host.post(PATH, model="embedded", prompt=PROMPTS, temperature=0, max_tokens=24).json()
    expected = pair.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert [choice["text"] for choice in answer["choices"]] == [each.text for each in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [each.finish_reason for each in expected]
    prompt, output = (sum(len(each) for each in lists) for lists in zip(
        *((each.prompt_token_ids, each.token_ids) for each in expected), strict=True))  # fmt: skip
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, output)
    assert usage["total_tokens"] == prompt + output
    ids = pair.tokenizer.encode(PROMPTS[0])
    texts = [
        host.post(PATH, prompt=prompt, temperature=0, max_tokens=8).json()["choices"][0]["text"]
        for prompt in (PROMPTS[0], ids, [ids])
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("stop", [None, "\n\n", ["return", "pass"]])
def test_a_stream_adds_up_to_the_whole_answer(host: Host, stop: object) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 40, "stop": stop, "logprobs": 1}
    whole = host.post(PATH, **body).json()["choices"][0]
    chunks = host.events(PATH, **body)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] == whole["finish_reason"]
    assert parts[-1]["stop_reason"] == whole["stop_reason"]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert [each for part in parts for each in part["logprobs"][name]] == whole["logprobs"][name]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_include_usage_adds_one_last_chunk(host: Host) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8}
    *chunks, last = host.events(PATH, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("n", [1, 2])
def test_continuous_usage_counts_in_each_chunk(host: Host, n: int) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8, "n": n, "speculation": {"enabled": False}}
    asked = {"include_usage": True, "continuous_usage_stats": True}
    usages = [event["usage"] for event in host.events(PATH, **body, stream_options=asked)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0] < 8 * n, counts[-1]) == (True, 8 * n)
    assert {usage["prompt_tokens"] for usage in usages} == {len(host.service.tokenizer.encode(PROMPTS[0]))}
    alone = {"continuous_usage_stats": True}
    assert not any("usage" in event for event in host.events(PATH, **body, stream_options=alone))


def test_each_choice_has_the_seed_plus_its_index(host: Host) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 1.0, "max_tokens": 16, "speculation": {"rule": "coupled"}}
    three = host.post(PATH, **body, n=3, seed=7).json()["choices"]
    alone = [host.post(PATH, **body, seed=7 + j).json()["choices"][0]["text"] for j in range(3)]
    assert [choice["text"] for choice in three] == alone
    assert len(set(alone)) > 1
    parts = host.parts(PATH, **body, n=3, seed=7)
    for j in range(3):
        assert "".join(part["text"] for part in parts if part["index"] == j) == alone[j]
        assert sum(part["finish_reason"] is not None for part in parts if part["index"] == j) == 1


def test_echo_puts_the_prompt_before_the_text_and_no_tokens_may_be_asked_for(host: Host) -> None:
    body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": 6}
    plain = [choice["text"] for choice in host.post(PATH, **body).json()["choices"]]
    expected = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    assert [choice["text"] for choice in host.post(PATH, **body, echo=True).json()["choices"]] == expected
    parts = host.parts(PATH, **body, echo=True)
    assert ["".join(part["text"] for part in parts if part["index"] == i) for i in (0, 1)] == expected
    answer = host.post(PATH, prompt=PROMPTS[0], max_tokens=0, echo=True).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (PROMPTS[0], "length")
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("most", [0, 3])
def test_echo_with_logprobs_has_those_of_the_prompt(host: Host, most: int) -> None:
    prompts = [host.service.tokenizer.encode(prompt) for prompt in PROMPTS]
    body = {"temperature": 0, "logprobs": 2}
    wrote = host.post(PATH, prompt=prompts, max_tokens=10, **body).json()["choices"]
    longer = [ids + host.service.tokenizer.encode(each["text"], add_special_tokens=False)
              for ids, each in zip(prompts, wrote, strict=True)]  # fmt: skip
    body |= {"prompt": longer, "max_tokens": most, "echo": True}
    answer = host.post(PATH, **body).json()["choices"]
    for ids, before, each in zip(longer, wrote, answer, strict=True):
        logprobs = each["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(ids) + most
        assert "".join(logprobs["tokens"]) == each["text"]
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        end = len(logprobs["tokens"]) - most
        same = logprobs["token_logprobs"][end - 10 : end]
        assert same == pytest.approx(before["logprobs"]["token_logprobs"], abs=1e-4)
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert each["text"][offset:].startswith(token)
    parts = host.parts(PATH, **body)
    for i in (0, 1):
        parts_of_choice = [part for part in parts if part["index"] == i]
        assert "".join(part["text"] for part in parts_of_choice) == answer[i]["text"]
        streamed = [each for part in parts_of_choice for each in (part["logprobs"] or {}).get("token_logprobs", [])]
        assert streamed[1:] == pytest.approx(answer[i]["logprobs"]["token_logprobs"][1:], abs=1e-4)
        offsets = [each for part in parts_of_choice for each in (part["logprobs"] or {}).get("text_offset", [])]
        assert offsets == answer[i]["logprobs"]["text_offset"]
        assert parts_of_choice[-1]["finish_reason"] == "length"


def test_characters_of_several_bytes_are_never_split(host: Host) -> None:
    """And each of the tokens that write one has the offset at which it begins."""
    body = {
        "prompt": "é: ", "temperature": 0, "max_tokens": 120, "structured_outputs": {"regex": "(é|漢|🙂){12}"},
        "logprobs": 0,
    }  # fmt: skip
    for echo in ("", body["prompt"]):
        parts = host.parts(PATH, **body, echo=bool(echo))
        text = "".join(part["text"] for part in parts)
        assert len(text) == len(echo) + 12
        assert set(text[len(echo) :]) <= {"é", "漢", "🙂"}
        assert all("\ufffd" not in part["text"] for part in parts)
        whole = host.post(PATH, **body, echo=bool(echo)).json()["choices"][0]
        offsets = whole["logprobs"]["text_offset"]
        assert [each for part in parts for each in part["logprobs"]["text_offset"]] == offsets
        assert sorted(set(offsets)) == list(range(len(text)))


def test_speculation_can_be_turned_off_and_statistics_be_asked_for(host: Host) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 16, "statistics": True}
    on = host.post(PATH, **body).json()["choices"][0]
    off = host.post(PATH, **body, speculation={"enabled": False}).json()["choices"][0]
    two = host.post(PATH, **body, speculation={"draft_tokens": 2}).json()["choices"][0]
    assert on["text"] == off["text"] == two["text"]
    assert on["statistics"]["proposed"] > off["statistics"]["proposed"] == 0
    assert len(two["statistics"]["position_rates"]) == 2
    assert "statistics" not in host.post(PATH, prompt=PROMPTS[0], max_tokens=1).json()["choices"][0]


def test_tokens_and_texts_are_converted(host: Host, pair: LLM) -> None:
    ids = host.post("/tokenize", prompt=PROMPTS[0], return_token_strs=True).json()
    assert ids["tokens"] == pair.tokenizer.encode(PROMPTS[0])
    assert "".join(ids["token_strs"]) == PROMPTS[0]
    assert host.post("/detokenize", tokens=ids["tokens"]).json() == {"prompt": PROMPTS[0]}
    chat = [{"role": "user", "content": "hi"}]
    assert host.post("/tokenize", messages=chat).json()["tokens"] == pair.chat_prompt("hi")
    assert host.post("/detokenize", tokens=[-1]).status_code == 400


def test_a_completion_keeps_the_space_of_its_first_word(tiny: Tiny) -> None:
    """Of a tokenizer that drops the space at the beginning of a text, as that of Llama 2; also where a stop string
    begins with it, and in the text of tokens."""
    llm = LLM(tiny.target, **EXACT, tokenizer=sentencepiece(320), draft_tokens=4)
    name = next(each for each in llm.tokenizer.convert_ids_to_tokens(range(259, 320)) if each[0] == "▁" and each[1:])
    token, word = llm.tokenizer.convert_tokens_to_ids(name), " " + name[1:]
    asked = SamplingParams(max_tokens=2, logit_bias={token: 100.0})
    assert llm.generate(["first name"], asked)[0].text == word * 2
    assert "".join(chunk.text for chunk in llm.stream("first name", asked)) == word * 2
    assert llm.generate(["first name"], replace(asked, stop=[word]))[0].text == ""
    body = {"prompt": "first name", "max_tokens": 2, "temperature": 0, "logit_bias": {str(token): 100}, "logprobs": 1}
    with hosted(llm) as host:
        whole = host.post(PATH, **body).json()["choices"][0]
        assert whole["text"] == "".join(part["text"] for part in host.parts(PATH, **body)) == word * 2
        assert whole["logprobs"]["tokens"] == [word] * 2
        echoed = host.post(PATH, **body, echo=True).json()["choices"][0]
        assert echoed["text"] == "first name" + word * 2
        assert "".join(echoed["logprobs"]["tokens"]) == "<s> first name" + word * 2
        assert host.post(PATH, **body, stop=word).json()["choices"][0]["text"] == ""
