"""`/v1/messages`: Anthropic's Messages API, translated to a chat."""

import json
from collections.abc import Iterator
from uuid import uuid4

from slipstream.core.strict import JsonObject, parse_json
from slipstream.server.api_error import ApiError, drop_members
from slipstream.server.chat_requests import read_conversation, rename_fields, translate_request
from slipstream.server.fields import (
    MESSAGES,
    fields_of,
    pass_on,
    read_flag,
    read_list,
    read_members,
    read_object,
    read_text,
)
from slipstream.server.generation import Generation
from slipstream.server.reply import CALL, CONTENT, REASONING
from slipstream.server.response_writer import Block, BlocksWriter, Event, ResponseWriter, stop_text
from slipstream.server.service import Service

NAMES = {"stop": "stop_sequences", "parallel_tool_calls": "tool_choice", "response_format": "output_config"}
_COUNTED = (
    "model", "messages", "system", "tools", "tool_choice", "chat_template_kwargs", "thinking", "output_config",
    "context_management", "cache_control",
)  # fmt: skip
COUNTED = {name: fields_of(MESSAGES)[name] for name in _COUNTED}
"""Name -> field, for requests to `/v1/messages/count_tokens`."""


def prepare_message(service: Service, given: JsonObject) -> ResponseWriter:
    return translate_request(service, given, MESSAGES, translate_to_chat, MessagesWriter, NAMES)


def count_prompt_tokens(service: Service, given: JsonObject) -> int:
    """Count the tokens of a conversation. Raises ApiError 400."""
    try:
        return len(read_conversation(service, translate_to_chat(given)).ids)
    except ApiError as fault:
        raise rename_fields(fault, NAMES) from fault


def translate_to_chat(given: JsonObject) -> JsonObject:
    """Translate a request's fields to the fields of a chat. Raises ApiError 400."""
    body = pass_on(given, MESSAGES, max_tokens="max_tokens", stop_sequences="stop")
    system = [{"role": "system", "content": read_text(given["system"], "system")}] if "system" in given else []
    body["messages"] = system + _read_messages(given.get("messages"))
    output = read_members(given, "output_config", ("format", "effort"))
    body["hints"] = {"reasoning_effort": output["effort"]} if "effort" in output else {}
    thinking = read_members(given, "thinking", ("type", "budget_tokens", "display"))
    if (kind := drop_members(thinking, "thinking", "budget_tokens", "display").get("type", "adaptive")) not in (
        "enabled",
        "disabled",
        "adaptive",
    ):
        raise ApiError(400, f"thinking.type is {kind!r}, must be enabled, disabled or adaptive", "thinking.type")
    if kind != "adaptive":
        body["hints"]["enable_thinking"] = kind == "enabled"
    if "format" in output:
        wanted = read_members(output, "format", ("type", "schema"))
        schema = {"json_schema": {"schema": wanted["schema"]}} if "schema" in wanted else {}
        body["response_format"] = {"type": wanted.get("type"), **schema}
    if "tools" in given:
        body["tools"] = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(read_list(given["tools"], "tools"))]
    choice = read_members(given, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    if read_flag(choice, "disable_parallel_tool_use"):
        body["parallel_tool_calls"] = False
    if choice.get("type") == "tool":
        body["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice:
        kind = choice.get("type")
        if kind not in ("auto", "any", "none"):
            raise ApiError(400, f"tool_choice.type is {kind!r}, must be auto, any, tool or none", "tool_choice.type")
        body["tool_choice"] = "required" if kind == "any" else kind
    return body


_TOOL_HINTS = ("cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "input_examples")


def _read_tool(tool: object, where: str) -> JsonObject:
    asked = drop_members(read_object(tool, where), "tools", *_TOOL_HINTS)
    if (kind := asked.pop("type", "custom")) != "custom":
        return {"type": kind}
    if "input_schema" in asked:
        asked["parameters"] = asked.pop("input_schema")
    return {"type": "function", "function": asked}


def _read_messages(given: object) -> list[JsonObject]:
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages is missing or empty, but must be a list of messages", "messages")
    messages = [each for i, message in enumerate(given) for each in _read_message(message, f"messages[{i}]")]
    if messages[-1]["role"] == "assistant":
        why = "the last message has the role 'assistant': continuing it (prefill) is not supported"
        raise ApiError(400, why, "messages")
    return messages


def _read_message(message: object, where: str) -> list[JsonObject]:
    """Translate a message to one or several messages of a chat: each tool result becomes its own message."""
    asked = read_object(message, where)
    role, content = asked.get("role"), asked.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where}.role is {role!r}, must be user, assistant or system", f"{where}.role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise ApiError(400, f"{where}.content is {content!r}, must be text or a list of blocks", f"{where}.content")
    converted: JsonObject = {"role": role, "content": ""}
    results: list[JsonObject] = []
    for i, block in enumerate(blocks):
        here = f"{where}.content[{i}]"
        part = read_object(block, here)
        kind = part.get("type")
        if kind == "text":
            converted["content"] += read_text([part], here)
        elif kind == "thinking" and role == "assistant":
            converted["reasoning_content"] = converted.get("reasoning_content", "") + str(part.get("thinking", ""))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": part.get("name"), "arguments": json.dumps(part.get("input", {}), ensure_ascii=False)}
            converted.setdefault("tool_calls", []).append({"id": part.get("id"), "function": function})
        elif kind == "tool_result" and role == "user":
            text = read_text(part.get("content", ""), f"{here}.content")
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text})
        else:
            raise ApiError(400, f"{here}.type is {kind!r}, which is not supported for the role {role}", here)
    return results if results and not converted["content"] else [*results, converted]


