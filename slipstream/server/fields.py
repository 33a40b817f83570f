"""The fields of requests: one table for all endpoints.

A field in the table is supported, has no effect, or is refused with a reason. Fields that are not in the table are
refused. `null` and neutral values are ignored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.declaration import DISTRIBUTION, declared
from slipstream.core.params import SamplingParams, check_integer
from slipstream.core.strict import JsonObject
from slipstream.core.structured import Structured
from slipstream.engine.request_checks import MOST_PREDICTED
from slipstream.errors import ParameterError, RequestError, did_you_mean
from slipstream.server.api_error import ApiError, has_no_effect

COMPLETIONS, CHAT, RESPONSES, MESSAGES = ENDPOINTS = ("completions", "chat", "responses", "messages")
BOTH = (COMPLETIONS, CHAT)
CHATS = (CHAT, RESPONSES, MESSAGES)
REQUIRED = {COMPLETIONS: ["prompt"], CHAT: ["messages"], RESPONSES: ["input"], MESSAGES: ["messages", "max_tokens"]}
"""Endpoint -> fields that a request must have."""
SPECULATION = ("enabled", "draft_tokens", "rule")
"""Members of the field `speculation`."""
MOST_STOPS, LONGEST_STOP = 64, 1024
MOST_WORDS, LONGEST_WORD, MOST_STOP_IDS = 4096, 64, 4096
MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Field:
    """Declares a field of requests, and the endpoints that accept it (`where`). Endpoints share an entry if the field
    has the same name and meaning there.

    sampling  the field of `SamplingParams` that this field sets; "" if it sets none.
    refused   why the field is refused; "" if it is not refused.
    ignored   True if the field has no effect; the log says so once.
    unset     neutral values, besides null.
    schema    JSON schema, for /docs.
    most      largest number of entries of a list; longest: longest entry, in characters or ids. 0: no bound.
    """

    name: str
    text: str
    schema: Mapping[str, object] = field(default_factory=dict)
    where: tuple[str, ...] = ENDPOINTS
    sampling: str = ""
    refused: str = ""
    unset: tuple[object, ...] = ()
    ignored: bool = False
    most: int = 0
    longest: int = 0


_NUMBER, _INTEGER, _BOOLEAN, _STRING = ({"type": kind} for kind in ("number", "integer", "boolean", "string"))
_STRINGS = {"type": "array", "items": _STRING}
_IDS = {"type": "array", "items": _INTEGER}
_OBJECT = {"type": "object"}
_OBJECTS = {"type": "array", "items": _OBJECT}


def _declare(
    name: str, text: str, schema: Mapping[str, object], where: tuple[str, ...] = ENDPOINTS, **more: Any
) -> Field:
    return Field(name, text, schema, where, sampling=name, **more)


def _refuse(names: str, why: str, where: tuple[str, ...], unset: tuple[object, ...] = ()) -> list[Field]:
    return [Field(name, why, where=where, refused=why, unset=unset) for name in names.split()]


def _ignore(names: str, *where: str) -> list[Field]:
    return [Field(name, "Has no effect.", where=where, ignored=True) for name in names.split()]


_TEXT_OR_OBJECTS = {"anyOf": [_STRING, _OBJECTS]}
_STOP_SIZES: JsonObject = {"most": MOST_STOPS, "longest": LONGEST_STOP}
_STOPS = f"Up to {MOST_STOPS} texts, each of up to {LONGEST_STOP:,} characters; the text ends before them."

FIELDS = (
    Field("model", "Name of the model, as /v1/models lists it.", _STRING),
    Field("prompt", "Text, token ids, or a list of these.", {"anyOf": [_STRING, _STRINGS, _IDS]}, (COMPLETIONS,)),
    Field("messages", "The conversation: roles and texts, tool calls and their results.", _OBJECTS, (CHAT,)),
    Field("input", "Text, or items: messages, reasoning, function calls and their results.", _TEXT_OR_OBJECTS,
          (RESPONSES,)),
    Field("instructions", "The system message.", _STRING, (RESPONSES,)),
    Field("messages", "The conversation: text, thinking, tool use and tool results.", _OBJECTS, (MESSAGES,)),
    Field("system", "The system message: text, or blocks of text.", _TEXT_OR_OBJECTS, (MESSAGES,)),
    Field("stream", "Send server-sent events.", _BOOLEAN, unset=(False,)),
    Field("stream_options", "include_usage: one more chunk with the usage; continuous_usage_stats: with it, the usage "
          "so far in each chunk.", _OBJECT, BOTH),
    Field("stream_options", "include_obfuscation: false.", _OBJECT, (RESPONSES,),
          unset=({}, {"include_obfuscation": False})),
    Field("n", "Number of answers to a prompt; with a seed, answer j uses seed + j.", _INTEGER, BOTH, unset=(1,)),
    Field("echo", "Put the prompt before the text, and its logprobs if requested. Refused for "
          "encoder-decoders.", _BOOLEAN, (COMPLETIONS,), unset=(False,)),
    _declare("temperature", "0 is greedy. Default: the checkpoint's, else 1.", _NUMBER),
    _declare("top_k", "Sample only from the k most likely tokens; 0 or -1: all.", _INTEGER, unset=(-1,)),
    *(_declare(name, known.help, _NUMBER) for name, known in declared(SamplingParams).items()
      if known.effect in DISTRIBUTION and known.help and name not in ("temperature", "top_k", "min_tokens")),
    _declare("logit_bias", "Maps token ids to numbers from -100 to 100, which are added to their logits.", _OBJECT),
    _declare("bad_words", f"Up to {MOST_WORDS:,} texts or lists of token ids that may not appear, each of up to "
              f"{LONGEST_WORD} characters or ids.", {"type": "array"}, most=MOST_WORDS, longest=LONGEST_WORD),
    _declare("min_tokens", "Smallest number of tokens before the text may end.", _INTEGER),
    _declare(
        "max_tokens",
        "Largest number of output tokens. The default is 16; in chats, all that fit into the context.",
        _INTEGER,
        BOTH,
    ),
    Field("max_completion_tokens", "New name of max_tokens.", _INTEGER, BOTH, sampling="max_tokens"),
    Field("max_output_tokens", "Largest number of output tokens. Default: all that fit.", _INTEGER, (RESPONSES,)),
    Field("max_tokens", "Largest number of output tokens. Required.", _INTEGER, (MESSAGES,)),
    _declare("stop", _STOPS, {"anyOf": [_STRING, _STRINGS]}, (*BOTH, RESPONSES), **_STOP_SIZES),
    Field("stop_sequences", _STOPS, _STRINGS, (MESSAGES,), unset=([],), **_STOP_SIZES),
    _declare("stop_token_ids", f"Up to {MOST_STOP_IDS:,} ids that end the text.", _IDS, most=MOST_STOP_IDS),
    _declare("ignore_eos", "The model's end-of-text token does not end the text.", _BOOLEAN),
    _declare("seed", "Makes texts reproducible, with the rule `coupled` or with fixed draft lengths.", _INTEGER),
    Field("logprobs", f"Completions: number of alternatives, 0 to {MOST_TOP_LOGPROBS}. Chat: true or false.", {}, BOTH),
    Field("top_logprobs", f"Number of alternatives, 0 to {MOST_TOP_LOGPROBS}; needs logprobs.", _INTEGER, (CHAT,)),
    Field("response_format", "text, json_object or json_schema.", _OBJECT, BOTH, unset=({"type": "text"},)),
    Field("text", "format: text, json_object or json_schema.", _OBJECT, (RESPONSES,)),
    Field("output_config", "format: json_schema; effort: a variable of the chat template, if the template uses it.",
          _OBJECT, (MESSAGES,), unset=({},)),
    Field("tools", "Functions that the answer may call: name, description, parameters.", _OBJECTS, (CHAT,),
          unset=([],)),
    Field("tools", "Functions that the answer may call.", _OBJECTS, (RESPONSES,), unset=([],)),
    Field("tools", "Functions that the answer may use: name, description, input_schema.", _OBJECTS, (MESSAGES,),
          unset=([],)),
    Field("tool_choice", "none, auto, required, or a function.", {"type": ["string", "object"]}, (CHAT, RESPONSES)),
    Field("tool_choice", "auto, any, tool or none; disable_parallel_tool_use.", _OBJECT, (MESSAGES,)),
    Field("parallel_tool_calls", "Whether several calls are allowed; if false, calls after the first are dropped.",
          _BOOLEAN, (CHAT, RESPONSES), unset=(True,)),
    Field("chat_template_kwargs", "Variables of the model's chat template, such as enable_thinking.", _OBJECT,
          CHATS, unset=({},)),
    Field("reasoning_effort", "Variable reasoning_effort of the model's chat template.", _STRING, (CHAT,)),
    Field("reasoning", "effort: a variable of the chat template, if the template uses it.", _OBJECT, (RESPONSES,),
          unset=({},)),
    Field("structured_outputs", "One of json, regex, choice, grammar, json_object.", _OBJECT),
    Field("speculation", "enabled, draft_tokens (largest number per step), rule.", _OBJECT),
    Field("prediction", f"Text that the answer is expected to contain, up to {MOST_PREDICTED:,} characters: draft "
          "tokens are copied from it.", _OBJECT),
    Field("statistics", "Add the decoding statistics of each choice to the answer.", _BOOLEAN, BOTH, unset=(False,)),
    Field("thinking", "enabled or disabled: sets enable_thinking, if the model's chat template uses it.",
          _OBJECT, (MESSAGES,)),
    Field("metadata", "Has no effect.", _OBJECT),
    *_ignore("user safety_identifier prompt_cache_key prompt_cache_retention", *BOTH, RESPONSES),
    *_ignore("verbosity", CHAT),
    *_ignore("include client_metadata", RESPONSES),
    *_ignore("context_management", RESPONSES, MESSAGES),
    *_ignore("cache_control", MESSAGES),
    *_refuse("best_of", "the server does not rank choices: use n", (COMPLETIONS,), (1,)),
    *_refuse("suffix", "the model continues a text, and cannot fill gaps", (COMPLETIONS,), ("",)),
    *_refuse("use_beam_search", "the server has no beam search: use LLM.beam_search in Python", BOTH, (False,)),
    *_refuse("length_penalty", "the server has no beam search: use LLM.beam_search in Python", BOTH, (1,)),
    *_refuse("prompt_logprobs", "use echo with logprobs in /v1/completions", BOTH, (False,)),
    *_refuse("truncate_prompt_tokens", "the server does not truncate prompts: shorten the prompt", BOTH),
    *_refuse("add_special_tokens skip_special_tokens", "this cannot be changed", BOTH, (True,)),
    *_refuse("spaces_between_special_tokens", "this cannot be changed", BOTH, (True,)),
    *_refuse("include_stop_str_in_output", "texts always end before the stop string", BOTH, (False,)),
    *_refuse("allowed_token_ids", "use structured_outputs or logit_bias", BOTH),
    *_refuse("priority", "requests run in order of arrival", BOTH, (0,)),
    *_refuse("store", "the server stores nothing", (*BOTH, RESPONSES), (False,)),
    *_refuse("service_tier", "there is only one tier", (*BOTH, RESPONSES), ("auto", "default")),
    *_refuse("functions", "use tools", (CHAT,), ([],)),
    *_refuse("function_call", "use tool_choice", (CHAT,), ("none", "auto")),
    *_refuse("add_generation_prompt", "the server always adds the generation prompt", (CHAT,), (True,)),
    *_refuse("continue_final_message", "the answer is always a new message", (CHAT,), (False,)),
    *_refuse("chat_template", "the model's own template is used", (CHAT,)),
    *_refuse("modalities", "the model reads and writes only text", (CHAT,), (["text"],)),
    *_refuse("audio web_search_options", "the model reads and writes only text", (CHAT,)),
    *_refuse("previous_response_id conversation prompt", "the server stores nothing: send all input", (RESPONSES,)),
    *_refuse("background", "the server stores nothing", (RESPONSES,), (False,)),
    *_refuse("top_logprobs", "only chats have log-probabilities", (RESPONSES,), (0,)),
    *_refuse("truncation", "the server does not truncate prompts: shorten the input", (RESPONSES,), ("disabled",)),
    *_refuse("max_tool_calls", "the server does not run tools", (RESPONSES,)),
    *_refuse("service_tier", "there is only one tier", (MESSAGES,), ("auto", "standard_only")),
    *_refuse("container mcp_servers", "the server does not run tools", (MESSAGES,), ([],)),
    *_refuse("speed inference_geo", "there is only one engine", (MESSAGES,), ("standard",)),
)  # fmt: skip


def fields_of(where: str) -> dict[str, Field]:
    """Return name -> field, for the requests of an endpoint."""
    return {each.name: each for each in FIELDS if where in each.where}


def pass_on(given: Mapping[str, object], where: str, **names: str) -> JsonObject:
    """Return the given fields that a chat has too, under the chat's names. names: field -> differing name in a chat."""
    known, chat = fields_of(where), fields_of(CHAT)
    same = {name: name for name in given if known[name] is chat.get(name)} | names
    return {same[name]: value for name, value in given.items() if name in same}


