"""`/v1/responses` with the official client of OpenAI."""

import json
from typing import Any

import pytest

from tests.server.hosting import Host, refused
from tests.server.talking import ARGUMENTS, CALL, NOW, TOOLS, USER

PATH = "/v1/responses"
FUNCTIONS: list[Any] = [{"type": "function"} | tool["function"] for tool in TOOLS]


def forced(text: str) -> dict[str, Any]:
    """What makes the answer `text`."""
    return {"model": "embedded", "extra_body": {"structured_outputs": {"choice": [text]}}, "max_output_tokens": 200}


def test_a_text_is_that_of_the_chat_whole_and_streamed(talker: Host, openai: Any) -> None:
    chat = talker.post("/v1/chat/completions", temperature=0, max_tokens=16,
                       messages=[{"role": "system", "content": "Be brief."}, *USER]).json()  # fmt: skip
    text = chat["choices"][0]["message"]["content"]
    given: Any = {"model": "embedded", "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 16}
    answer = openai.responses.create(**given, input=USER[0]["content"])
    assert answer.output_text == text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.total_tokens == chat["usage"]["total_tokens"]
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"] == 16
    with openai.responses.stream(**given, input=USER) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls_are_items_and_can_be_sent_back(openai: Any, stream: bool) -> None:
    given: Any = {"input": USER, "tools": FUNCTIONS, **forced(f"<think>Hm.</think>I look. {CALL}{NOW}")}
    if stream:
        with openai.responses.stream(**given) as streamed:
            for _ in streamed:
                pass
            answer: Any = streamed.get_final_response()
    else:
        answer = openai.responses.create(**given)
    reasoning, message, *calls = answer.output
    assert answer.status == "completed"
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, message.content[0].text) == ("message", "I look.")
    assert [(call.name, call.arguments) for call in calls] == [("weather", ARGUMENTS), ("now", "{}")]
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    back: list[Any] = [*USER, *(json.loads(item.model_dump_json(exclude_none=True)) for item in answer.output)]
    for item in back:
        item.pop("parsed_arguments", None)
    back += [{"type": "function_call_output", "call_id": call.call_id, "output": "Sun."} for call in calls]
    assert openai.responses.create(input=back, tools=FUNCTIONS, **forced("Sun!")).output_text == "Sun!"


def test_forms_and_forced_calls(openai: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    given: Any = {"model": "embedded", "input": "hi", "max_output_tokens": 200}
    extra = {"frequency_penalty": 2}
    assert json.loads(openai.responses.create(**given, text=form, extra_body=extra).output_text)["a"] in (1, 2)
    choice: Any = {"type": "function", "name": "weather"}
    (call,) = openai.responses.create(**given, tools=FUNCTIONS, tool_choice=choice, extra_body=extra).output
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert openai.responses.create(**given, text={"format": {"type": "text"}}, temperature=0).output_text


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": None}), ("input", {"input": []}),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "a"}]}),
        ("input[0].content", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input[0].role", {"input": [{"role": "king", "content": "hi"}]}),
        ("max_output_tokens", {"max_output_tokens": -1}), ("max_output_tokens", {"max_output_tokens": 10**6}),
        ("tools[0].type", {"tools": [{"name": "weather"}]}), ("reasoning.budget", {"reasoning": {"budget": 5}}),
        ("text", {"text": {"format": {"type": "xml"}}}), ("text.mood", {"text": {"mood": "low"}}),
        ("temperature", {"temperature": -1}), ("n", {"n": 2}),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(talker: Host, param: str, fields: dict[str, Any]) -> None:
    refused(talker.post(PATH, **{"input": "hi"} | fields), 400, param)


def test_an_error_in_a_stream_is_an_event(talker: Host) -> None:
    talker.service.limits, limits = type(talker.service.limits)(total_seconds=0.5), talker.service.limits
    try:
        body = {"input": "hi", "stream": True, "ignore_eos": True, "temperature": 0}
        events = [line for line in talker.post(PATH, **body).text.split("\n") if line.startswith("event: ")]
    finally:
        talker.service.limits = limits
    assert events[-2:] == ["event: error", "event: response.failed"]
