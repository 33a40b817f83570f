"""`ReplyFormat`: how the model of a server writes reasoning and calls of tools. `FORMATS`: how models write calls, each
with the coroutine that reads it and the grammar that enforces it.

A grammar is for `strict` tools where the model decides whether it calls: the text around the calls is free (see
`Trigger`), and their arguments meet their schemas. What is read as a call has to begin with a trigger of the
grammar: else a model could call past the schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.core.structured import Structured, Trigger
from slipstream.errors import ParameterError, did_you_mean
from slipstream.models.text import special_tokens
from slipstream.server.reply import CONTENT, Reading, Reply, plain
from slipstream.server.tools import SPACING, ToolUse, call_schema, calls_schema

AUTO, NONE = "auto", "none"
THINK = ("<think>", "</think>")
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
    parallel: bool
    special: Mapping[str, int]
    reasoning: Seq[str] | None

    def marker(self, text: str) -> str:
        """A marker as a symbol of the grammar: written out, or as the one token."""
        token = self.special.get(text)
        return json.dumps(text) if token is None else f"({json.dumps(text)} | <[{token}]>)"

    def call(self, arguments: str) -> str:
        """{"name": ..., arguments: ...} as a symbol."""
        call, shared = call_schema(self.schemas, arguments)
        return _schema(call | {"$defs": shared, **SPACING})

    def array(self, arguments: str) -> str:
        return _schema(calls_schema(self.schemas, arguments, self.parallel))

    def grammar(self, rules: Seq[str], *triggers: str, first: bool = False) -> Structured:
        """Text with calls of these rules, which begin with a trigger."""
        trigger = Trigger(triggers, first, self.parallel and not first, self.reasoning)
        return Structured(grammar="\n".join([*rules, SPACE]), trigger=trigger)


def _schema(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"


@dataclass(frozen=True)
class ToolFormat:
    """How models of one kind write calls.

    read     the coroutine that reads content and calls.
    strict   writes the form of a text whose calls meet their schemas.
    markers  texts that begin or end calls; they are kept where they are special tokens.
    signs    a chat template that holds all of these asks for this format.
    id_length  of the ids of calls, if templates of the kind check it.
    """

    name: str
    read: Callable[[Reply], Reading]
    strict: Callable[[Calls], Structured]
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    id_length: int = 0


def _hermes(reply: Reply) -> Reading:
    while marker := (yield from reply.until("<tool_call>", CONTENT)):
        if (yield from reply.attempt(reply.member_call, marker)):
            yield from reply.pass_over("</tool_call>")
    return ""


def _hermes_calls(calls: Calls) -> Structured:
    """<tool_call>{"name": ..., "arguments": ...}</tool_call>, anywhere."""
    start = f'start: "<tool_call>" SPACE? call SPACE? {calls.marker("</tool_call>")}'
    return calls.grammar([start, f"call: {calls.call('arguments')}"], "<tool_call>")


def _llama(reply: Reply) -> Reading:
    yield from reply.pass_over("<|python_tag|>")
    while (yield from reply.ahead()) == "{":
        if not (yield from reply.attempt(reply.member_call, "")):
            break
        yield from reply.pass_over(";")
    return (yield from plain(reply))


def _llama_calls(calls: Calls) -> Structured:
    """{"name": ..., "parameters": ...} at the beginning, perhaps after <|python_tag|>, and more of them after ";". A
    text that begins with a brace is a call, because it is read as one."""
    more = '(SPACE? ";" SPACE? call)*' if calls.parallel else ""
    start = f'start: ("<|python_tag|>" SPACE?)? call {more}'
    return calls.grammar([start, f"call: {calls.call('parameters')}"], "{", "<|python_tag|>", first=True)


def _mistral(reply: Reply) -> Reading:
    while marker := (yield from reply.until("[TOOL_CALLS]", CONTENT)):
        if (yield from reply.ahead()) == "[":
            yield from reply.array(marker)
        else:
            yield from reply.attempt(reply.named_call, marker)
    return ""


def _mistral_calls(calls: Calls) -> Structured:
    """[TOOL_CALLS][{"name": ..., "arguments": ...}, ...], or [TOOL_CALLS]NAME[ARGS]{...}, anywhere."""
    called = f"({calls.marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? {calls.marker('[ARGS]')}? SPACE?"
    named = [f"{json.dumps(name)} {called} {_schema(SPACING | schema)}" for name, schema in calls.schemas.items()]
    start = 'start: "[TOOL_CALLS]" SPACE? (array | named)'
    return calls.grammar([start, f"array: {calls.array('arguments')}", f"named: {' | '.join(named)}"], "[TOOL_CALLS]")


def _required(reply: Reply) -> Reading:
    if (yield from reply.ahead()) == "[":
        yield from reply.array("")
    return (yield from plain(reply))


def _named(reply: Reply) -> Reading:
    (name,) = reply.functions
    yield from reply.attempt(lambda: reply.arguments(name), "")
    return (yield from plain(reply))


FORMATS = (
    ToolFormat("hermes", _hermes, _hermes_calls, ("<tool_call>", "</tool_call>"), ("<tool_call>",)),
    ToolFormat("mistral", _mistral, _mistral_calls, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("[TOOL_CALLS]",), 9),
    ToolFormat("llama", _llama, _llama_calls, ("<|python_tag|>",), ("ipython", '"parameters"')),
)
"""What models write of their own accord. The first whose signs are in the chat template is taken."""

FORCED = {"required": _required, "named": _named}
"""What a grammar makes them write, by the choice of a `ToolUse`: an array of calls, or arguments of one function."""


@dataclass(frozen=True)
class ReplyFormat:
    """calls     how the model writes calls; None if that is not known.
    reasoning  what it writes before and after its reasoning, None if it writes none.
    certain   whether every answer begins with reasoning, unless the prompt has ended it.
    """

    calls: ToolFormat | None = None
    reasoning: tuple[str, str] | None = None
    certain: bool = False

    @staticmethod
    def of(tokenizer: Any, calls: str = AUTO, reasoning: str = AUTO) -> ReplyFormat:
        """From what the checkpoint declares.

        calls      name of one of `FORMATS`, "none", or "auto": by what the chat template holds.
        reasoning  two markers with a space between, "none", or "auto": <think> and </think> if the chat template holds
                   the latter.

        Raises ParameterError for other values.
        """
        template = None if tokenizer is None else tokenizer.chat_template
        texts = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
        known = {each.name: each for each in FORMATS}
        if calls not in (AUTO, NONE, *known):
            raise ParameterError(
                f"the format of tool calls is {calls!r}", fix=did_you_mean(calls, (AUTO, NONE, *known))
            )
        written = known.get(calls)
        if calls == AUTO:
            written = next((each for each in FORMATS if all(sign in texts for sign in each.signs)), None)
        if reasoning == AUTO:
            return ReplyFormat(written, THINK if THINK[1] in texts else None)
        if reasoning == NONE:
            return ReplyFormat(written)
        markers = tuple(reasoning.split())
        if len(markers) != 2:
            raise ParameterError(
                f"the markers of reasoning are {reasoning!r}", fix="write two with a space between, or none, or auto"
            )
        return ReplyFormat(written, (markers[0], markers[1]), True)

    @property
    def markers(self) -> tuple[str, ...]:
        """The special tokens that a reply must see."""
        return (*(self.calls.markers if self.calls else ()), *(self.reasoning or ()))

    def end_of_reasoning(self, prompt: str) -> str | None:
        """What ends the reasoning with which the answer to this prompt begins; None if it does not begin so."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning[1]):
            return None
        return self.reasoning[1] if self.certain or self._inside(prompt) else None

    def _inside(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def strict_calls(self, prompt: str, use: ToolUse, tokenizer: Any) -> Structured:
        """The form of an answer to this prompt that may call, in which the arguments of strict functions meet their
        schemas."""
        assert self.calls is not None, "tools are refused where the format of calls is not known"
        reasoning = self.reasoning and ("" if self._inside(prompt) else self.reasoning[0], self.reasoning[1])
        names = {text: token for token, text in special_tokens(tokenizer).items()}
        special = {text: names[text] for text in self.calls.markers if text in names}
        return self.calls.strict(Calls(use.schemas, use.parallel, special, reasoning))

    def reply(self, prompt: str, use: ToolUse) -> Reply:
        """A reply to this prompt, of which nothing was said yet."""
        read = FORCED.get(use.choice) or (self.calls.read if use.tools and self.calls is not None else None)
        length = 0 if self.calls is None else self.calls.id_length
        return Reply(use.functions, read, self.reasoning, self._inside(prompt), None if use.parallel else 1, length)
