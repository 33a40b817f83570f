"""`Reply`: separates the text of a choice into reasoning, content and tool calls while the text arrives.

A coroutine reads one character after the other, in one of the formats of `call_formats`. So the result does not depend
on the pieces in which a text arrives, and complete answers and streams consist of the same deltas. Text that begins
like a call but is no call, or that calls a function that was not declared, becomes content without any change.
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
"""Pattern of the ids of calls, as OpenAI writes them."""

Reading = Generator[None, str, str]
"""A coroutine that gets characters ("" at the end of the text) and returns the text that it read."""

MOST_NAME = 256
"""Longest name of a function, in characters; a longer text is not read as a name."""


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to a reply. kind: "content", "reasoning", "call" (`text` is the function's name) or "arguments"
    (`text` is added to the arguments of call number `index`)."""

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
    """Raised when the text that was read since the last `begin` is no call."""


class Reply:
    """Separates reasoning, content and calls in a text while it arrives.

    functions   name -> JSON schema of the arguments, for functions that may be called.
    read        the coroutine that reads content and calls.
    reasoning   (begin, end) marker of the reasoning, which may come first; inside: the prompt ends with `begin`.
    most_calls  largest number of calls; further calls are left out.
    call_id     pattern of the ids of calls; fields: `drawn` (32 random digits), the function's `name`, call `number`.
    earlier     number of calls in the prompt: `number` counts on from it.
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
        self._back: deque[str] = deque()  # characters to read again
        self.raw: list[str] = []  # characters read since `begin`
        self._ended = False
        self.started = 0  # number of calls
        self._reading = self._all(read or plain, reasoning, inside) if read or reasoning else None
        if self._reading is not None:
            next(self._reading)

    def add(self, text: str, last: bool) -> list[Delta]:
        """Add text, and return the new deltas; neighbouring deltas of one kind are joined. last: the text ends here."""
        if self._reading is None:  # the text has only content
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
        """Read the next character; "" at the end of the text."""
        if self._back:
            char = self._back.popleft()
        else:
            char = "" if self._ended else (yield)
        if char:
            self.raw.append(char)
        return char

    def unread(self, text: str | Seq[str]) -> None:
        """Put back `text`, the last characters that were read, so that they are read again."""
        self._back.extendleft(reversed(text))
        if text:
            del self.raw[-len(text) :]

    def skip_space(self) -> Reading:
        """Read up to the next character that is no white space, and return this character."""
        char = yield from self.next()
        while char.isspace():
            char = yield from self.next()
        return char

    def peek(self) -> Reading:
        """Skip white space, and return the next character without reading it."""
        char = yield from self.skip_space()
        self.unread(char)
        return char

    def begin(self, text: str = "") -> None:
        """Start to collect in `raw` the characters that may be read again or become content; `text` is the first."""
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
        """Emit text up to one of the markers, and return white space and marker, which are not emitted; "" at the end
        of the text. After a call, white space at the end of the text is not emitted."""
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
        self, *ends: str, on_part: Callable[[str], None] | None = None, most: int | None = None
    ) -> Generator[None, str, tuple[str, str]]:
        """Read text up to one of `ends`, and return (text, end). With `on_part`, each part of the text is passed to it
        instead of being returned, once the part cannot belong to an end. Raises NoCall if no end comes, or only after
        more than `most` characters."""
        text = ""
        while True:
            char = yield from self.next()
            if not char or (most is not None and len(text) > most):
                raise NoCall
            text += char
            end = next((each for each in ends if text.endswith(each)), "")
            if on_part is not None:
                held = max(n for each in ends for n in range(len(each)) if text.endswith(each[:n]))
                certain = len(text) - (len(end) or held)
                on_part(text[:certain])
                text = text[certain:]
            if end:
                return text.removesuffix(end), end

    def ahead(self) -> Reading:
        """Return the next character that is no white space, without reading anything."""
        self.begin()
        char = yield from self.skip_space()
        self.unread(self.raw)
        return char

    def pass_over(self, text: str) -> Reading:
        """Read white space and `text` if they come next, and return `text`; otherwise read nothing and return ""."""
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
        """Try to read a call after the text `before`. If it is no call, emit the text as content and return False. Once
        the name has been emitted, an error no longer undoes the call."""
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
        """Emit the name of a call. Raises NoCall for a function that was not declared."""
        if not isinstance(name, str) or name not in self.functions:
            raise NoCall
        self.started += 1
        self.emit(CALL, name, self.started - 1)

    def write(self, text: str) -> None:
        self.emit(ARGUMENTS, text, self.started - 1)

    def value(self, on_part: Callable[[str], None] = lambda character: None) -> Reading:
        """Read one JSON value, or the arguments of a Python call in parentheses, and return its text unchanged.
        `on_part` is called with each character. Raises NoCall if brackets do not match or the text ends."""
        char = yield from self.skip_space()
        if not char:
            raise NoCall
        text, open_, quoted, escaped = [char], "", "", False
        on_part(char)
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
            on_part(char)

    def expect(self, wanted: str) -> Reading:
        """Read white space and the text `wanted`. Raises NoCall if another text comes."""
        self.unread((yield from self.skip_space()))
        for each in wanted:
            if (yield from self.next()) != each:
                raise NoCall
        return wanted

    def arguments(self, name: object) -> Reading:
        """Emit a call, and its arguments while they are read. Raises NoCall."""
        if (yield from self.peek()) == "{":
            self.start(name)
            return (yield from self.value(self.write))
        text = _object_text((yield from self.value()))  # the object is written in a JSON string
        self.start(name)
        self.write(text)
        return text

    def member_call(self, name_key: str = "name") -> Reading:
        """Read {name_key: NAME, "arguments" or "parameters": {...}}, in any order; missing arguments become {}."""
        yield from self.expect("{")
        name, before, started = None, "{}", False
        char = yield from self.skip_space()
        while char != "}":
            self.unread(char)
            key = decode_json((yield from self.value()))
            yield from self.expect(":")
            if key == name_key and name is None:
                name = decode_json((yield from self.value()))
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


def decode_json(text: str) -> object:
    """Parse a JSON text. Raises NoCall if it is not JSON."""
    try:
        value: object = json.loads(text, parse_constant=no_number)
        return value
    except (ValueError, RecursionError) as fault:
        raise NoCall from fault


def no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _object_text(text: str) -> str:
    """Return arguments as the text of a JSON object. Some models write this text inside a JSON string."""
    written = decode_json(text)
    if isinstance(written, str):
        text, written = written, decode_json(written)
    if written is None:
        return "{}"
    if not isinstance(written, dict):
        raise NoCall
    return text


def plain(reply: Reply) -> Reading:
    """Read the rest of the text as content; white space directly after a call is skipped."""
    if reply.started:
        yield from reply.peek()
    while char := (yield from reply.next()):
        reply.begin()
        reply.emit(CONTENT, char)
    return ""
