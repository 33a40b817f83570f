"""Makes the generation of a chat from its fields: for /v1/chat/completions, and for endpoints that translate to it."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from jinja2 import TemplateError

from slipstream.core.strict import JsonObject
from slipstream.core.structured import Structured
from slipstream.errors import PromptError
from slipstream.server.api_error import ApiError, drop_members, has_no_effect
from slipstream.server.fields import (
    CHAT,
    REQUIRED,
    read_count,
    read_list,
    read_members,
    read_object,
    read_sampling_params,
    read_text,
)
from slipstream.server.generation import Generation, make_generation
from slipstream.server.response_writer import ResponseWriter
from slipstream.server.service import Service
from slipstream.server.tools import ToolUse, read_tool_use
from slipstream.tokens.chat_template import choose_template, names_read

MEMBERS = {
    "system": ("content", "name"),
    "developer": ("content", "name"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "tool_calls", "reasoning_content", "reasoning"),
    "tool": ("content", "tool_call_id", "name"),
}
"""Role -> members that its messages may have."""

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of the chat template that a request may not set in `chat_template_kwargs`."""


@dataclass(frozen=True)
class Conversation:
    """A prompt made from messages. text: output of the chat template; ids: its token ids; use: the tools."""

    text: str
    ids: list[int]
    use: ToolUse


def start_chat(service: Service, given: JsonObject) -> Generation:
    """Make the choices of a chat from its fields. Raises ApiError 400."""
    talk = read_conversation(service, given)
    n = read_count(given, "n", 1, service.limits.choices, 1)
    params = service.checks.params(
        read_sampling_params(given, CHAT, service.checks.room(len(talk.ids)), service.facts.sampling)
    )
    params = replace(params, structured=_choose_form(service, talk, params.structured))
    reply = partial(service.replies.reply, talk.text, talk.use)
    return make_generation(service, [talk.ids], params, n, given, reply=reply)


def translate_request(
    service: Service,
    given: JsonObject,
    where: str,
    chat_of: Callable[[JsonObject], JsonObject],
    writer: Callable[[Generation, JsonObject], ResponseWriter],
    names: Mapping[str, str],
) -> ResponseWriter:
    """Make the writer of a request whose fields are translated to the fields of a chat.

    chat_of  translates the fields. names: field of a chat -> name of this field in the request, for errors.
    """
    for name in REQUIRED[where]:
        if name not in given:
            raise ApiError(400, f"{name} is missing", name)
    try:
        return writer(start_chat(service, chat_of(given)), given)
    except ApiError as fault:
        raise rename_fields(fault, names) from fault


def rename_fields(fault: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return the error with the endpoint's own names in place of the names of a chat's fields."""
    if fault.param is None or fault.param.split(".")[0].split("[")[0] not in names:
        return fault
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    message, param = (pattern.sub(lambda match: names[match[0]], each) for each in (fault.message, fault.param))
    return ApiError(fault.status, message, param, fault.code)


def read_conversation(service: Service, given: JsonObject) -> Conversation:
    """Make the prompt of a chat. Raises ApiError 400."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is missing or empty, but must be a list of messages", "messages")
    joins = service.replies.joins_arguments
    messages = [_read_message(message, f"messages[{i}]", joins) for i, message in enumerate(messages)]
    use = read_tool_use(given)
    names = _read_template_names(service, given, use)
    try:
        if service.replies.alternates:
            messages = _join_turns(messages)
        text = service.checks.chat_text(messages, **names)
        return Conversation(text, service.checks.prompt(service.checks.chat_ids(text)), use)
    except PromptError as fault:
        raise service.describe_prompt_error(fault, "messages") from fault


def _join_turns(messages: list[JsonObject]) -> list[JsonObject]:
    """Join all system messages into one at the beginning, and neighbouring user messages."""
    joined: list[JsonObject] = []
    for each in sorted(messages, key=lambda message: message["role"] != "system"):
        if joined and joined[-1]["role"] == each["role"] and each["role"] in ("system", "user"):
            joined[-1] = joined[-1] | {"content": f"{joined[-1]['content']}\n\n{each['content']}"}
        else:
            joined.append(each)
    return joined


