"""The messages of a conversation, checked and in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipstream.server.api_error import ApiError
from slipstream.server.fields import members, plain_text

MEMBERS = {
    "system": ("content",),
    "developer": ("content",),
    "user": ("content",),
    "assistant": ("content", "tool_calls", "reasoning_content", "reasoning"),
    "tool": ("content", "tool_call_id", "name"),
}
"""Role -> what its messages may hold."""


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages for a chat template. Raises ApiError 400."""
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is missing or empty, must be a list of messages", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message: parts of text are joined, arguments of calls are read, and the role "developer" is the system's newer
    name."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} is {message!r}, must be an object", where)
    given = {name: value for name, value in message.items() if value is not None and value != []}
    role = given.pop("role", None)
    if not isinstance(role, str) or role not in MEMBERS:
        raise ApiError(400, f"{where}.role is {role!r}, must be one of {', '.join(MEMBERS)}", f"{where}.role")
    for name in given:
        if name not in MEMBERS[role]:
            known = ", ".join(MEMBERS[role])
            raise ApiError(
                400, f"{where}.{name} is not supported: messages of the role {role} have {known}", f"{where}.{name}"
            )
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    found["content"] = plain_text(given.get("content", ""), f"{where}.content")
    for name in ("tool_call_id", "name"):
        if name in given:
            found[name] = plain_text(given[name], f"{where}.{name}")
    if role == "tool" and "tool_call_id" not in found:
        raise ApiError(400, f"{where}.tool_call_id is missing: it says which call is answered", f"{where}.tool_call_id")
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    if reasoning is not None:
        found["reasoning_content"] = plain_text(reasoning, f"{where}.reasoning")
    if "tool_calls" in given:
        calls = given["tool_calls"]
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls must be a list of calls", f"{where}.tool_calls")
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    asked = members({where: call}, where, ("id", "type", "function", "index"))
    function = members(asked, "function", ("name", "arguments"))
    name = function.get("name")
    if asked.get("type", "function") != "function" or not isinstance(name, str) or not name:
        raise ApiError(400, f"{where} must be a call of a function with a name", where)
    found = {"type": "function", "function": {"name": name, "arguments": _arguments(function, where)}}
    if "id" in asked:
        found["id"] = plain_text(asked["id"], f"{where}.id", where)
    return found


def _arguments(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    text = function.get("arguments", "{}")
    try:
        read = json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError) as fault:
        raise ApiError(400, f"{where}.function.arguments is not JSON text: {fault}", where) from fault
    if not isinstance(read, dict):
        raise ApiError(400, f"{where}.function.arguments is {text!r}, must be the text of a JSON object", where)
    return read