def check_fields(body: Mapping[str, object], known: Mapping[str, Field]) -> JsonObject:
    """Return the fields that are set and have an effect. Raises ApiError 400 for an unknown or refused field."""
    given = {}
    for name, value in body.items():
        if name not in known:
            raise ApiError(
                400, f"{name!r} is not a field of this request; {did_you_mean(name, known)}", name, "unknown_field"
            )
        if value is None or any(_equals(value, each) for each in known[name].unset):
            continue
        if known[name].refused:
            raise ApiError(400, f"{name} is not supported: {known[name].refused}", name, "unsupported_field")
        if known[name].ignored:
            has_no_effect(f"the field {name}")
            continue
        _check_size(known[name], value)
        given[name] = value
    return given


def _check_size(field: Field, value: object) -> None:
    def refuse_more(size: int, most: int, what: str) -> None:
        if most and size > most:
            raise ApiError(400, f"{field.name} has {size:,} {what}, but at most {most:,} are allowed", field.name)

    entries = value if isinstance(value, list) else [value]
    refuse_more(len(entries), field.most, "entries")
    longest = max((len(each) for each in entries if isinstance(each, (str, list))), default=0) if field.longest else 0
    refuse_more(longest, field.longest, "characters or ids in one entry")


def _equals(value: object, other: object) -> bool:
    return bool(isinstance(value, bool) == isinstance(other, bool) and value == other)


