"""The official client of OpenAI works with the server."""

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.server import clients
from tests.server.hosting import Host, hosted

USER: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture(scope="module")
def client(host: Host) -> Any:
    return clients.openai.OpenAI(base_url=f"{host.url}/v1", api_key="any", max_retries=0)


def test_chat_whole_and_streamed(client: Any, pair: LLM) -> None:
    expected = pair.chat(USER, SamplingParams(max_tokens=24))
    body = {"model": "embedded", "messages": USER, "temperature": 0, "max_completion_tokens": 24}
    answer = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.token_ids)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == len(expected.token_ids)
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_models_are_listed_and_errors_are_those_of_the_client(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["embedded"]
    assert client.models.retrieve("embedded").id == "embedded"
    with pytest.raises(clients.openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(clients.openai.BadRequestError) as bad:
        client.chat.completions.create(model="embedded", messages=USER, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(clients.openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=USER)
    assert missing.value.code == "model_not_found"


def test_only_those_with_a_key_are_answered(pair: LLM) -> None:
    with hosted(pair, keys=("first", "second")) as host:
        for key in ("first", "second"):
            client = clients.openai.OpenAI(base_url=f"{host.url}/v1", api_key=key, max_retries=0)
            assert client.models.list().data
        with pytest.raises(clients.openai.AuthenticationError):
            clients.openai.OpenAI(base_url=f"{host.url}/v1", api_key="third", max_retries=0).models.list()
        paths = set(host.http.get("/openapi.json").json()["paths"]) - {"/health", "/ready"}
        for path in ("/metrics", "/docs", "/openapi.json", "/tokenize", "/nowhere", *paths):
            answered = host.http.get(path, headers={"Authorization": ""})
            assert answered.status_code == 401, path
            form = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
            assert set(answered.json()["error"]) == form
        for path in ("/health", "/ready"):  # probes have no key
            assert host.http.get(path, headers={"Authorization": ""}).status_code == 200
