"""`TemplateReader`: tells the parts of a reply apart by the response template of a checkpoint (`response_template` in
tokenizer_config.json), with the parser of transformers."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from slipstream.server.reply import ARGUMENTS, CALL, CONTENT, REASONING, Delta

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateReader:
    """template, prompt  what the checkpoint declares, and the text before the reply, which may have begun a part of it.
    tools              as the chat template gets them; functions: the names of those that may be called.

    A call is reported when it is complete. A part that the parser refuses, and all that follows it, is content. The
    parser is fed one character after the other, so that it cannot depend on how a text arrives.

    Raises ValueError for a template that is none.
    """

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: list[dict[str, Any]], functions: Collection[str]
    ):
        from transformers.utils.chat_parsing import ResponseParser  # imported here: it takes long

        self._parser = ResponseParser(dict(template), prefix=prompt, tools=[*tools])
        self._functions = functions
        self._deltas: list[Delta] = []
        self._unsure = ""  # text since the last part that was reported
        self._space = ""  # at the end of the reasoning, if no more of it follows
        self._begun = False  # whether the part that is read has text
        self._reasoned = any(event["field"] in REASONING_FIELDS for event in self._parser.initial_events)
        self._broken = False
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        for character in text:
            self._unsure += character
            self._try(lambda character=character: self._parser.feed(character))
        return self._taken()

    def finish(self) -> list[Delta]:
        if not self._broken:
            self._try(lambda: self._parser.finalize()[1])
        return self._taken()

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _try(self, parse: Any) -> None:
        try:
            for event in [] if self._broken else parse():
                self._hear(event)
        except (ValueError, KeyError):  # what was written is not what the template says
            self._broken = True
        if self._broken:
            self._report(CONTENT, self._unsure)

    def _hear(self, event: Mapping[str, Any]) -> None:
        kind, field = event["type"], event["field"]
        if kind == "region_open":
            self._begun, self._space = False, ""
        elif field == "tool_calls":
            if kind == "region_close":
                for call in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                    self._call(call)
        elif kind == "region_chunk":
            self._text(REASONING if field in REASONING_FIELDS else CONTENT, event["text"])

    def _text(self, kind: str, text: str) -> None:
        """White space around reasoning is left out, and so is that between it and the content."""
        self._reasoned = self._reasoned or kind == REASONING
        text = self._space + text
        if self._reasoned and not self._begun:
            text = text.lstrip()
        shown = text.rstrip() if kind == REASONING else text
        self._space = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        self._report(kind, shown)

    def _call(self, call: Any) -> None:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or function.get("name") not in self._functions:
            self._report(CONTENT, self._unsure)
            return
        name, arguments = function["name"], function.get("arguments") or {}
        self._report(CALL, name, self._calls)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._report(ARGUMENTS, text, self._calls)
        self._calls += 1

    def _report(self, kind: str, text: str, index: int = 0) -> None:
        self._unsure = ""
        if text:
            self._deltas.append(Delta(kind, text, index))