def read_flag(given: Mapping[str, object], name: str) -> bool:
    """Read a field that is true or false; False if it is missing. Raises ApiError 400."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is {value!r}, must be true or false", name)
    return value


def read_count(given: Mapping[str, object], name: str, low: int, high: int, default: int) -> int:
    """Read a field that is an integer from `low` to `high`. Raises ApiError 400."""
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ApiError(400, f"{name} is {value!r}, must be an integer from {low} to {high}", name)
    return value


def read_members(given: Mapping[str, object], name: str, known: Iterable[str]) -> JsonObject:
    """Read a field that is an object with no members but `known`; leave out null members. Raises ApiError 400."""
    return read_object(given.get(name, {}), name, known)


def read_object(value: object, where: str, known: Iterable[str] | None = None) -> JsonObject:
    """Read an object with no members but `known` (None: any), and leave out null members. Raises ApiError 400 for other
    values. where: name of the value, for errors."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{where} is {value!r}, must be an object", where)
    for member in value:
        if known is not None and member not in known:
            raise ApiError(400, f"{where} has no member {member!r}; {did_you_mean(member, known)}", f"{where}.{member}")
    return {member: each for member, each in value.items() if each is not None}


def read_list(value: object, where: str) -> list[object]:
    """Read a list. Raises ApiError 400 for other values."""
    if not isinstance(value, list):
        raise ApiError(400, f"{where} is {value!r}, must be a list", where)
    return value


