"""`/v1/messages` with the official client of Anthropic."""

import json
from typing import Any

import pytest

from tests.server import clients
from tests.server.hosting import Host
from tests.server.talking import ARGUMENTS, CALL, NOW, TOOLS, USER

PATH = "/v1/messages"
FUNCTIONS: list[Any] = [
    {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}
    for tool in TOOLS
]


@pytest.fixture(scope="module")
def client(talker: Host) -> Any:
    return clients.anthropic.Anthropic(base_url=talker.url, api_key="key", max_retries=0)


def forced(text: str) -> dict[str, Any]:
    """What makes the answer `text`."""
    return {"model": "embedded", "max_tokens": 200, "extra_body": {"structured_outputs": {"choice": [text]}}}


def test_a_text_is_that_of_the_chat_whole_and_streamed(talker: Host, client: Any) -> None:
    talk = [{"role": "system", "content": "Be brief."}, *USER]
    chat = talker.post("/v1/chat/completions", temperature=0, max_tokens=16, messages=talk).json()
    text = chat["choices"][0]["message"]["content"]
    given: Any = {"model": "embedded", "messages": USER, "system": "Be brief.", "max_tokens": 16}
    answer = client.messages.create(**given, extra_body={"temperature": 0})
    assert answer.content[0].text == text
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 16)
    with client.messages.stream(**given, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().stop_reason == "max_tokens"
    stop = text[4:9]
    answer = client.messages.create(**given, stop_sequences=[stop], extra_body={"temperature": 0})
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]
    count = client.messages.count_tokens(model="embedded", messages=USER, system="Be brief.")
    assert count.input_tokens == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_use_of_tools_are_blocks_and_can_be_sent_back(client, stream):
    given: Any = {"messages": USER, "tools": FUNCTIONS, **forced(f"<think>Hm.</think>I look. {CALL}{NOW}")}
    if stream:
        with client.messages.stream(**given) as streamed:
            answer: Any = streamed.get_final_message()
    else:
        answer = client.messages.create(**given)
    thinking, text, *calls = answer.content
    assert answer.stop_reason == "tool_use"
    assert (thinking.thinking, text.text) == ("Hm.", "I look.")
    assert [(call.name, call.input) for call in calls] == [("weather", json.loads(ARGUMENTS)), ("now", {})]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Sun."} for call in calls]
    said = json.loads(answer.model_dump_json(exclude_none=True, include={"role", "content"}))
    for block in said["content"]:
        block.pop("parsed_output", None)
    back: Any = [*USER, said, {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]}]
    assert client.messages.create(**given | {"messages": back} | forced("Sun!")).content[0].text == "Sun!"


def test_forced_calls_and_forms(client: Any) -> None:
    given: Any = {"model": "embedded", "messages": USER, "max_tokens": 300, "extra_body": {"frequency_penalty": 2}}
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}):
        answer: Any = client.messages.create(**given, tools=FUNCTIONS[:1], tool_choice=choice)
        assert answer.stop_reason == "tool_use"
        assert answer.content[0].input["city"] in ("Rome", "Oslo")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    assert json.loads(client.messages.create(**given, output_config=form).content[0].text)["a"] in (1, 2)


def test_errors_are_those_of_the_client(talker: Host, client: Any) -> None:
    given: Any = {"model": "embedded", "messages": USER, "max_tokens": 5}
    with pytest.raises(clients.anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**given, stop_sequences=[""])
    with pytest.raises(clients.anthropic.NotFoundError):
        client.messages.create(**given | {"model": "other"})
    with pytest.raises(clients.anthropic.AuthenticationError):
        client.with_options(api_key="no").messages.create(**given)
    by_header = talker.http.get("/v1/models", headers={"Authorization": "", "x-api-key": "key"})
    assert by_header.status_code == 200


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("max_tokens", {"max_tokens": None}), ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "king", "content": "hi"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("assistant", {"messages": [*USER, {"role": "assistant", "content": "The"}]}),
        ("tool_choice.type", {"tools": FUNCTIONS, "tool_choice": {"type": "some"}}),
        ("tools[0]", {"tools": [{"name": "a b"}]}),
        ("disable_parallel_tool_use", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}),
        ("output_config", {"output_config": {"mood": "low"}}), ("system", {"system": [{"type": "image"}]}),
        ("n", {"n": 2}), ("thinking", {"thinking": {"type": "long"}}),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(talker: Host, part: str, fields: dict[str, Any]) -> None:
    answered = talker.post(PATH, **{"messages": USER, "max_tokens": 5} | fields)
    assert answered.status_code == 400, answered.text
    error = answered.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert part in error["error"]["message"]
