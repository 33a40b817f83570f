"""Replies are read by the response template of a checkpoint, with the parser of transformers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from transformers.utils.chat_parsing import parse_response

from slipstream.server.reply import Reply
from slipstream.server.template_reader import TemplateReader
from tests.server.talking import JSON_TEMPLATE

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>", "repeats": True, "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
ADD = "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def read(text: str, cuts: Any = (), template: Any = TEMPLATE, prompt: str = PROMPT) -> Any:
    reply = Reply(TemplateReader(template, prompt, TOOLS, {"add"}))
    edges = [0, *sorted(cuts), len(text)]
    for n, (first, end) in enumerate(pairwise(edges)):
        reply.add(text[first:end], n == len(edges) - 2)
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.calls]


def test_the_parts_are_those_that_transformers_finds() -> None:
    text = f"<think>\nI add.\n</think>\n\nWait.\n{ADD}\n{ADD}<|im_end|>"
    parsed = parse_response(text, TEMPLATE, prefix=PROMPT, tools=TOOLS)
    assert read(text) == ("I add.", "Wait.", [("add", '{"a": 7}')] * 2)
    assert (parsed["reasoning_content"], parsed["content"], len(parsed["tool_calls"])) == ("I add.", "Wait.", 2)


def test_what_the_prompt_has_begun_goes_on() -> None:
    assert read("why</think>so<|im_end|>", prompt=PROMPT + "<think>\n") == ("why", "so", [])
    assert read("so", prompt=PROMPT + "<think>\n\n</think>\n\n") == ("", "so", [])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a <call>no json</call> b", "a <call>no json</call> b"),
        ('<call>{"name": "rm", "arguments": {}}</call>', '<call>{"name": "rm", "arguments": {}}</call>'),
        ("<call>{", "<call>{"),
        ("<call>[1]</call> b", "<call>[1]</call> b"),
        ('<call>{"arguments": {}}</call> b', '<call>{"arguments": {}}</call> b'),
    ],
)
def test_what_the_template_does_not_understand_is_content(text: str, content: str) -> None:
    assert read(text, template=JSON_TEMPLATE, prompt="A:") == ("", content, [])


PIECES = ["<think>", "</think>", ADD, "<tool_call>", "<function=add>", "</function>", "<|im_end|>", " ", "\n", "a", "<"]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_split_of_a_text_gives_the_same_reply(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=10)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    assert read(text, cuts) == read(text)
