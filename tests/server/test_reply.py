"""Reasoning, content and tool calls are told apart, however the text arrives."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.server.call_formats import FORCED, FORMATS
from slipstream.server.reply import ARGUMENTS, CALL, CONTENT, REASONING, Delta, Reply

READS = {form.name: form.read for form in FORMATS} | FORCED
TAGS = ("<think>", "</think>")


def read(text: str, form: str = "", cuts: Any = (), think: bool = False, inside: bool = False) -> Reply:
    """The reply of a text that arrives in pieces, whose deltas are checked against it."""
    functions: dict[str, Any] = {"add": {}} if form == "named" else {"add": {}, "now": {}}
    reply = Reply(functions, READS.get(form), TAGS if think else None, inside)
    edges = [0, *sorted(cuts), len(text)]
    deltas: list[Delta] = []
    for n, (first, end) in enumerate(pairwise(edges)):
        deltas += reply.add(text[first:end], n == len(edges) - 2)
    assert reply.content == "".join(each.text for each in deltas if each.kind == CONTENT)
    assert reply.reasoning == "".join(each.text for each in deltas if each.kind == REASONING)
    assert [call.name for call in reply.calls] == [each.text for each in deltas if each.kind == CALL]
    for i, call in enumerate(reply.calls):
        parts_of_call = [each for each in deltas if each.kind in (CALL, ARGUMENTS) and each.index == i]
        assert parts_of_call[0].kind == CALL
        assert "".join(each.text for each in parts_of_call[1:]) == call.arguments
    return reply


def shown(reply: Reply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.calls]


ADD = '{"name": "add", "arguments": {"a": 1, "b": "}\\"]"}}'
ARGS = '{"a": 1, "b": "}\\"]"}'
NOW = '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("", f"<tool_call>{ADD}</tool_call>", f"<tool_call>{ADD}</tool_call>", []),
        ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", ARGS)]),
        ("hermes", f"I add.\n\n<tool_call>{ADD}</tool_call>\n<tool_call>{NOW}</tool_call>", "I add.",
         [("add", ARGS), ("now", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call> done', " done", [("now", "{}")]),
        ("hermes", f"<tool_call>{ADD}", "", [("add", ARGS)]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a', "", [("add", '{"a')]),
        ("hermes", f"a <tool_call>{NOW}</tool_call> b\n", "a b", [("now", "{}")]),
        ("mistral", f"[TOOL_CALLS][{ADD}, {NOW}]", "", [("add", ARGS), ("now", "{}")]),
        ("mistral", f"Well.[TOOL_CALLS]add[ARGS]{ARGS}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}", "Well.",
         [("add", ARGS), ("now", "{}")]),
        ("mistral", f"[TOOL_CALLS] add{ARGS}", "", [("add", ARGS)]),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ("llama", f"<|python_tag|>{ADD}; {NOW}", "", [("add", ARGS), ("now", "{}")]),
        ("llama", f"It is {NOW}", f"It is {NOW}", []),
        ("required", f" [{ADD}, {NOW}]", "", [("add", ARGS), ("now", "{}")]),
        ("named", f" {ARGS}", "", [("add", ARGS)]),
    ],
)  # fmt: skip
def test_calls_are_read_in_each_format(form: str, text: str, content: str, calls: list[Any]) -> None:
    assert shown(read(text, form)) == ("", content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call> \n nothing </tool_call>\n "),
        ("hermes", ' <tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": 5}</tool_call>'), ("hermes", '<tool_call>{"name": "a'),
        ("hermes", "<tool_call>{ }</tool_call>"),
        ("hermes", '<tool_call>{"arguments": ' + '{"a": ' * 9000 + "1" + "}" * 9001), ("hermes", "<tool_call"),
        ("hermes", " \n "), ("mistral", "[TOOL_CALLS] [ 1, 2]"), ("mistral", "[TOOL_CALLS]rm[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]" + "long" * 100), ("llama", ' {\n  "name": "Ann", "parameters": {}}; {'),
        ("llama", '{"a": 1}'), ("required", "[ ]"), ("named", '"text'), ("", " text "),
    ],
)  # fmt: skip
def test_what_is_no_call_of_a_declared_function_is_content_as_it_was_written(form: str, text: str) -> None:
    assert shown(read(text, form)) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"), ("why </think> so </think>", True, "why", "so </think>"),
        ("<think>why", False, "why", ""), (" so <think>", False, "", " so <think>"), ("<thin", False, "", "<thin"),
        ("\n<think>a < b </thinker> </think>", False, "a < b </thinker>", ""), ("", True, "", ""),
    ],
)  # fmt: skip
def test_reasoning_is_told_apart(text: str, inside: bool, reasoning: str, content: str) -> None:
    assert shown(read(text, "hermes", think=True, inside=inside)) == (reasoning, content, [])


def test_calls_within_the_reasoning_are_reasoning_and_further_ones_left_out_where_one_is_allowed() -> None:
    reply = read(f"<think><tool_call>{NOW}</tool_call></think><tool_call>{ADD}</tool_call>", "hermes", think=True)
    assert shown(reply) == (f"<tool_call>{NOW}</tool_call>", "", [("add", ARGS)])
    reply = Reply({"add": {}, "now": {}}, READS["hermes"], most_calls=1)
    reply.add(f"<tool_call>{ADD}</tool_call><tool_call>{NOW}</tool_call>", True)
    assert [call.name for call in reply.calls] == ["add"]


def test_ids_of_calls_differ_and_arguments_are_the_json_that_was_written() -> None:
    reply = read(f"<tool_call>{ADD}</tool_call><tool_call>{ADD}</tool_call>", "hermes")
    assert len({call.id for call in reply.calls}) == 2
    assert json.loads(reply.calls[0].arguments) == {"a": 1, "b": '}"]'}


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "add>", "<parameter=a>", "</parameter>",
    "</function>", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "call:add{", '<|"|>', "<tool_call|>",
    "add(a='b')", "<|message|>", "<|channel|>analysis", "to=functions.add",
    "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ADD, NOW, "add",
    '{"name": "add", ', '"arguments": ', ARGS, "{", "}", "[", "]", ",", ";", '"', "\\", " ", "\n", "<", "é", "word",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_every_split_of_a_text_gives_the_same_reply(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=14)))
    form = data.draw(st.sampled_from(["", *READS]))
    think, inside = data.draw(st.booleans()), data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert shown(read(text, form, cuts, think, inside)) == shown(read(text, form, (), think, inside))
