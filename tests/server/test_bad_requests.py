"""Requests that cannot be run are refused before anything runs, with OpenAI's error body."""

import json
from typing import Any

import pytest

from slipstream import LLM
from slipstream.server.fields import CHAT, COMPLETIONS, ENDPOINTS, RESPONSES, check_fields, fields_of
from slipstream.server.service import Limits
from tests.server.hosting import Host, hosted, refused, request_by_hand

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def nothing_ran(host: Host) -> Any:
    before = host.llm.stats.steps
    yield
    assert host.llm.stats.steps == before
    assert host.service.admitted == 0


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'"text"', b"[]", b"null", b"1", b'{"prompt": "a", "seed": NaN}', b'{"prompt": Infinity}',
        b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "a\\u0000b"}', b'{"prompt": "a\0b"}',
        b"[" * 100_000, b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "stop": ["\\udfff"]}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [PATH, CHAT_PATH, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_in_utf8_is_refused(host: Host, path: str, body: bytes) -> None:
    refused(host.http.post(path, content=body, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_another_content_type_is_refused(host: Host, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    assert "application/json" in refused(host.http.post(PATH, content=b'{"prompt": "a"}', headers=headers), 400)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": value})
        for value in ("", [], [[]], [""], None, 5, {}, [1, "a"], [-1], [4096], [1.5], [True], ["a", []], "a " * 3000)
    ]
    + [("max_tokens", {"max_tokens": value}) for value in (-1, 1.5, 10**9, "5", True, 10**30)]
    + [("n", {"n": value}) for value in (0, -1, 10**6, 1.5, "2")]
    + [("best_of", {"best_of": 2})]
    + [
        (name, {name: value})
        for name in ("temperature", "frequency_penalty", "presence_penalty", "top_p", "min_p", "repetition_penalty")
        for value in (1e308, -1e308, "1", [], 10**400 if name == "top_p" else -5)
    ]
    + [("logit_bias", {"logit_bias": value}) for value in ({"a": 1}, {"1": 1e308}, {"-1": 0}, [], 5)]
    + [(None, {"logit_bias": {"5000": 1}}), (None, {"stop_token_ids": [4096]})]
    + [("stop", {"stop": value}) for value in ("", [""], ["a"] * 10_000, 5, [5], {}, {"a": 1})]
    + [("stop_token_ids", {"stop_token_ids": {}}), ("bad_words", {"bad_words": {"a": 1}})]
    + [("stop", {"stop": value}) for value in ("a" * 100_000, ["a", "b" * 1025])]
    + [("bad_words", {"bad_words": value}) for value in ([[5]] * 5000, [[5] * 65], "a" * 65)]
    + [("stop_token_ids", {"stop_token_ids": [5] * 5000})]
    + [("prediction", {"prediction": {"type": "content", "content": "a" * 600_000}})]
    + [("max_tokens", {"max_tokens": ["a"] * 10_000})]
    + [("logprobs", {"logprobs": value}) for value in (-1, 21, 1.5, True)]
    + [("seed", {"seed": value}) for value in (1.5, "1", [])]
    + [("stream", {"stream": "yes"}), ("echo", {"echo": 1})]
    + [("speculation.drafter", {"speculation": {"drafter": "model"}})]
    + [("draft_tokens", {"speculation": {"draft_tokens": -1}})]
    + [("enabled", {"speculation": {"enabled": 1}}), ("speculation", {"speculation": 5})]
    + [("response_format", {"response_format": {"type": value}}) for value in ("xml", None)]
    + [
        ("structured_outputs", {"structured_outputs": value})
        for value in ({"regex": ""}, {"json": "{"}, {"json": {}, "regex": "a"})
    ]
    + [("structured_outputs", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}})]
    + [
        ("prediction", {"prediction": value})
        for value in ("text", {"content": "a"}, {"type": "content"}, {"type": "content", "content": 5})
    ]
    + [("max_completion_tokens", {"max_tokens": 4, "max_completion_tokens": 5})]
    + [("tempurature", {"tempurature": 1})],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(host, param, fields):
    sent = json.dumps({"prompt": "def f(", "max_tokens": 4} | fields)
    answered = host.http.post(PATH, content=sent, headers={"Content-Type": "application/json"})
    message = refused(answered, 400)
    assert len(message) < 3000
    if param is not None:
        assert answered.json()["error"]["param"] == param, message


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "hi", {}, [5], [{}], [{"role": "user", "content": 5}], [{"role": "king", "content": "hi"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "tool", "content": "hi"}], [{"role": "user", "content": "a " * 3000}],
    ],
)  # fmt: skip
def test_messages_that_cannot_be_honoured_are_refused(host: Host, messages: Any) -> None:
    answered = host.post(CHAT_PATH, messages=messages)
    refused(answered, 400)
    assert answered.json()["error"]["param"].startswith("messages")


def test_a_prompt_longer_than_the_context_is_refused_with_both_counts(host: Host) -> None:
    count = len(host.service.tokenizer.encode("a " * 3000))
    message = refused(host.post(PATH, prompt="a " * 3000), 400, "prompt")
    assert str(count) in message
    assert "1024" in message


@pytest.mark.parametrize(
    ("where", "name"), [(where, each.name) for where in ENDPOINTS for each in fields_of(where).values() if each.refused]
)
def test_a_field_that_is_not_supported_is_refused_by_name(host: Host, where: str, name: str) -> None:
    base = {"prompt": "a"} if where == COMPLETIONS else {"input": "a"} if where == RESPONSES else {"messages": USER}
    answered = host.post(CHAT_PATH if where == CHAT else f"/v1/{where}", **base | {name: {"some": "value"}})
    assert answered.status_code == 400
    assert name in answered.json()["error"]["message"]


def test_a_huge_body_is_refused_before_it_is_read(pair: LLM) -> None:
    with hosted(pair, Limits(body=1000)) as host:
        assert "1000" in refused(host.post(PATH, prompt="a" * 2000), 413)
        chunks = (b"a" * 100 for _ in range(100))
        answered = host.http.post(PATH, content=chunks, headers={"Content-Type": "application/json"})
        refused(answered, 413)  # without Content-Length
        assert host.post(PATH, prompt="a", max_tokens=1).status_code == 200


def test_huge_headers_are_refused(host: Host) -> None:
    with request_by_hand(host.url, b"GET /health HTTP/1.1\nHost: a\nX-Long: " + b"a" * 1_000_000 + b"\n") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    assert host.http.get("/health").status_code == 200


def test_unknown_models_and_paths_are_not_found(host: Host) -> None:
    assert "--lora" in refused(host.post(PATH, model="gpt-4", prompt="a"), 404, "model")
    refused(host.post(CHAT_PATH, model="gpt-4", messages=USER), 404, "model")
    refused(host.http.get("/v1/nothing"), 404)
    refused(host.http.get(PATH), 405)


@pytest.mark.parametrize("where", ENDPOINTS)
def test_values_that_change_nothing_count_as_not_given(host: Host, where: str) -> None:
    body = {name: unset for name, each in fields_of(where).items() for unset in (None, *each.unset)}
    assert check_fields(body, fields_of(where)) == {}
