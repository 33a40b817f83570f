"""`strict` where the model decides whether it calls: text is free, and the arguments of calls meet their schemas."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest

from slipstream import LLM
from slipstream.server.reply_format import ReplyFormat
from tests.server.hosting import Host, hosted, refused
from tests.server.talking import PARAMETERS, TOOLS, USER, WritingTarget, talking_tokenizer

PATH, V, EOS = "/v1/chat/completions", 4096, 0
WRONG = '{"city": "Paris", "days": 40, "sure": true}'
STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
TEXTS = {
    "hermes": f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {WRONG}}}\n</tool_call>',
    "llama": f'{{"name": "weather", "parameters": {WRONG}}}',
    "llama, marked": f'<|python_tag|>{{"parameters": {WRONG}, "name": "weather"}}',
    "mistral": f'I look.[TOOL_CALLS] [{{"name": "weather", "arguments": {WRONG}}}]',
    "mistral, newer": f"[TOOL_CALLS]weather[ARGS]{WRONG}",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return talking_tokenizer(tmp_path_factory.mktemp("strict"))


@contextmanager
def writing(tokenizer: Any, text: str, form: str = "hermes", reasoning: str = "none") -> Iterator[Host]:
    """A server whose model writes a text."""
    llm = LLM(WritingTarget(tokenizer.encode(text), V, EOS), tokenizer=tokenizer, draft_tokens=4)
    with hosted(llm, replies=ReplyFormat.of(tokenizer, form, reasoning)) as host:
        yield host


def asked(host: Host, **body: Any) -> Any:
    """The choice of an answer."""
    answered = host.post(PATH, **{"messages": USER, "tools": STRICT, "max_tokens": 120, "temperature": 0} | body)
    assert answered.status_code == 200, answered.text
    return answered.json()["choices"][0]


@pytest.mark.parametrize("name", TEXTS)
def test_a_call_that_would_break_its_schema_meets_it_drafted_or_not(tokenizer: Any, name: str) -> None:
    with writing(tokenizer, TEXTS[name], name.partition(",")[0]) as host:
        (broken,) = asked(host, tools=TOOLS)["message"]["tool_calls"]
        assert json.loads(broken["function"]["arguments"]) == json.loads(WRONG), "the model is no test"
        expected = {"type": "content", "content": TEXTS[name]}
        for speculation in ({"enabled": False}, {"enabled": True}):
            for temperature in (0, 1):
                body = {"speculation": speculation, "temperature": temperature, "seed": 4}  # its texts end
                answer = asked(host, **body, **({"prediction": expected} if speculation["enabled"] else {}))
                assert answer["finish_reason"] == "tool_calls", answer
                if "I look" in TEXTS[name]:
                    assert answer["message"]["content"].startswith("I look.")
                for call in answer["message"]["tool_calls"]:
                    assert call["function"]["name"] in ("weather", "now")
                    if call["function"]["name"] == "weather":
                        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


def test_text_and_functions_that_are_not_strict_stay_as_the_model_writes_them(tokenizer: Any) -> None:
    text = 'A < b, <tool_cal>.\n<tool_call>{"name": "now", "arguments": {"any": [1]}}</tool_call> It is <late>.'
    with writing(tokenizer, text) as host:
        for tools in (STRICT, TOOLS):
            answer = asked(host, tools=tools)["message"]
            assert answer["content"] == "A < b, <tool_cal>. It is <late>.", answer
            assert [json.loads(call["function"]["arguments"]) for call in answer["tool_calls"]] == [{"any": [1]}]
        parts = host.parts(PATH, messages=USER, tools=STRICT, max_tokens=120, temperature=0)
        assert "".join(part["delta"].get("content") or "" for part in parts) == answer["content"]


def test_an_unknown_function_is_not_called(tokenizer: Any) -> None:
    with writing(tokenizer, '<tool_call>{"name": "rain", "arguments": {}}</tool_call>') as host:
        assert "tool_calls" not in asked(host, tools=TOOLS)["message"]
        (call,) = asked(host)["message"]["tool_calls"]
        assert call["function"]["name"] in ("weather", "now")


def test_without_parallel_calls_the_text_ends_with_the_first(tokenizer: Any) -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    with writing(tokenizer, f"{call}{call} more") as host:
        assert len(asked(host)["message"]["tool_calls"]) == 2
        answer = asked(host, parallel_tool_calls=False)
        assert (answer["message"]["content"], len(answer["message"]["tool_calls"])) == (None, 1)
        assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_is_free_and_calls_are_checked_after_it(tokenizer: Any, begun: bool) -> None:
    thought = 'Perhaps <tool_call>{"name": "rain"}?'
    text = f"{'' if begun else '<think>'}{thought}</think>{TEXTS['hermes']}"
    with writing(tokenizer, text, reasoning="<think> </think>") as host:
        answer = asked(host, chat_template_kwargs={"enable_thinking": begun})["message"]
        assert answer["reasoning"] == thought
        assert answer["content"] == "I look."
        for call in answer["tool_calls"]:
            assert call["function"]["name"] == "weather"
            jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


OBJECTS: dict[str, Any] = {
    "anything": {},
    "without a type": {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    "or null": {"type": ["object", "null"], "additionalProperties": False},
    "one of several": {"anyOf": [{"type": "object", "additionalProperties": False}, {"type": "string"}]},
    "of a definition": {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"const": 1}}, "required": ["a"]}}},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_arguments_are_an_object_also_where_their_schema_allows_other_values(tokenizer: Any, name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": OBJECTS[name], "strict": True}}]
    for text, form in (
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "hermes"),
        ("[TOOL_CALLS]f7", "mistral"),
    ):
        with writing(tokenizer, text, form) as host:
            for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
                answer = asked(host, tools=tools, tool_choice=choice, parallel_tool_calls=False)
                (call,) = answer["message"]["tool_calls"]
                if answer["finish_reason"] != "length":
                    arguments = json.loads(call["function"]["arguments"])
                    assert isinstance(arguments, dict)
                    jsonschema.validate(arguments, OBJECTS[name])


def test_parameters_that_are_no_object_are_refused(tokenizer: Any) -> None:
    with writing(tokenizer, "It rains.") as host:
        for kind in ("string", ["array", "null"], []):
            tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
            assert "object" in refused(host.post(PATH, messages=USER, tools=tools), 400, "tools[0].function.parameters")


REFERENCES: dict[str, Any] = {
    "a value": {"const": {"$ref": "#/x"}},
    "values": {"enum": [{"$ref": "#/x"}]},
    "a property of that name": {"type": "object", "properties": {"enum": {"$ref": "#/$defs/A"}}, "required": ["enum"]},
    "of its own document": {"$id": "https://a/b", "$ref": "#/$defs/A", "$defs": {"A": {"const": 2}}},
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_of_a_schema_are_followed_and_values_that_look_like_them_are_left(tokenizer: Any, name: str) -> None:
    schema = {"type": "object", "properties": {"a": REFERENCES[name]}, "required": ["a"]}
    schema |= {"additionalProperties": False, "$defs": {"A": {"const": 3}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with writing(tokenizer, '[{"name": "f", "arguments": {"a": 7}}]') as host:
        asked_once = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        (call,) = asked(host, **asked_once)["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_what_cannot_be_enforced_is_refused_by_name(tokenizer: Any) -> None:
    with writing(tokenizer, "It rains.") as host:
        form = {"type": "json_object"}
        assert "strict" in refused(host.post(PATH, messages=USER, tools=STRICT, response_format=form), 400, "tools")
        unknown = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}, "strict": True}
        tools = [TOOLS[1], {"type": "function", "function": unknown}]
        assert "#/$defs/1/properties/a" in refused(host.post(PATH, messages=USER, tools=tools), 400)
        assert host.post(PATH, messages=USER, tools=STRICT, tool_choice="none", max_tokens=1).status_code == 200