def read_sampling_params(
    given: Mapping[str, object], where: str, room: int, defaults: Mapping[str, object] | None = None
) -> SamplingParams:
    """Make the sampling parameters of a request. room: number of tokens that still fit into the context; defaults: the
    model's values for fields that the request does not set. Raises ApiError 400 with the field, or ParameterError."""
    checks, named = declared(SamplingParams), dict[str, str]()
    values: JsonObject = {"temperature": 1.0} | dict(defaults or {})
    for name, known in fields_of(where).items():
        if known.sampling and name in given:
            if known.sampling in named and given[name] != given[named[known.sampling]]:
                raise ApiError(400, f"{named[known.sampling]} and {name} contradict each other", name)
            named[known.sampling] = name
            try:
                values[known.sampling] = checks[known.sampling].check(name, _convert_json(known.sampling, given[name]))
            except ParameterError as fault:
                raise ApiError(400, str(fault), name) from fault
    longest = named.get("max_tokens")
    if longest is None:
        values["max_tokens"] = min(16, room) if where == COMPLETIONS else room
    elif values["max_tokens"] > room:
        raise ApiError(
            400,
            f"{longest} is {values['max_tokens']}, but the context has room for {room} more tokens after the prompt",
            longest,
            "context_length_exceeded",
        )
    values["logprobs"] = _read_logprobs(given, where)
    values["structured"] = _read_structured(given)
    speculation = read_members(given, "speculation", SPECULATION)
    if "draft_tokens" in speculation:
        read_count(speculation, "draft_tokens", 0, 256, 0)
        values["draft_tokens"] = speculation["draft_tokens"]
    if "enabled" in speculation and not read_flag(speculation, "enabled"):
        values["draft_tokens"] = 0
    return SamplingParams(**values)