def _read_template_names(service: Service, given: JsonObject, use: ToolUse) -> JsonObject:
    """Collect the variables of the chat template besides the messages. Variables from `hints` that the template does
    not use are ignored; other variables that it does not use raise ApiError 400."""
    known = frozenset[str]()
    with suppress(TemplateError):  # raised again, with an explanation, when the template is rendered
        if service.tokenizer is not None:
            known = names_read(choose_template(service.tokenizer.chat_template, bool(use.tools)))
    names: JsonObject = {}
    if use.tools:
        if "tools" not in known:
            raise ApiError(
                400,
                "the model's chat template does not support tools: use a model that was trained to call tools, such as "
                "Qwen/Qwen3-0.6B, or request JSON with response_format",
                "tools",
                "unsupported_field",
            )
        if use.choice == "auto" and service.replies.calls is None:
            raise ApiError(
                400,
                "the format of this model's tool calls is unknown: start the server with --tool-format, or request a "
                "call with tool_choice",
                "tools",
                "unsupported_field",
            )
        names["tools"] = list(use.tools)
    kwargs = given.get("chat_template_kwargs", {})
    read_object(kwargs, "chat_template_kwargs")
    asked = {f"chat_template_kwargs.{name}": (name, value) for name, value in kwargs.items()}
    if "reasoning_effort" in given:
        asked["reasoning_effort"] = ("reasoning_effort", given["reasoning_effort"])
    for name, value in given.get("hints", {}).items():
        if name in known:
            asked[name] = (name, value)
        else:
            has_no_effect(f"{name} (the model's chat template does not read it)")
    for field, (name, value) in asked.items():
        if name in RESERVED or name.endswith("_token") or name not in known:
            raise ApiError(
                400,
                f"a request cannot set {name!r} for the model's chat template",
                field,
                "unsupported_field",
            )
        names[name] = value
    return names


def _choose_form(service: Service, talk: Conversation, structured: Structured | None) -> Structured | None:
    """Choose the structured output after the reasoning: tool calls, or the form that the request gives itself."""
    called = talk.use.structured
    if called is not None and structured is not None:
        raise ApiError(400, "tool_choice and another field both request structured output", "tool_choice")
    if talk.use.choice == "auto" and talk.use.strict:
        if structured is not None:
            raise ApiError(400, "a strict function and another field both request structured output", "tools")
        return service.replies.strict_calls(talk.text, talk.use, service.tokenizer)
    structured = called or structured
    end = service.replies.end_of_reasoning(talk.text)
    return structured if structured is None or end is None else replace(structured, after=end)


def _read_message(message: object, where: str, joins: bool) -> JsonObject:
    """Read a message: join its parts of text, and make the role "developer" "system". Arguments of calls become
    objects, or stay JSON text if the template `joins` them."""
    given = {name: value for name, value in read_object(message, where).items() if value != []}
    role = given.pop("role", None)
    if not isinstance(role, str) or role not in MEMBERS:
        raise ApiError(400, f"{where}.role is {role!r}, must be one of {', '.join(MEMBERS)}", f"{where}.role")
    for name in given:
        if name not in MEMBERS[role]:
            known = ", ".join(MEMBERS[role])
            raise ApiError(
                400,
                f"{where}.{name} is not supported: messages of the role {role} have {known}",
                f"{where}.{name}",
            )
    if role != "tool":
        drop_members(given, "messages", "name")
    converted: JsonObject = {"role": "system" if role == "developer" else role}
    converted["content"] = read_text(given.get("content", ""), f"{where}.content")
    for name in ("tool_call_id", "name"):
        if name in given:
            converted[name] = read_text(given[name], f"{where}.{name}")
    if role == "tool" and "tool_call_id" not in converted:
        raise ApiError(400, f"{where}.tool_call_id is missing: it says which call is answered", f"{where}.tool_call_id")
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    if reasoning is not None:
        converted["reasoning_content"] = read_text(reasoning, f"{where}.reasoning")
    if "tool_calls" in given:
        calls = read_list(given["tool_calls"], f"{where}.tool_calls")
        converted["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]", joins) for i, call in enumerate(calls)]
    return converted


def _read_call(call: object, where: str, joins: bool) -> JsonObject:
    asked = read_object(call, where, ("id", "type", "function", "index"))
    function = read_members(asked, "function", ("name", "arguments"))
    name = function.get("name")
    if asked.get("type", "function") != "function" or not isinstance(name, str) or not name:
        raise ApiError(400, f"{where} must be a call of a function with a name", where)
    arguments = _read_arguments(function, where)
    written = json.dumps(arguments, ensure_ascii=False) if joins else arguments
    converted: JsonObject = {"type": "function", "function": {"name": name, "arguments": written}}
    if "id" in asked:
        converted["id"] = read_text(asked["id"], f"{where}.id", where)
    return converted


def _read_arguments(function: JsonObject, where: str) -> JsonObject:
    text = function.get("arguments", "{}")
    try:
        read = json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError) as fault:
        raise ApiError(400, f"{where}.function.arguments is not JSON: {fault}", where) from fault
    if not isinstance(read, dict):
        raise ApiError(400, f"{where}.function.arguments is {text!r}, but must be a JSON object as text", where)
    return read
