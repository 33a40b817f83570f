"""`FORMATS`: the formats in which models write tool calls. Each format has a coroutine that reads calls, and a grammar.

The grammar is used for `strict` tools when the model decides whether to call a tool: the text around the calls is free
(see `Trigger`), and the arguments of each call meet their schema. Each text that is read as a call must begin with a
trigger of the grammar; otherwise a model could make calls that no schema checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial

from slipstream.core.strict import JsonMapping
from slipstream.core.structured import Structured, Trigger
from slipstream.server.call_arguments import Pairs, gemma_arguments, json_symbol, python_arguments
from slipstream.server.reply import CALL_ID, CONTENT, MOST_NAME, REASONING, NoCall, Reading, Reply, plain
from slipstream.server.tools import call_schema, calls_schema

SPACE = "SPACE: /[ \\t\\r\\n]{1,5}/"
"""White space of at most five characters (a line break and four spaces): small models may repeat spaces endlessly."""


@dataclass(frozen=True)
class Calls:
    """Describes the calls that a grammar allows.

    schemas    function -> JSON schema of its arguments.
    parallel   True if there may be several calls.
    special    special token -> its id, for tokens that occur in calls.
    reasoning  see `Trigger`.
    """

    schemas: JsonMapping
    parallel: bool
    special: Mapping[str, int]
    reasoning: Seq[str] | None

    def symbol(self, text: str) -> str:
        """Write a text in the grammar. Special tokens in the text may also be spelled with ordinary tokens."""
        parts = re.split(f"({'|'.join(map(re.escape, self.special)) or '$^'})", text)
        ids = [(json.dumps(part), self.special.get(part)) for part in parts if part]
        return " ".join(literal if token is None else f"({literal} | <[{token}]>)" for literal, token in ids)

    def grammar(self, rules: Seq[str], *triggers: str, first: bool = False) -> Structured:
        """Return the structured output of a text with calls: `rules` describe a call, which begins with a trigger."""
        trigger = Trigger(triggers, first, self.parallel and not first, self.reasoning)
        return Structured(grammar="\n".join([*rules, SPACE]), trigger=trigger)


@dataclass(frozen=True)
class ToolFormat:
    """Says how models of one kind write calls: one of the texts in `begin`, one or more calls, `end`. In this class a
    call is {"name": ..., "arguments": {...}}; subclasses read and write calls differently.

    begin      texts that begin calls. `opening` is among them if models may leave out the text before the first call.
    opening    text that begins each call; separator: text between two calls.
    listed     the calls are a list in brackets.
    first      an answer that begins with this character is a call even without `begin`; other answers are text.
    arguments  key of the arguments; name_key: key of the name; id_key: key of an id that may come first.
    signs      texts in a chat template that describes this format, but writes no calls itself.
    call_id    pattern of the ids of calls: see `Reply`.
    lead       texts before an answer that do not belong to it; trail: texts after it that do not belong to it.
    final      text that begins the answer itself, in a format that puts reasoning before the answer.
    """

    name: str
    begin: tuple[str, ...]
    end: str = ""
    opening: str = ""
    separator: str = ""
    listed: bool = False
    first: str = ""
    arguments: str = "arguments"
    name_key: str = "name"
    id_key: str = ""
    call_id: str = CALL_ID
    signs: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()
    trail: tuple[str, ...] = ()
    final: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts around calls and their parts; special tokens in them are kept."""
        return (*self.begin, self.end, self.opening, *self.lead, *self.trail)

    def read(self, reply: Reply) -> Reading:
        """Read content and calls."""
        if self.first:
            for begin in self.begin:
                yield from reply.pass_over(begin)
            if (yield from reply.ahead()) == self.first:
                yield from self.calls(reply, "")
            return (yield from plain(reply))
        for text in self.lead:
            yield from reply.pass_over(text)
        while marker := (yield from reply.until(CONTENT, *self.begin, *self.trail)):
            if marker.strip() not in self.trail:
                yield from self.calls(reply, marker)
        return ""

    def calls(self, reply: Reply, before: str) -> Reading:
        """Read one or more calls. before: the text that begins them, which was read already."""

        def begin_list() -> Reading:
            if self.listed:
                yield from reply.expect("[")
            if self.opening and before.strip() != self.opening:
                yield from reply.expect(self.opening)
            return (yield from self.call(reply))

        more = yield from reply.attempt(begin_list, before)
        between = self.separator or self.opening
        while more and between and (yield from reply.pass_over(between)):
            more = yield from reply.attempt(partial(self.call, reply), self.opening)
        for end in ("]" if self.listed else "", self.end):
            if more and end:
                yield from reply.pass_over(end)
        return ""

    def call(self, reply: Reply) -> Reading:
        """Read one call, after `opening`. Raises NoCall."""
        return (yield from reply.member_call(self.name_key))

    def strict(self, calls: Calls) -> Structured:
        """Return the structured output of a text whose calls meet their schemas."""
        between = f"SPACE? {calls.symbol(self.separator)} SPACE?" if self.separator else "SPACE?"
        row = f"call ({between} call)*" if calls.parallel and (self.separator or self.opening) else "call"
        row = f'"[" SPACE? {row} SPACE? "]"' if self.listed else row
        end = f"SPACE? {calls.symbol(self.end)}" if self.end else ""
        starts = [row] if self.first else []
        starts += [f"{json.dumps(text)} SPACE? {row} {end}" for text in self.begin if text != self.opening]
        starts += ["call"] if self.opening in self.begin else []
        triggers = (*self.begin, self.first) if self.first else self.begin
        return calls.grammar([f"start: {' | '.join(starts)}", *self.rules(calls)], *triggers, first=bool(self.first))

    def rules(self, calls: Calls) -> list[str]:
        """Return the grammar rules of a call, which includes `opening`."""
        call, shared = call_schema(calls.schemas, self.arguments, self.name_key, self.id_key)
        return [f"call: {json_symbol(call | {'$defs': shared})}"]