def _convert_json(name: str, value: object) -> object:
    """Convert a JSON value for the field `name` of `SamplingParams`: keys of `logit_bias` become integers."""
    if name == "logit_bias" and isinstance(value, dict):
        try:
            return {int(key): bias for key, bias in value.items()}
        except ValueError as fault:
            raise ParameterError(f"logit_bias has the key {fault.args[0]!r}", fix="write token ids") from fault
    if isinstance(value, dict):  # the checks would read its keys as a list
        raise ParameterError(f"{name} is a JSON object", fix="give the value itself, or a list")
    if name == "max_tokens":
        check_integer(name, value, 1)
    return value


def _read_logprobs(given: Mapping[str, object], where: str) -> int | None:
    if where == COMPLETIONS:
        asked = given.get("logprobs")
        return None if asked is None or asked is False else read_count(given, "logprobs", 0, MOST_TOP_LOGPROBS, 0)
    if "top_logprobs" in given and not read_flag(given, "logprobs"):
        raise ApiError(400, "top_logprobs was given without logprobs: true", "top_logprobs")
    return read_count(given, "top_logprobs", 0, MOST_TOP_LOGPROBS, 0) if read_flag(given, "logprobs") else None


def read_text(content: object, where: str, param: str | None = None, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return text, or join parts of text of these `kinds`. Raises ApiError 400 about `param` (default: `where`)."""
    parts = [{"type": kinds[0], "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ApiError(400, f"{where} is {content!r}, must be text or a list of text parts", param or where)
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where} has a part of another type than {', '.join(kinds)}", param or where)
    return "".join(part["text"] for part in parts)


_STRUCTURES = {"json": "json_schema"} | {name: name for name in ("regex", "choice", "grammar", "json_object")}
"""Member of the field `structured_outputs` -> field of `Structured`."""


def _read_structured(given: Mapping[str, object]) -> Structured | None:
    name, asked = "structured_outputs", read_members(given, "structured_outputs", _STRUCTURES)
    given_as = {_STRUCTURES[member]: value for member, value in asked.items()}
    if "response_format" in given:
        if given_as:
            raise ApiError(400, f"response_format and {name} both request structured output", name)
        name, given_as = "response_format", _read_response_format(given)
    if not given_as:
        return None
    try:
        return Structured(**given_as)
    except RequestError as fault:
        raise ApiError(400, str(fault), name) from fault


def _read_response_format(given: Mapping[str, object]) -> JsonObject:
    name = "response_format"
    asked = read_members(given, name, ("type", "json_schema"))
    kind = asked.get("type")
    if kind == "json_schema":
        schema = read_members(asked, "json_schema", ("name", "description", "schema", "strict"))
        if "schema" not in schema:
            raise ApiError(400, f"{name}.json_schema has no schema", name)
        return {"json_schema": schema["schema"]}
    if kind not in ("json_object", "text"):
        raise ApiError(400, f"{name}.type is {kind!r}, must be text, json_object or json_schema", name)
    return {} if kind == "text" else {"json_object": True}


def describe_body(known: Mapping[str, Field], required: list[str]) -> JsonObject:
    """Return OpenAPI's description of a request body with the fields `known`."""
    properties = {each.name: {**each.schema, "description": each.text} for each in known.values() if not each.refused}
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