class MessagesWriter(BlocksWriter):
    """Writes the answer of /v1/messages: a message with blocks."""

    def __init__(self, generation: Generation, given: JsonObject):
        super().__init__(generation)
        self._id = f"msg_{uuid4().hex}"

    def write_start(self) -> Iterator[Event]:
        usage = {"input_tokens": sum(map(len, self.generation.prompts)), "output_tokens": 0}
        message = self._write_message() | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield "message_start", {"message": message}

    def open_block(self, block: Block) -> Iterator[Event]:
        empty = Block(block.index, block.kind, block.call)
        yield "content_block_start", {"index": block.index, "content_block": self._write_block(empty)}

    def extend_block(self, block: Block, text: str) -> Iterator[Event]:
        kind, name = _DELTAS[block.kind]
        yield "content_block_delta", {"index": block.index, "delta": {"type": kind, name: text}}

    def close_block(self, block: Block) -> Iterator[Event]:
        yield "content_block_stop", {"index": block.index}

    def write_end(self) -> Iterator[Event]:
        message = self.write_whole()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield "message_delta", {"delta": delta, "usage": message["usage"]}
        yield "message_stop", {}

    def write_error(self, fault: ApiError) -> Iterator[Event]:
        yield "error", {"error": fault.anthropic["error"]}

    def write_whole(self) -> JsonObject:
        (choice,) = self.generation.choices
        stop = stop_text(choice, choice.finish)
        reason = "max_tokens" if choice.finish == "length" else "end_turn" if stop is None else "stop_sequence"
        if choice.reply.calls and reason == "end_turn":
            reason = "tool_use"
        usage = self.generation.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return self._write_message() | {
            "content": [self._write_block(block) for block in self.blocks],
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": usage["completion_tokens"],
            },
        }

    def _write_message(self) -> JsonObject:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self.generation.service.name}

    def _write_block(self, block: Block) -> JsonObject:
        if block.call is not None:
            name = block.call.name
            return {"type": "tool_use", "id": block.call.id, "name": name, "input": _parse_arguments(block.text)}
        if block.kind == REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        return {"type": "text", "text": block.text}


_DELTAS = {
    REASONING: ("thinking_delta", "thinking"),
    CONTENT: ("text_delta", "text"),
    CALL: ("input_json_delta", "partial_json"),
}


def _parse_arguments(text: str) -> object:
    """Parse the arguments of a call. If the text is not JSON because it was cut, return {"INVALID_JSON": text}."""
    try:
        return parse_json(text or "{}")
    except ValueError:
        return {"INVALID_JSON": text}