LIST = ToolFormat("list", (), separator=",", listed=True, first="[")


@dataclass(frozen=True)
class NamedFormat(ToolFormat):
    """A format whose calls are `opening`, the name, `between`, the arguments (as a JSON object, or as `pairs`) and
    `close`. With `numbered`, the name is written functions.NAME:NUMBER."""

    between: str = ""
    close: str = ""
    pairs: Pairs | None = None
    numbered: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        pairs = self.pairs
        inner = () if pairs is None else (pairs.before, *pairs.text[0], pairs.text[1], *pairs.other[0], pairs.other[1])
        return (*super().markers, self.between, self.close, *inner)

    def call(self, reply: Reply) -> Reading:
        ends = (self.between,) if self.between or self.pairs is None else (self.pairs.before, self.end)
        name, end = yield from reply.text(*ends, most=MOST_NAME)
        if end != self.between:
            reply.unread(end)
        name = re.sub(r"^functions\.|:\d+$", "", name.strip()) if self.numbered else name.strip()
        if name not in reply.functions:
            raise NoCall
        yield from self.values(reply, name)
        return (yield from reply.pass_over(self.close)) if self.close else ""

    def values(self, reply: Reply, name: str) -> Reading:
        """Report the call, and read its arguments."""
        return (yield from reply.arguments(name) if self.pairs is None else self.pairs.read(reply, name))

    def rules(self, calls: Calls) -> list[str]:
        symbol, more = calls.symbol, list[str]()
        for i, (name, schema) in enumerate(calls.schemas.items()):
            values = (
                self.pairs.rules(f"a{i}", schema, symbol) if self.pairs else [f"a{i}: SPACE? {json_symbol(schema)}"]
            )
            written = json.dumps(f"functions.{name}:") + " /[0-9]{1,4}/" if self.numbered else json.dumps(name)
            begin = f"{symbol(self.opening)} {written} SPACE? {symbol(self.between)}"
            parts = [begin, f"a{i} SPACE?", symbol(self.close)]
            more += [f"f{i}: {' '.join(parts)}", *values]
        return [f"call: {' | '.join(f'f{i}' for i in range(len(calls.schemas)))}", *more]


class PythonFormat(NamedFormat):
    """A format whose calls are NAME(a=1, b='c')."""

    def values(self, reply: Reply, name: str) -> Reading:
        reply.unread(self.between)
        arguments = python_arguments((yield from reply.value()))
        reply.start(name)
        reply.write(arguments)
        return arguments


class GemmaFormat(NamedFormat):
    """A format whose calls are NAME{a:1,b:<|"|>c<|"|>}."""

    def values(self, reply: Reply, name: str) -> Reading:
        text, end = yield from reply.text(self.end)
        reply.unread(end)
        assert self.pairs is not None
        arguments = gemma_arguments("{" + text, self.pairs.text[1])
        reply.start(name)
        reply.write(arguments)
        return text


