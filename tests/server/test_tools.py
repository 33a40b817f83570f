"""Tools: given to the chat template, called by choice or by force, parsed, and answered."""

import json
from typing import Any

import jsonschema
import pytest

from slipstream import LLM
from tests.server.hosting import Host, hosted, refused
from tests.server.talking import ARGUMENTS, CALL, NOW, PARAMETERS, TOOLS, USER, talking_tokenizer

PATH = "/v1/chat/completions"


def said(host: Host, text: str, **body: Any) -> dict[str, Any]:
    """The choice of an answer that is made to be `text`."""
    given = {"messages": USER, "tools": TOOLS, "structured_outputs": {"choice": [text]}, "max_tokens": 200} | body
    answered = host.post(PATH, **given)
    assert answered.status_code == 200, answered.text
    return answered.json()["choices"][0]  # type: ignore[no-any-return]


def test_a_call_is_parsed_text_without_one_is_content_and_one_that_is_cut_says_so(talker: Host) -> None:
    answer = said(talker, f"I look.\n{CALL}\n{NOW}")
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] == "I look."
    wanted = [{"name": "weather", "arguments": ARGUMENTS}, {"name": "now", "arguments": "{}"}]
    assert [call["function"] for call in answer["message"]["tool_calls"]] == wanted
    assert said(talker, CALL)["message"]["content"] is None
    one = said(talker, f"{CALL}{NOW}", parallel_tool_calls=False)["message"]["tool_calls"]
    assert [call["function"]["name"] for call in one] == ["weather"]
    answer = said(talker, "It rains. <tool_call>{}")
    assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", "It rains. <tool_call>{}")
    assert "tool_calls" not in answer["message"]
    plain = said(talker, CALL, tool_choice="none")
    assert (plain["finish_reason"], plain["message"]["content"]) == ("stop", CALL)
    assert said(talker, CALL, tools=[])["message"]["content"] == CALL
    answer = said(talker, CALL, max_tokens=len(talker.service.tokenizer.encode(CALL)) // 2 + 4)
    assert answer["finish_reason"] == "length"


def test_the_official_client_reads_streamed_calls_and_answers_them(talker: Host, openai: Any) -> None:
    given: Any = {"model": "embedded", "messages": USER, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    text = f"I look. {CALL}{NOW}"
    with openai.chat.completions.stream(**given, extra_body={"structured_outputs": {"choice": [text]}}) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert message.content == "I look."
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("weather", ARGUMENTS), ("now", "{}")]
    back = [*USER, json.loads(message.model_dump_json(exclude_none=True, exclude={"parsed"}))]
    for call in back[1]["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
        back.append({"role": "tool", "tool_call_id": call["id"], "content": "Sun."})
    forced = {"structured_outputs": {"choice": ["Sun!"]}}
    answered = openai.chat.completions.create(**given | {"messages": back}, extra_body=forced)
    assert answered.choices[0].message.content == "Sun!"
    ids = talker.post("/tokenize", messages=back, tools=TOOLS).json()["tokens"]
    prompt = talker.service.tokenizer.decode(ids)
    assert f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>' in prompt
    assert f"[{message.tool_calls[0].id}] Sun." in prompt
    assert '"name": "now"' in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_required_call_has_valid_arguments(openai: Any, stream: bool, parallel: bool) -> None:
    for seed in range(3):
        given: Any = {"model": "embedded", "messages": USER, "tools": TOOLS, "tool_choice": "required", "seed": seed}
        given |= {"max_tokens": 600, "frequency_penalty": 2, "parallel_tool_calls": parallel}
        if stream:
            with openai.chat.completions.stream(**given) as answered:
                choice: Any = answered.get_final_completion().choices[0]
        else:
            choice = openai.chat.completions.create(**given).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None or not choice.message.content
        for call in choice.message.tool_calls:
            schema = PARAMETERS if call.function.name == "weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.function.arguments), schema)
        assert parallel or len(choice.message.tool_calls) == 1


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": "weather"}),
        ("tools", {"tools": TOOLS * 100}),
        ("tools[0].type", {"tools": [{"name": "weather"}]}),
        ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("function.returns", {"tools": [{"type": "function", "function": {"name": "a", "returns": {}}}]}),
        ("tools[2].function.name", {"tools": [*TOOLS, TOOLS[0]]}),
        ("tools[0].function.parameters", {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "some"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rain"}}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}),
        (None, {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "text"}}}],
                "tool_choice": "required"}),
        ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": "no"}),
        ("chat_template_kwargs.mood", {"chat_template_kwargs": {"mood": 1}}),
        ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
        ("chat_template_kwargs", {"chat_template_kwargs": []}),
        ("reasoning_effort", {"reasoning_effort": "low"}),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(talker: Host, param: str | None, fields: dict[str, Any]) -> None:
    refused(talker.post(PATH, messages=USER, **fields), 400, param)


CALLED = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": "now"},
        {"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "now", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "now", "arguments": "[]"}}]},
        {"role": "assistant", "tool_calls": [{"id": "a"}]},
        {"role": "tool", "content": "Sun."},
        {"role": "user", "content": "hi", "tool_calls": [CALLED]},
    ],
)
def test_messages_with_calls_that_cannot_be_read_are_refused(talker: Host, message: dict[str, Any]) -> None:
    refused(talker.post(PATH, messages=[*USER, message], tools=TOOLS), 400)


def test_a_template_that_takes_no_tools_is_named_as_the_reason(host: Host) -> None:
    assert "does not support tools" in refused(host.post(PATH, messages=USER, tools=TOOLS), 400, "tools")


def test_a_model_whose_way_of_calling_is_unknown_can_be_made_to_call(pair: LLM, tmp_path: Any) -> None:
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with hosted(pair, tokenizer=talking_tokenizer(tmp_path, template)) as host:
        assert "--tool-format" in refused(host.post(PATH, messages=USER, tools=TOOLS), 400, "tools")
        body = {
            "messages": USER, "tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 300, "frequency_penalty": 2,
        }  # fmt: skip
        answer = host.post(PATH, **body).json()["choices"][0]["message"]["tool_calls"]
        assert {call["function"]["name"] for call in answer} == {"now"}
