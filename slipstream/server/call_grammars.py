"""Grammars of the calls that models write of their own accord, with arguments that meet their schemas: `strict` tools
where the model decides whether it calls. The text around the calls is free (see `Trigger`).

What `ReplyReader` reads as a call has to begin with a trigger here: else a model could call past the schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.core.structured import Structured, Trigger
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
        """An array of these."""
        return _schema(calls_schema(self.schemas, arguments, self.parallel))

    def form(self, rules: Seq[str], *triggers: str, first: bool = False) -> Structured:
        """Text with calls of these rules, which begin with a trigger."""
        trigger = Trigger(triggers, first, self.parallel and not first, self.reasoning)
        return Structured(grammar="\n".join([*rules, SPACE]), trigger=trigger)


Form = Callable[[Calls], Structured]
"""Writes the form of texts with such calls."""


def hermes(calls: Calls) -> Structured:
    """<tool_call>{"name": ..., "arguments": ...}</tool_call>, anywhere."""
    start = f'start: "<tool_call>" SPACE? call SPACE? {calls.marker("</tool_call>")}'
    return calls.form([start, f"call: {calls.call('arguments')}"], "<tool_call>")


def llama(calls: Calls) -> Structured:
    """{"name": ..., "parameters": ...} at the beginning, perhaps after <|python_tag|>, and more of them after ";". A
    text that begins with a brace is a call, because it is read as one."""
    more = '(SPACE? ";" SPACE? call)*' if calls.parallel else ""
    start = f'start: ("<|python_tag|>" SPACE?)? call {more}'
    return calls.form([start, f"call: {calls.call('parameters')}"], "{", "<|python_tag|>", first=True)


def mistral(calls: Calls) -> Structured:
    """[TOOL_CALLS][{"name": ..., "arguments": ...}, ...], or [TOOL_CALLS]NAME[ARGS]{...}, anywhere."""
    called = f"({calls.marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? {calls.marker('[ARGS]')}? SPACE?"
    named = [f"{json.dumps(name)} {called} {_schema(SPACING | schema)}" for name, schema in calls.schemas.items()]
    start = 'start: "[TOOL_CALLS]" SPACE? (array | named)'
    return calls.form([start, f"array: {calls.array('arguments')}", f"named: {' | '.join(named)}"], "[TOOL_CALLS]")


def _schema(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"