class MistralFormat(NamedFormat):
    """A format with an array of calls, or one call NAME[ARGS]{...}; [CALL_ID] and an id may stand before [ARGS]."""

    def calls(self, reply: Reply, before: str) -> Reading:
        as_list = (yield from reply.ahead()) == "["
        return (yield from LIST.calls(reply, before) if as_list else super().calls(reply, before))

    def call(self, reply: Reply) -> Reading:
        text, end = yield from reply.text("{", most=MOST_NAME)
        reply.unread(end)
        return (yield from reply.arguments(text.split("[")[0].strip()))

    def strict(self, calls: Calls) -> Structured:
        named = f"({calls.symbol('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? {calls.symbol('[ARGS]')}? SPACE?"
        each = [f"{json.dumps(name)} {named} {json_symbol(schema)}" for name, schema in calls.schemas.items()]
        start = f"start: {json.dumps(self.begin[0])} SPACE? (array | named)"
        array = f"array: {json_symbol(calls_schema(calls.schemas, 'arguments', calls.parallel))}"
        return calls.grammar([start, array, f"named: {' | '.join(each)}"], *self.begin)


class HarmonyFormat(ToolFormat):
    """Messages in channels, as gpt-oss writes them: a header, <|message|>, a text, an end token. The header names the
    channel ("analysis" is the reasoning) and, in a call, the function."""

    @property
    def markers(self) -> tuple[str, ...]:
        return ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", self.end)

    def read(self, reply: Reply, answer: Callable[[Reply], Reading] | None = None) -> Reading:
        """Read all messages. answer: coroutine that reads the text of the final channel; None: the text is content."""
        while True:
            reply.begin()
            try:
                header, _ = yield from reply.text("<|message|>", most=MOST_NAME)
            except NoCall:
                reply.unread(reply.raw)
                return (yield from plain(reply))
            called = _RECIPIENT.search(header)
            if called and (yield from reply.attempt(partial(reply.arguments, called[1]), "")):
                yield from reply.pass_over(self.end)
                continue
            if answer is not None and "final" in header:
                return (yield from answer(reply))
            kind = REASONING if "analysis" in header else CONTENT
            if not (yield from reply.until(kind, "<|end|>", self.end)):
                return ""

    def strict(self, calls: Calls) -> Structured:
        json_is = f'(" json" | " "? {calls.symbol("<|constrain|>")} "json")?'
        header = f'({calls.symbol("<|channel|>")} "commentary")? {json_is} {calls.symbol("<|message|>")}'
        each = [f"{json.dumps(name)} head {json_symbol(schema)}" for name, schema in calls.schemas.items()]
        start = f"start: {json.dumps(self.begin[0])} ({' | '.join(each)}) SPACE? {calls.symbol(self.end)}"
        return calls.grammar([start, f"head: {header}"], *self.begin)


_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def _read_named(reply: Reply) -> Reading:
    (name,) = reply.functions
    yield from reply.attempt(lambda: reply.arguments(name), "")
    return (yield from plain(reply))


def _elements(key: str, after: str, end: str, lines: bool = False) -> Pairs:
    return Pairs(key, ((after,), end), ((after,), end), lines)


def _glm(mark: str = "") -> Pairs:
    value = tuple(f"</arg_key{mark}>{line}<arg_value{mark}>" for line in ("\n", "")), f"</arg_value{mark}>"
    return Pairs(f"<arg_key{mark}>", value, value)


_DSML = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
_DSML_PAIRS = Pairs(_DSML[0], (('" string="true">',), _DSML[1]), (('" string="false">',), _DSML[1]))
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_QWEN = _elements("<parameter=", ">", "</parameter>", lines=True)

