"""`Reply`: what a choice of a chat says: reasoning, content and calls of tools, told apart as the text comes.

A coroutine reads one character after the other, in one of the formats of `reply_format`, so the result cannot depend on
how a text arrives: whole answers and streams are made of the same deltas. Text that begins like a call and is none, or
calls a function that was not declared, is content, character by character as it was written.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

CONTENT, REASONING, CALL, ARGUMENTS = "content", "reasoning", "call", "arguments"

CALL_ID = "call_{drawn:.24}"
"""Form of the ids of calls, as OpenAI writes them."""

Reading = Generator[None, str, str]
"""Reads characters, "" at the end of the text, and returns what it read."""

MOST_NAME = 256
"""Characters of a function's name; what is longer is no name."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One thing that is new. kind: "content", "reasoning", "call" (`text` is the function's name) or "arguments" (of
    the call `index`)."""

    kind: str
    text: str
    index: int = 0


@dataclass
class Call:
    """A call of a tool. arguments: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


class NoCall(Exception):
    """The text that was read since `begin` is no call."""


class Reply:
    """Tells the parts of a text apart as it comes.

    functions   name -> JSON schema of the arguments, for functions that may be called.
    read        the coroutine that reads content and calls.
    reasoning   (begin, end) of the reasoning that may come first; inside: whether the prompt has begun it already.
    most_calls  further ones are left out.
    call_id     form of the ids of calls, of `drawn` (32 random digits), the function's `name` and the call's `number`.
    earlier     calls before this reply, for that number.
    """

    def __init__(
        self,
        functions: Mapping[str, object] | None = None,
        read: Callable[[Reply], Reading] | None = None,
        reasoning: tuple[str, str] | None = None,
        inside: bool = False,
        most_calls: int | None = None,
        call_id: str = CALL_ID,
        earlier: int = 0,
    ):
        self.content = self.reasoning = ""
        self.calls: list[Call] = []
        self.functions = functions or {}
        self._most_calls, self._call_id, self._earlier = most_calls, call_id, earlier
        self._deltas: list[Delta] = []
        self._back: deque[str] = deque()  # characters that are to be read again
        self.raw: list[str] = []  # characters read since `begin`
        self._ended = False
        self.started = 0  # calls
        self._reading = self._all(read or plain, reasoning, inside) if read or reasoning else None
        if self._reading is not None:
            next(self._reading)

    def add(self, text: str, last: bool) -> list[Delta]:
        """Take more text; returns what is new, neighbours of one kind joined."""
        if self._reading is None:  # all of it is content
            self.emit(CONTENT, text)
        else:
            for character in text:
                self._reading.send(character)
            self._ended = last
            with suppress(StopIteration):
                if last:
                    self._reading.send("")
        deltas, self._deltas = self._deltas, []
        for delta in deltas:
            if delta.kind == CONTENT:
                self.content += delta.text
            elif delta.kind == REASONING:
                self.reasoning += delta.text
            elif delta.kind == CALL:
                number = self._earlier + delta.index
                made = self._call_id.format(drawn=uuid4().hex, name=delta.text, number=number)
                self.calls.append(Call(made, delta.text))
            else:
                self.calls[delta.index].arguments += delta.text
        return deltas

    def _all(self, read: Callable[[Reply], Reading], reasoning: tuple[str, str] | None, inside: bool) -> Reading:
        if reasoning is not None:
            yield from self._reason(*reasoning, inside)
        return (yield from read(self))

    # --- characters --------------------------------------------------------------------------------------------

    def next(self) -> Reading:
        """The next character, "" at the end."""
        if self._back:
            char = self._back.popleft()
        else:
            char = "" if self._ended else (yield)
        if char:
            self.raw.append(char)
        return char

    def unread(self, text: str | Seq[str]) -> None:
        """Characters that were read last are to be read again."""
        self._back.extendleft(reversed(text))
        if text:
            del self.raw[-len(text) :]

    def skip_space(self) -> Reading:
        """The next character that is no white space."""
        char = yield from self.next()
        while char.isspace():
            char = yield from self.next()
        return char

    def peek(self) -> Reading:
        """The next character that is no white space; it is read again, the white space before it is not."""
        char = yield from self.skip_space()
        self.unread(char)
        return char

    def begin(self, text: str = "") -> None:
        """Mark a place: characters from here on may have to be read again, or shown. `text` counts, too."""
        self.raw = list(text)

    def emit(self, kind: str, text: str, index: int = 0) -> None:
        if kind in (CALL, ARGUMENTS) and self._most_calls is not None and index >= self._most_calls:
            return
        last = self._deltas[-1] if self._deltas else None
        if last is not None and (last.kind, last.index) == (kind, index) and kind != CALL:
            self._deltas[-1] = Delta(kind, last.text + text, index)
        elif text:
            self._deltas.append(Delta(kind, text, index))

    def until(self, kind: str, *markers: str) -> Reading:
        """Report text up to one of the markers, and return it with the white space before it, neither of them reported;
        "" at the end of the text. White space at its end is not reported after a call."""
        waiting = ""
        while True:
            self.begin()
            char = yield from self.next()
            if not char:
                if waiting.strip() or not self.started:
                    self.emit(kind, waiting)
                return ""
            waiting += char
            while not any(marker.startswith(waiting.lstrip()) for marker in markers):
                self.emit(kind, waiting[0])
                waiting = waiting[1:]
            if waiting.lstrip() in markers:
                return waiting

    def text(
        self, *ends: str, heard: Callable[[str], None] | None = None, most: int | None = None
    ) -> Generator[None, str, tuple[str, str]]:
        """Read text up to one of `ends`, and return both. heard: called with each part of the text as it is certain,
        which is then not returned. Raises NoCall if there is no end, or more than `most` characters before it."""
        text = ""
        while True:
            char = yield from self.next()
            if not char or (most is not None and len(text) > most):
                raise NoCall
            text += char
            end = next((each for each in ends if text.endswith(each)), "")
            if heard is not None:
                held = max(n for each in ends for n in range(len(each)) if text.endswith(each[:n]))
                certain = len(text) - (len(end) or held)
                heard(text[:certain])
                text = text[certain:]
            if end:
                return text.removesuffix(end), end

    def ahead(self) -> Reading:
        """The next character that is no white space; all of it is read again."""
        self.begin()
        char = yield from self.skip_space()
        self.unread(self.raw)
        return char

    def pass_over(self, text: str) -> Reading:
        """Read `text` and the white space before it, if it is next; nothing otherwise."""
        self.begin()
        char = yield from self.skip_space()
        for wanted in text:
            if char != wanted:
                self.unread(self.raw)
                return ""
            char = yield from self.next()
        self.unread(char)
        return text

    # --- reasoning ---------------------------------------------------------------------------------------------

    def _reason(self, begin: str, end: str, inside: bool) -> Reading:
        if not inside and not (yield from self.pass_over(begin)):
            return ""
        yield from self.peek()
        if (yield from self.until(REASONING, end)):
            yield from self.peek()
        return ""

    # --- calls -------------------------------------------------------------------------------------------------

    def attempt(self, call: Callable[[], Reading], before: str) -> Generator[None, str, bool]:
        """Read a call that `before` began; whether it is one. If not, all of it is content. What goes wrong after its
        name and the beginning of its arguments does not undo it."""
        self.begin(before)
        calls = self.started
        try:
            yield from call()
        except NoCall:
            if self.started == calls:
                self.emit(CONTENT, "".join(self.raw))
                return False
        return True

    def start(self, name: object) -> None:
        """Report a call. Raises NoCall for a function that was not declared."""
        if not isinstance(name, str) or name not in self.functions:
            raise NoCall
        self.started += 1
        self.emit(CALL, name, self.started - 1)

    def write(self, text: str) -> None:
        self.emit(ARGUMENTS, text, self.started - 1)

    def value(self, heard: Callable[[str], None] = lambda character: None) -> Reading:
        """Read one JSON value, or the arguments of a Python call in parentheses, as it is written. heard: called with
        each of its characters. Raises NoCall."""
        char = yield from self.skip_space()
        if not char:
            raise NoCall
        text, open_, quoted, escaped = [char], "", "", False
        heard(char)
        while True:
            if quoted:
                quoted, escaped = quoted if escaped or char != quoted else "", not escaped and char == "\\"
            elif char in "\"'":
                quoted = char
            elif char in _CLOSED_BY:
                open_ += _CLOSED_BY[char]
            elif char in _CLOSED_BY.values():
                if not open_.endswith(char):
                    raise NoCall
                open_ = open_[:-1]
            done = not quoted and not open_
            if done and text[0] in "{[(\"'":
                return "".join(text)
            char = yield from self.next()
            if done and (not char or char in ",:}] \t\r\n"):  # the end of a number or a word
                self.unread(char)
                return "".join(text)
            if not char:
                raise NoCall
            text.append(char)
            heard(char)

    def expect(self, wanted: str) -> Reading:
        """Read a text, and the white space before it. Raises NoCall."""
        self.unread((yield from self.skip_space()))
        for each in wanted:
            if (yield from self.next()) != each:
                raise NoCall
        return wanted

    def arguments(self, name: object) -> Reading:
        """Report a call, and its arguments as they come. Raises NoCall."""
        if (yield from self.peek()) == "{":
            self.start(name)
            return (yield from self.value(self.write))
        text = _object_text((yield from self.value()))  # as JSON within text
        self.start(name)
        self.write(text)
        return text

    def member_call(self, name_key: str = "name") -> Reading:
        """{name_key: ..., "arguments" or "parameters": {...}}, in any order; without arguments they are {}."""
        yield from self.expect("{")
        name, before, started = None, "{}", False
        char = yield from self.skip_space()
        while char != "}":
            self.unread(char)
            key = loaded((yield from self.value()))
            yield from self.expect(":")
            if key == name_key and name is None:
                name = loaded((yield from self.value()))
            elif key not in ("arguments", "parameters") or started:
                yield from self.value()
            elif name is None:
                before = _object_text((yield from self.value()))
            else:
                yield from self.arguments(name)
                started = True
            char = yield from self.skip_space()
            if char == ",":
                char = yield from self.skip_space()
            elif char != "}":
                raise NoCall
        if not started:
            self.start(name)
            self.write(before)
        return ""


_CLOSED_BY = {"{": "}", "[": "]", "(": ")"}


def loaded(text: str) -> object:
    """The value of JSON. Raises NoCall."""
    try:
        value: object = json.loads(text, parse_constant=no_number)
        return value
    except (ValueError, RecursionError) as fault:
        raise NoCall from fault


def no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _object_text(text: str) -> str:
    """Arguments as the text of a JSON object. Some models write that text as a JSON string."""
    written = loaded(text)
    if isinstance(written, str):
        text, written = written, loaded(written)
    if written is None:
        return "{}"
    if not isinstance(written, dict):
        raise NoCall
    return text


def plain(reply: Reply) -> Reading:
    """No further calls."""
    if reply.started:
        yield from reply.peek()
    while char := (yield from reply.next()):
        reply.begin()
        reply.emit(CONTENT, char)
    return ""
