"""`Reply`: what a choice of a chat says, told apart: its reasoning, its content and its calls of tools.

A `Reader` (see `reply_reader` and `template_reader`) takes the text as it comes. What it finds does not depend on how
the text is cut into pieces: whole answers and streams are made of the same deltas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

CONTENT, REASONING, CALL, ARGUMENTS = "content", "reasoning", "call", "arguments"


@dataclass(frozen=True, slots=True)
class Delta:
    """One thing that is new. kind: "content", "reasoning", "call" (`text` is the function's name) or "arguments" (of
    the call `index`)."""

    kind: str
    text: str
    index: int = 0


class Reader(Protocol):
    """Tells the parts of one text apart."""

    def feed(self, text: str) -> list[Delta]:
        """What is certain after more text."""
        ...

    def finish(self) -> list[Delta]:
        """What remains at the end of the text."""
        ...


@dataclass
class Call:
    """A call of a tool. arguments: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Reply:
    """See the module. reader: None if all is content. most_calls: further ones are left out; call_id: makes ids."""

    reader: Reader | None = None
    most_calls: int | None = None
    call_id: Callable[[], str] = lambda: f"call_{uuid4().hex[:24]}"
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, text: str, last: bool) -> list[Delta]:
        """Take more text; returns what is new, neighbours of one kind joined."""
        joined: list[Delta] = []
        if self.reader is None:
            deltas = [Delta(CONTENT, text)] if text else []
        else:
            deltas = self.reader.feed(text) + (self.reader.finish() if last else [])
        for delta in deltas:
            if delta.kind in (CALL, ARGUMENTS) and self.most_calls is not None and delta.index >= self.most_calls:
                continue
            self._take(delta)
            before = joined[-1] if joined else None
            if before and delta.kind != CALL and (before.kind, before.index) == (delta.kind, delta.index):
                joined[-1] = Delta(delta.kind, before.text + delta.text, delta.index)
            else:
                joined.append(delta)
        return joined

    def _take(self, delta: Delta) -> None:
        if delta.kind == CONTENT:
            self.content += delta.text
        elif delta.kind == REASONING:
            self.reasoning += delta.text
        elif delta.kind == CALL:
            self.calls.append(Call(self.call_id(), delta.text))
        else:
            self.calls[delta.index].arguments += delta.text
