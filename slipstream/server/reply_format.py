"""`ReplyFormat`: how the model of a server writes reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from slipstream.core.strict import JsonObject
from slipstream.core.structured import Structured
from slipstream.engine.request_checks import RequestChecks
from slipstream.errors import ParameterError, PromptError, did_you_mean
from slipstream.server.call_formats import FORCED, FORMATS, Calls, HarmonyFormat, ToolFormat
from slipstream.server.reply import NoCall, Reply, decode_json
from slipstream.server.tools import ToolUse
from slipstream.tokens.text import special_tokens
from slipstream.tokens.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
THINK = ("<think>", "</think>")
REASONING = (
    THINK, ("<|channel>thought", "<channel|>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("<think:opensource>", "</think:opensource>"),
)  # fmt: skip
"""(begin, end) markers of reasoning. The pair whose end marker occurs in the chat template is used."""

_ASKED, _SAID, _NAMES = "Sample question?", "Sample answer.", ("sample_first", "sample_second")
_LATE = "Sample of the system."
_ODD = [{"role": role, "content": _LATE if role == "system" else _SAID} for role in ("user", "system", "user")]
_ARGUMENTS: JsonObject = {"text": "sample text", "count": 7}
_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
_TOOLS = [{"type": "function", "function": {"name": n, "description": "-", "parameters": _SCHEMA}} for n in _NAMES]


@dataclass(frozen=True)
class ReplyFormat:
    """Says how a model writes reasoning and calls, and what its chat template reads.

    calls      the format of calls; None if it is not known.
    reasoning  (begin, end) markers of the reasoning; None if the model writes no reasoning.
    certain    True if every answer begins with reasoning, unless the prompt ends with the end marker.
    joins_arguments  True if the chat template reads the arguments of calls as JSON text.
    alternates  True if the chat template refuses or drops late system messages, or two user messages in a row.
    """

    calls: ToolFormat | None = None
    reasoning: tuple[str, str] | None = None
    certain: bool = False
    joins_arguments: bool = False
    alternates: bool = False

    @staticmethod
    def of(tokenizer: Tokenizer | None, calls: str = AUTO, reasoning: str = AUTO) -> ReplyFormat:
        """Find the format from what the checkpoint declares.

        calls      name of one of `FORMATS`, "none", or "auto": see `recognise_format`.
        reasoning  two markers with a space between, "none", or "auto": the markers in `REASONING` that the template
                   contains.

        Raises ParameterError for other values.
        """
        known = {each.name: each for each in FORMATS}
        if calls not in (AUTO, NONE, *known):
            raise ParameterError(
                f"--tool-format is {calls!r}, which is not a known format of tool calls",
                fix=did_you_mean(calls, (AUTO, NONE, *known)),
            )
        template = None if tokenizer is None else tokenizer.chat_template
        texts = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
        written, joins = recognise_format(tokenizer, texts) if texts else (None, False)
        found = ReplyFormat(
            written if calls == AUTO else known.get(calls),
            next((each for each in REASONING if each[1] in texts), None) if reasoning == AUTO else None,
            joins_arguments=joins,
            alternates=bool(texts) and not any(_LATE in turn for turn in _turns(tokenizer, *_ODD)),
        )
        if reasoning in (AUTO, NONE):
            return found
        markers = tuple(reasoning.split())
        if len(markers) != 2:
            raise ParameterError(
                f"--reasoning is {reasoning!r}, which is not two markers",
                fix="give two markers with a space between them, as in '<think> </think>', or none, or auto",
            )
        return replace(found, reasoning=(markers[0], markers[1]), certain=True)

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers whose special tokens must be kept in the text that a `Reply` reads."""
        return (*(self.calls.markers if self.calls else ()), *(self.reasoning or ()))

    def end_of_reasoning(self, prompt: str) -> str | None:
        """Return the marker that ends the reasoning of an answer; None if the answer need not begin with reasoning."""
        if self.calls is not None and self.calls.final:
            return self.calls.final
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning[1]):
            return None
        return self.reasoning[1] if self.certain or self._inside(prompt) else None

    def _inside(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def strict_calls(self, prompt: str, use: ToolUse, tokenizer: Tokenizer) -> Structured:
        """Return the structured output of an answer that may call: arguments of strict functions meet their schemas."""
        assert self.calls is not None, "tools are refused where the format of calls is not known"
        reasoning = self.reasoning and ("" if self._inside(prompt) else self.reasoning[0], self.reasoning[1])
        names = special_tokens(tokenizer).items()
        special = {text: token for token, text in names if any(text in marker for marker in self.calls.markers)}
        return self.calls.strict(Calls(use.schemas, use.parallel, special, reasoning))

    def reply(self, prompt: str, use: ToolUse) -> Reply:
        """Make an empty `Reply` for the answer to this prompt."""
        calls = self.calls or ToolFormat("", ())
        read = FORCED.get(use.choice) or (calls.read if calls.lead or (use.tools and self.calls is not None) else None)
        if isinstance(self.calls, HarmonyFormat):
            read = partial(self.calls.read, answer=FORCED.get(use.choice))
        most, earlier = None if use.parallel else 1, prompt.count(calls.opening)
        return Reply(use.functions, read, self.reasoning, self._inside(prompt), most, calls.call_id, earlier)


def recognise_format(tokenizer: Tokenizer | None, template: str) -> tuple[ToolFormat | None, bool]:
    """Find the format of calls: the chat template writes sample calls, and the format that reads them back is returned.
    A template that only explains how to call is recognised by `signs`. Returns (format, True if the template reads
    arguments as JSON text)."""
    answered = _turns(tokenizer, {"role": "assistant", "content": _SAID})
    harmony = next(each for each in FORMATS if each.final)
    if any(harmony.final + _SAID in turn for turn in answered):
        return harmony, False
    shown, taken = False, list[bool]()
    ids = dict.fromkeys(form.call_id for form in reversed(FORMATS))  # most templates accept any id
    for call_id, joins, names in product(ids, (False, True), (_NAMES, _NAMES[:1])):
        made = [call_id.format(drawn=f"{i:032}"[::-1], name=name, number=i) for i, name in enumerate(names)]
        calls = [_sample(*each, joins) for each in zip(names, made, strict=True)]
        turns = _turns(tokenizer, {"role": "assistant", "content": "", "tool_calls": calls}, tools=_TOOLS)
        shown = shown or any(_ARGUMENTS["text"] in turn for turn in turns)
        taken += [joins] if turns else []
        for form in FORMATS:
            if any(_read_calls(form, turn) == [(name, _ARGUMENTS) for name in names] for turn in turns):
                return form, joins
    signs = (each for each in FORMATS if each.signs and all(sign in template for sign in each.signs))
    return None if shown else next(signs, None), taken[:1] == [True]


def _sample(name: str, call_id: str, joins: bool) -> JsonObject:
    arguments: object = json.dumps(_ARGUMENTS) if joins else _ARGUMENTS
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _turns(tokenizer: Tokenizer | None, *answer: JsonObject, **given: object) -> list[str]:
    """Render a question and the messages `answer`. Returns [text after the question, text after the question's prompt],
    or [] if the template refuses the messages. given: further values for the template."""
    asked = [{"role": "user", "content": _ASKED}]
    try:
        prompt, text = (RequestChecks(tokenizer, 0, 0).chat_text(talk, **given) for talk in (asked, [*asked, *answer]))
    except PromptError:
        return []
    return [text.rpartition(_ASKED)[2], text.removeprefix(prompt)]


def _read_calls(form: ToolFormat, turn: str) -> list[tuple[str, object]]:
    reply = Reply(dict.fromkeys(_NAMES, _SCHEMA), form.read)
    reply.add(turn, True)
    try:
        return [(call.name, decode_json(call.arguments)) for call in reply.calls]
    except NoCall:
        return []
