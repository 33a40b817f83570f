"""`ReplyFormat`: how the model of a server writes reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from jinja2 import TemplateError

from slipstream.core.structured import Structured
from slipstream.errors import LoadError, ParameterError, did_you_mean
from slipstream.models.chat_template import chosen_template, names_read
from slipstream.models.text import special_tokens
from slipstream.server.api_error import ApiError
from slipstream.server.reply import Reader, Reply
from slipstream.server.reply_reader import ReplyReader
from slipstream.server.template_reader import REASONING_FIELDS, TemplateReader
from slipstream.server.tool_formats import FORCED, FORMATS, Calls, ToolFormat
from slipstream.server.tools import ToolUse

AUTO, NONE = "auto", "none"
THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class ReplyFormat:
    """calls     how the model writes calls; None if that is not known.
    reasoning  what it writes before and after its reasoning, None if it writes none.
    certain   whether every answer begins with reasoning, unless the prompt has ended it.
    template  the response template of the checkpoint, which is followed instead where it declares one.
    """

    calls: ToolFormat | None = None
    reasoning: tuple[str, str] | None = None
    certain: bool = False
    template: Mapping[str, Any] | None = None

    @staticmethod
    def of(tokenizer: Any, calls: str = AUTO, reasoning: str = AUTO) -> ReplyFormat:
        """From what the checkpoint declares.

        calls      name of one of `FORMATS`, "none", or "auto": by the checkpoint's response template, else by what its
                   chat template holds.
        reasoning  two markers with a space between, "none", or "auto": by the response template, else <think> and
                   </think> if the chat template holds the latter.

        Raises ParameterError for other values, and LoadError for a response template that is none.
        """
        texts = "" if tokenizer is None else _texts(tokenizer.chat_template)
        declared = None if tokenizer is None or calls != AUTO else _response_template(tokenizer)
        if declared is not None:
            _check_template(declared)
        known = {form.name: form for form in FORMATS}
        if calls not in (AUTO, NONE, *known):
            raise ParameterError(
                f"the format of tool calls is {calls!r}", fix=did_you_mean(calls, (AUTO, NONE, *known))
            )
        reader = known.get(calls)
        if calls == AUTO:
            reader = next((form for form in FORMATS if all(sign in texts for sign in form.signs)), None)
        if reasoning == AUTO:
            if declared is not None:
                return ReplyFormat(reader, _declared_markers(declared), False, declared)
            return ReplyFormat(reader, THINK if THINK[1] in texts else None)
        markers = tuple(reasoning.split())
        if reasoning == NONE:
            return ReplyFormat(reader, template=declared)
        if len(markers) != 2:
            raise ParameterError(
                f"the markers of reasoning are {reasoning!r}", fix="write two with a space between, or none, or auto"
            )
        return ReplyFormat(reader, (markers[0], markers[1]), True, declared)

    @property
    def markers(self) -> tuple[str, ...] | None:
        """The special tokens that a reader must see; None: all."""
        if self.template is not None:
            return None
        return (*(self.calls.markers if self.calls else ()), *(self.reasoning or ()))

    def end_of_reasoning(self, prompt: str) -> str | None:
        """What ends the reasoning with which the answer to this prompt begins; None if it does not begin so."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning[1]):
            return None
        return self.reasoning[1] if self.certain or self._inside(prompt) else None

    def _inside(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def strict_form(self, prompt: str, use: ToolUse, tokenizer: Any) -> Structured:
        """The form of an answer to this prompt that may call, in which the arguments of strict functions meet their
        schemas. Raises ApiError 400 if the way in which this model calls is not known well enough."""
        if self.template is not None or self.calls is None or self.calls.strict is None:
            i = next(i for i, tool in enumerate(use.tools) if tool["function"]["name"] in use.strict)
            raise ApiError(
                400,
                "strict cannot be enforced while the model decides whether it calls: its checkpoint declares how it "
                "writes calls in a response template, for which there is no grammar. Leave strict out, set tool_choice "
                "to required, or start the server with --tool-format",
                f"tools[{i}].function.strict",
                "unsupported_field",
            )
        reasoning = self.reasoning and ("" if self._inside(prompt) else self.reasoning[0], self.reasoning[1])
        names = {text: token for token, text in special_tokens(tokenizer).items()}
        special = {text: names[text] for text in self.calls.markers if text in names}
        return self.calls.strict(Calls(use.schemas, use.parallel, special, reasoning))

    def reply(self, prompt: str, use: ToolUse) -> Reply:
        """A reply to this prompt, of which nothing was said yet."""
        length = 0 if self.calls is None else self.calls.id_length
        reply = Reply(self._reader(prompt, use), None if use.parallel else 1)
        if length:
            reply.call_id = lambda: uuid4().hex[:length]
        return reply

    def _reader(self, prompt: str, use: ToolUse) -> Reader:
        forced = FORCED.get(use.choice)
        if self.template is not None and forced is None:
            return TemplateReader(self.template, prompt, list(use.tools), use.functions)
        read = forced or (self.calls.read if use.tools and self.calls is not None else None)
        return ReplyReader(use.functions, read, self.reasoning, self._inside(prompt))


def template_names(tokenizer: Any, tools: bool) -> frozenset[str]:
    """What the chat template for a conversation with or without tools reads; nothing if it cannot be read."""
    try:
        return names_read(chosen_template(tokenizer.chat_template, tools))
    except TemplateError:  # rendering it says what is wrong
        return frozenset()


def _texts(templates: str | Mapping[str, str] | None) -> str:
    return "\n".join(templates.values()) if isinstance(templates, Mapping) else templates or ""


def _response_template(tokenizer: Any) -> Mapping[str, Any] | None:
    """`open_folder` leaves folders that declare one to transformers."""
    from slipstream.models.folder_tokenizer import FolderTokenizer

    return None if isinstance(tokenizer, FolderTokenizer) else getattr(tokenizer, "response_template", None)


def _check_template(template: Mapping[str, Any]) -> None:
    try:
        TemplateReader(template, "", [], ())
    except ValueError as fault:
        raise LoadError(
            f"the response_template of the checkpoint cannot be read ({fault})",
            fix="correct tokenizer_config.json, or name the format of tool calls (--tool-format)",
        ) from fault


def _declared_markers(template: Mapping[str, Any]) -> tuple[str, str] | None:
    for name in REASONING_FIELDS:
        field = template["fields"].get(name, {})
        begin, end = field.get("open"), field.get("close")
        if isinstance(begin, str) and isinstance(end, str):
            return begin.strip(), end
    return None