FORMATS: tuple[ToolFormat, ...] = (
    HarmonyFormat("harmony", ("to=functions.",), "<|call|>", final="<|channel|>final<|message|>"),
    NamedFormat("seed", ("<seed:tool_call>",), "</seed:tool_call>", "<function=", signs=("<seed:tool_call>",),
                between=">", close="</function>", pairs=_elements("<parameter=", ">", "</parameter>")),
    NamedFormat("qwen", ("<tool_call>", "<function="), "</tool_call>", "<function=",
                signs=("<function=", "<parameter="), between=">", close="</function>", pairs=_QWEN),
    *(NamedFormat(f"hunyuan-v3{name}", (f"<tool_calls{mark}>",), f"</tool_calls{mark}>", f"<tool_call{mark}>",
                  signs=(f"<tool_sep{mark}>",), between=f"<tool_sep{mark}>", close=f"</tool_call{mark}>",
                  pairs=_glm(mark))
      for name, mark in (("", ""), ("-opensource", ":opensource"))),
    ToolFormat("hunyuan", ("<tool_calls>",), "</tool_calls>", separator=",", listed=True, signs=("<tool_calls>",),
               lead=("助手：",)),
    NamedFormat("glm", ("<tool_call>",), "</tool_call>", signs=("<arg_key>",), pairs=_glm()),
    NamedFormat("minimax", ("<minimax:tool_call>",), "</minimax:tool_call>", signs=("<minimax:tool_call>",),
                opening='<invoke name="', between='">', close="</invoke>",
                pairs=_elements('<parameter name="', '">', "</parameter>")),
    *(NamedFormat(f"deepseek-{name}", (f"<｜DSML｜{calls}>",), f"</｜DSML｜{calls}>", '<｜DSML｜invoke name="',
                  signs=(f"<｜DSML｜{calls}>",), between='">', close="</｜DSML｜invoke>", pairs=_DSML_PAIRS)
      for name, calls in (("v3.2", "function_calls"), ("v4", "tool_calls"))),
    NamedFormat("deepseek", _DEEPSEEK[:1], "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                signs=(_DEEPSEEK[0], "```json"), between="```json", close="```<｜tool▁call▁end｜>"),
    NamedFormat("deepseek-v3.1", _DEEPSEEK, "<｜tool▁calls▁end｜>", _DEEPSEEK[1], signs=_DEEPSEEK[:1],
                between="<｜tool▁sep｜>", close="<｜tool▁call▁end｜>"),
    NamedFormat("kimi", ("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                signs=("<|im_system|>tool_declare",), between="<|tool_call_argument_begin|>", close="<|tool_call_end|>",
                numbered=True, call_id="functions.{name}:{number}"),
    ToolFormat("cohere", ("<|START_ACTION|>",), "<|END_ACTION|>", separator=",", listed=True, arguments="parameters",
               name_key="tool_name", id_key="tool_call_id", signs=("<|START_ACTION|>",),
               lead=("<|START_RESPONSE|>", "<|START_TEXT|>"), trail=("<|END_RESPONSE|>", "<|END_TEXT|>")),
    ToolFormat("command-r", ("Action:\n```json", "Action: ```json", "Action:\n\n```json"), "```", separator=",",
               listed=True, arguments="parameters", name_key="tool_name", signs=("Action:", "tool_name")),
    GemmaFormat("gemma", ("<|tool_call>call:",), "<tool_call|>", signs=("<|tool_call>",), between="{", close="}",
                pairs=Pairs("", ((':<|"|>',), '<|"|>'), ((":",), ""), separator=",", sorts=True)),
    PythonFormat("lfm2", ("<|tool_call_start|>",), "<|tool_call_end|>", separator=",", listed=True, between="(",
                 close=")", signs=("<|tool_list_start|>",), pairs=Pairs("", ((), ""), (("=",), ""), separator=",")),
    PythonFormat("pythonic", ("<|python_start|>",), "<|python_end|>", separator=",", listed=True, first="[",
                 between="(", close=")", pairs=Pairs("", ((), ""), (("=",), ""), separator=",")),
    ToolFormat("granite", ("<|tool_call|>",), separator=",", listed=True, signs=("<|tool_call|>",)),
    ToolFormat("nemotron", ("<TOOLCALL>",), "</TOOLCALL>", separator=",", listed=True, signs=("<TOOLCALL>",)),
    MistralFormat("mistral", ("[TOOL_CALLS]",), signs=("[TOOL_CALLS]",), between="[ARGS]", close="[CALL_ID]",
                  call_id="{drawn:.9}"),
    ToolFormat("llama", ("<|python_tag|>",), separator=";", first="{", arguments="parameters",
               signs=("ipython", '"parameters"')),
    ToolFormat("hermes", ("<tool_call>",), "</tool_call>", signs=("<tool_call>",)),
)  # fmt: skip
"""Formats in which models write calls. A format whose `signs` contain another's comes first."""

FORCED: dict[str, Callable[[Reply], Reading]] = {"required": LIST.read, "named": _read_named}
"""`choice` of a `ToolUse` -> reads the call that a grammar forces: an array of calls, or one function's arguments."""
