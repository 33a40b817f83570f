"""How models write calls of tools: `FORMATS`, each with the coroutine that reads it and the grammar that enforces it.

A grammar is for `strict` tools where the model decides whether it calls: the text around the calls is free (see
`Trigger`), and their arguments meet their schemas. What a reader reads as a call has to begin with a trigger of the
grammar: else a model could call past the schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.core.structured import Structured, Trigger
from slipstream.server.reply import CONTENT
from slipstream.server.reply_reader import Reading, ReplyReader, plain
from slipstream.server.tools import SPACING, call_schema, calls_schema

SPACE = "SPACE: /[ \\t\\r\\n]{1,4}/"
"""Not more: small models go on with white space without end."""


@dataclass(frozen=True)
class Calls:
    """schemas   function -> JSON schema of its arguments.
    parallel   whether there may be several calls.
    special    marker -> its id, for those that are special tokens.
    reasoning  as of `Trigger`.
    """

    schemas: Mapping[str, Any]
    parallel: bool = True
    special: Mapping[str, int] | None = None
    reasoning: Seq[str] | None = None

    def marker(self, text: str) -> str:
        """A marker as a symbol of the grammar: written out, or as the one token."""
        token = (self.special or {}).get(text)
        return json.dumps(text) if token is None else f"({json.dumps(text)} | <[{token}]>)"

    def call(self, arguments: str) -> str:
        """{"name": ..., arguments: ...} as a symbol."""
        call, shared = call_schema(self.schemas, arguments)
        return _schema(call | {"$defs": shared, **SPACING})

    def array(self, arguments: str) -> str:
        return _schema(calls_schema(self.schemas, arguments, self.parallel))

    def form(self, rules: Seq[str], *triggers: str, first: bool = False) -> Structured:
        """Text with calls of these rules, which begin with a trigger."""
        trigger = Trigger(triggers, first, self.parallel and not first, self.reasoning)
        return Structured(grammar="\n".join([*rules, SPACE]), trigger=trigger)


def _schema(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"


@dataclass(frozen=True)
class ToolFormat:
    """How models of one kind write calls.

    read     the coroutine that reads content and calls.
    markers  texts that begin or end calls; they are kept where they are special tokens.
    signs    a chat template that holds all of these asks for this format.
    id_length  of the ids of calls, if templates of the kind check it.
    strict   writes the form of a text whose calls meet their schemas.
    """

    name: str
    read: Callable[[ReplyReader], Reading]
    markers: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    id_length: int = 0
    strict: Callable[[Calls], Structured] | None = None


def _hermes(reader: ReplyReader) -> Reading:
    while marker := (yield from reader.until("<tool_call>", CONTENT)):
        if (yield from reader.attempt(reader.member_call, marker)):
            yield from reader.pass_over("</tool_call>")
    return ""


def _hermes_calls(calls: Calls) -> Structured:
    """<tool_call>{"name": ..., "arguments": ...}</tool_call>, anywhere."""
    start = f'start: "<tool_call>" SPACE? call SPACE? {calls.marker("</tool_call>")}'
    return calls.form([start, f"call: {calls.call('arguments')}"], "<tool_call>")


def _llama(reader: ReplyReader) -> Reading:
    yield from reader.pass_over("<|python_tag|>")
    while (yield from reader.ahead()) == "{":
        if not (yield from reader.attempt(reader.member_call, "")):
            break
        yield from reader.pass_over(";")
    return (yield from plain(reader))


def _llama_calls(calls: Calls) -> Structured:
    """{"name": ..., "parameters": ...} at the beginning, perhaps after <|python_tag|>, and more of them after ";". A
    text that begins with a brace is a call, because it is read as one."""
    more = '(SPACE? ";" SPACE? call)*' if calls.parallel else ""
    start = f'start: ("<|python_tag|>" SPACE?)? call {more}'
    return calls.form([start, f"call: {calls.call('parameters')}"], "{", "<|python_tag|>", first=True)


def _mistral(reader: ReplyReader) -> Reading:
    while marker := (yield from reader.until("[TOOL_CALLS]", CONTENT)):
        if (yield from reader.ahead()) == "[":
            yield from reader.array(marker)
        else:
            yield from reader.attempt(reader.named_call, marker)
    return ""


def _mistral_calls(calls: Calls) -> Structured:
    """[TOOL_CALLS][{"name": ..., "arguments": ...}, ...], or [TOOL_CALLS]NAME[ARGS]{...}, anywhere."""
    called = f"({calls.marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? {calls.marker('[ARGS]')}? SPACE?"
    named = [f"{json.dumps(name)} {called} {_schema(SPACING | schema)}" for name, schema in calls.schemas.items()]
    start = 'start: "[TOOL_CALLS]" SPACE? (array | named)'
    return calls.form([start, f"array: {calls.array('arguments')}", f"named: {' | '.join(named)}"], "[TOOL_CALLS]")


def _required(reader: ReplyReader) -> Reading:
    if (yield from reader.ahead()) == "[":
        yield from reader.array("")
    return (yield from plain(reader))


def _named(reader: ReplyReader) -> Reading:
    (name,) = reader.functions
    yield from reader.attempt(lambda: reader.arguments(name), "")
    return (yield from plain(reader))


FORMATS = (
    ToolFormat("hermes", _hermes, ("<tool_call>", "</tool_call>"), ("<tool_call>",), strict=_hermes_calls),
    ToolFormat("mistral", _mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("[TOOL_CALLS]",), 9, _mistral_calls),
    ToolFormat("llama", _llama, ("<|python_tag|>",), ("ipython", '"parameters"'), strict=_llama_calls),
)
"""What models write of their own accord. The first whose signs are in the chat template is taken."""

FORCED = {"required": _required, "named": _named}
"""What a grammar makes them write, by the choice of a `ToolUse`: an array of calls, or arguments of one function."""
