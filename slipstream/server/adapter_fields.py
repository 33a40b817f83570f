"""The fields of /v1/responses and /v1/messages, which are translated to those of a chat."""

from __future__ import annotations

from typing import Any

from slipstream.server.fields import CHAT, Field, fields_of, refused_fields

RESPONSES, MESSAGES = "responses", "messages"

_TEXT, _INTEGER, _BOOLEAN = ({"type": kind} for kind in ("string", "integer", "boolean"))
_OBJECT = {"type": "object"}
_OBJECTS = {"type": "array", "items": _OBJECT}

_AS_IN_A_CHAT = [
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "bad_words", "min_tokens", "stop_token_ids", "ignore_eos", "seed", "structured_outputs",
    "chat_template_kwargs", "speculation", "prediction",
]  # fmt: skip


def _as_in_a_chat(names: list[str]) -> list[Field]:
    chat = fields_of(CHAT)
    return [chat[name] for name in names]


_RESPONSES = (
    Field("model", "Name of the model, as /v1/models lists it.", _TEXT),
    Field("input", "Text, or items: messages, reasoning, calls of functions and their results.",
          {"anyOf": [_TEXT, _OBJECTS]}),
    Field("instructions", "The message of the system.", _TEXT),
    Field("max_output_tokens", "Most output tokens. Default: the rest of the context.", _INTEGER),
    Field("stream", "Send server-sent events.", _BOOLEAN, unset=(False,)),
    Field("stream_options", "include_obfuscation: false.", _OBJECT, unset=({}, {"include_obfuscation": False})),
    Field("text", "format: text, json_object or json_schema.", _OBJECT),
    Field("tools", "Functions that the answer may call.", _OBJECTS, unset=([],)),
    Field("tool_choice", "none, auto, required, or a function.", {"anyOf": [_TEXT, _OBJECT]}),
    Field("parallel_tool_calls", "Whether there may be several calls.", _BOOLEAN, unset=(True,)),
    Field("reasoning", "effort: a value that the model's chat template reads.", _OBJECT, unset=({},)),
    *_as_in_a_chat([*_AS_IN_A_CHAT, "stop"]),
    *(Field(name, "Has no effect.", {}) for name in ("metadata", "user", "safety_identifier", "prompt_cache_key")),
    *refused_fields("store", "nothing is stored: leave it out, or false", (False,)),
    *refused_fields("previous_response_id conversation prompt", "nothing is stored: send the whole input"),
    *refused_fields("background", "nothing is stored", (False,)),
    *refused_fields("include", "there is nothing to include", ([],)),
    *refused_fields("top_logprobs", "log-probabilities are part of chats", (0,)),
    *refused_fields("truncation", "prompts are not cut: shorten the input", ("disabled",)),
    *refused_fields("max_tool_calls", "tools are not run here"),
    *refused_fields("service_tier", "there is one tier", ("auto", "default")),
)  # fmt: skip

_MESSAGES = (
    Field("model", "Name of the model, as /v1/models lists it.", _TEXT),
    Field("messages", "The conversation: text, thinking, use of tools and results.", _OBJECTS),
    Field("max_tokens", "Most output tokens. Required.", _INTEGER),
    Field("system", "The message of the system: text, or blocks of text.", {"anyOf": [_TEXT, _OBJECTS]}),
    Field("stop_sequences", "The text ends before any of these.", {"type": "array", "items": _TEXT}, unset=([],)),
    Field("stream", "Send server-sent events.", _BOOLEAN, unset=(False,)),
    Field("tools", "Functions that the answer may use: name, description, input_schema.", _OBJECTS, unset=([],)),
    Field("tool_choice", "auto, any, tool or none; disable_parallel_tool_use.", _OBJECT),
    Field("output_config", "format: json_schema; effort: a value that the model's chat template reads.", _OBJECT,
          unset=({},)),
    *_as_in_a_chat(_AS_IN_A_CHAT),
    Field("metadata", "Has no effect.", _OBJECT),
    Field("cache_control", "Has no effect: prompts are cached anyway.", _OBJECT),
    *refused_fields(
        "thinking", "use chat_template_kwargs", ({"type": "disabled"}, {"type": "adaptive"}),
    ),
    *refused_fields("service_tier", "there is one tier", ("auto", "standard_only")),
    *refused_fields("container mcp_servers context_management", "tools are not run here", ([],)),
    *refused_fields("speed inference_geo", "there is one engine", ("standard",)),
)  # fmt: skip

ADAPTER_FIELDS = {
    where: {each.name: each for each in fields} for where, fields in ((RESPONSES, _RESPONSES), (MESSAGES, _MESSAGES))
}
"""Endpoint -> name -> field."""

REQUIRED: dict[str, list[str]] = {RESPONSES: ["input"], MESSAGES: ["messages", "max_tokens"]}


def passed_on(given: dict[str, Any]) -> dict[str, Any]:
    """The fields that a chat has under the same name and with the same meaning."""
    return {name: given[name] for name in ("model", "stop", *_AS_IN_A_CHAT) if name in given}
