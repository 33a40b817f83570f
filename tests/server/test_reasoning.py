"""Reasoning comes apart from the content, and forms hold after it."""

import json
from typing import Any

import pytest

from slipstream import LLM
from slipstream.errors import ParameterError
from slipstream.server.call_formats import FORMATS
from slipstream.server.reply_format import THINK, ReplyFormat
from tests.server.hosting import Host, hosted
from tests.server.talking import CALL, TOOLS, USER, talking_tokenizer

PATH = "/v1/chat/completions"
THOUGHT = "<think>\nIt is simple.\n</think>\n\n42"


def test_reasoning_is_in_a_field_of_its_own_whole_and_streamed(talker: Host) -> None:
    body = {"messages": USER, "structured_outputs": {"choice": [THOUGHT]}, "max_tokens": 100}
    message = talker.post(PATH, **body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"]) == ("It is simple.",) * 2
    assert message["content"] == "42"
    deltas = [part["delta"] for part in talker.parts(PATH, **body)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "It is simple."
    assert "".join(delta.get("content", "") for delta in deltas) == "42"
    forced = {"structured_outputs": {"choice": [f"<think>Hm.</think>{CALL}"]}, "tools": TOOLS}
    message = talker.post(PATH, **body | forced).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"], len(message["tool_calls"])) == ("Hm.", None, 1)
    back = talker.post("/tokenize", messages=[*USER, message, {"role": "tool", "tool_call_id": "a", "content": "b"}])
    assert "<think>Hm.</think><tool_call>" in talker.service.tokenizer.decode(back.json()["tokens"])


def test_a_form_holds_after_the_reasoning_that_the_prompt_begins(pair: LLM, tmp_path: Any) -> None:
    """The end of its "reasoning" is a colon, which this model writes soon."""
    replies = ReplyFormat(FORMATS[-1], ("<think>", ":"))
    with hosted(pair, tokenizer=talking_tokenizer(tmp_path), replies=replies) as host:
        body = {
            "messages": USER, "max_tokens": 300, "frequency_penalty": 2, "seed": 3,
            "chat_template_kwargs": {"enable_thinking": True},
        }  # fmt: skip
        answer = host.post(PATH, **body, structured_outputs={"choice": ["red", "blue"]}).json()["choices"][0]
        assert answer["finish_reason"] == "stop", answer
        assert answer["message"]["reasoning"]
        assert answer["message"]["content"] in ("red", "blue")
        named = {"type": "function", "function": {"name": "weather"}}
        answer = host.post(PATH, **body, tools=TOOLS, tool_choice=named).json()["choices"][0]
        assert answer["message"]["reasoning"]
        assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"])["city"] in ("Rome", "Oslo")
        body["chat_template_kwargs"] = {"enable_thinking": False}
        answer = host.post(PATH, **body, structured_outputs={"choice": ["red", "blue"]}).json()["choices"][0]
        assert answer["message"].keys() == {"role", "content", "refusal"}


def test_formats_are_found_out_from_the_checkpoint(tmp_path: Any, pair: LLM) -> None:
    reply = ReplyFormat.of(talking_tokenizer(tmp_path))
    assert (reply.calls.name if reply.calls else "", reply.reasoning, reply.certain) == ("hermes", THINK, False)
    assert ReplyFormat.of(pair.tokenizer) == ReplyFormat()
    named = ReplyFormat.of(pair.tokenizer, "mistral", "[THINK] [/THINK]")
    assert (named.calls.name if named.calls else "", named.reasoning) == ("mistral", ("[THINK]", "[/THINK]"))
    assert named.end_of_reasoning("a") == "[/THINK]"
    assert named.end_of_reasoning("a[THINK][/THINK]\n") is None
    assert ReplyFormat.of(talking_tokenizer(tmp_path), "none", "none") == ReplyFormat()
    for wrong in (("hermse", "auto"), ("auto", "<think>")):
        with pytest.raises(ParameterError):
            ReplyFormat.of(pair.tokenizer, *wrong)


def test_markers_that_are_special_tokens_are_seen(pair: LLM, tmp_path: Any) -> None:
    """`<|end|>` is a special token of this tokenizer, as the markers of some models are."""
    replies = ReplyFormat(None, ("<|end|>", "<|user|>"))
    with hosted(pair, tokenizer=talking_tokenizer(tmp_path), replies=replies) as host:
        ids = [host.service.tokenizer.convert_tokens_to_ids(name) for name in ("<|end|>", "<|user|>")]
        text = host.service.text_stream((), marked=True)
        why, so = host.service.tokenizer.encode("why"), host.service.tokenizer.encode("so")
        tokens = [ids[0], *why, ids[1], *so, host.service.tokenizer.eos_token_id]
        pieces = text.add(tokens, [False] * len(tokens), True)
        assert "".join(piece.text for piece in pieces) == "<|end|>why<|user|>so"
        plain = host.service.text_stream(())
        assert "".join(piece.text for piece in plain.add(tokens, [False] * len(tokens), True)) == "whyso"
