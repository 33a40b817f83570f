"""`ResponseWriter` writes the answer to one request, as one body or as events; each endpoint has a subclass.
`add_endpoint` adds the route of an endpoint, which reads the request and stops when the client disconnects.

Time limits use anyio, not `asyncio.wait_for`: in Python 3.10 and 3.11 `wait_for` loses a cancellation that comes just
when the awaited task has ended, and an aborted request would run to its end.
"""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from anyio import fail_after
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from slipstream.core.strict import JsonObject
from slipstream.server.api_error import ApiError, as_api_error
from slipstream.server.fields import REQUIRED, Field, check_fields, describe_body, fields_of, read_flag
from slipstream.server.generation import Choice, Generation, Part
from slipstream.server.reply import ARGUMENTS, CALL, Call, no_number
from slipstream.server.service import Service

log = logging.getLogger("slipstream")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

Event = tuple[str, JsonObject]
"""(name, data); the name is "" for an event without a name."""


class ResponseWriter(ABC):
    """Writes the answer of a generation. done: bytes that follow the last event."""

    done = b""

    def __init__(self, generation: Generation):
        self.generation = generation

    @abstractmethod
    def write_start(self) -> Iterable[Event]:
        """Write the events before the first part."""

    @abstractmethod
    def write_part(self, part: Part) -> Iterable[Event]:
        """Write the events of a part."""

    @abstractmethod
    def write_end(self) -> Iterable[Event]:
        """Write the events after the last part."""

    @abstractmethod
    def write_error(self, fault: ApiError) -> Iterable[Event]:
        """Write the events of an error within a stream."""

    def take(self, part: Part) -> None:
        """Use a part of an answer that is not streamed."""
        for _ in self.write_part(part):
            pass

    @abstractmethod
    def write_whole(self) -> JsonObject:
        """Return the complete answer, once all parts have arrived."""


@dataclass
class Block:
    """A block of an answer. kind: "reasoning", "content" or "call"; text: the content, or the arguments of `call`."""

    index: int
    kind: str
    call: Call | None = None
    text: str = ""


class BlocksWriter(ResponseWriter):
    """Writes an answer as a list of blocks of one kind each, for Responses and Messages. This class finds where blocks
    begin and end; its subclasses write the events."""

    def __init__(self, generation: Generation):
        super().__init__(generation)
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def write_part(self, part: Part) -> Iterator[Event]:
        for delta in part.deltas:
            kind = CALL if delta.kind == ARGUMENTS else delta.kind
            if delta.kind == CALL or self._open is None or self._open.kind != kind:
                yield from self._close()
                call = part.choice.reply.calls[delta.index] if kind == CALL else None
                self._open = Block(len(self.blocks), kind, call)
                self.blocks.append(self._open)
                yield from self.open_block(self._open)
            if delta.kind != CALL:
                self._open.text += delta.text
                yield from self.extend_block(self._open, delta.text)
        if part.finish is not None:
            yield from self._close()

    def _close(self) -> Iterable[Event]:
        block, self._open = self._open, None
        return () if block is None else self.close_block(block)

    @abstractmethod
    def open_block(self, block: Block) -> Iterable[Event]:
        """Write the events at the beginning of a block."""

    @abstractmethod
    def extend_block(self, block: Block, text: str) -> Iterable[Event]:
        """Write the events of text that is added to a block."""

    @abstractmethod
    def close_block(self, block: Block) -> Iterable[Event]:
        """Write the events at the end of a block."""


def add_endpoint(
    router: APIRouter,
    service: Service,
    where: str,
    path: str,
    summary: str,
    prepare: Callable[[Service, JsonObject], ResponseWriter],
) -> None:
    """Add the route of an endpoint. where: as in `Field`; prepare: makes the writer from the fields that are set; it
    runs in a thread.

    The answer is one body, or a stream that begins with the first token. So an error before the first token is raised,
    and is answered with its own HTTP status."""
    known = fields_of(where)

    @router.post(path, openapi_extra=describe_body(known, REQUIRED[where]), summary=summary, name=where)
    async def create(request: Request) -> Response:
        given = await read_fields(request, service, known)
        streamed = read_flag(given, "stream")
        writer = await asyncio.to_thread(prepare, service, given)  # tokenizing a long text takes time
        generation = writer.generation
        if service.keys:
            generation.key = read_key(request.scope)
        if not streamed:
            await run_while_connected(request.receive, _take_all(writer))
            return await asyncio.to_thread(lambda: JSONResponse(writer.write_whole()))
        parts = generation.run()
        first = await run_while_connected(request.receive, _wait_for_first(parts))
        # EventStream also closes `parts` itself, because the generator around them may never have been started.
        return EventStream(_stream_events(writer, first, parts), parts, service.limits.send_seconds)


async def _take_all(writer: ResponseWriter) -> None:
    async with aclosing(writer.generation.run()) as parts:
        async for part in parts:
            writer.take(part)


async def _wait_for_first(parts: AsyncGenerator[Part, None]) -> Part:
    try:
        return await parts.__anext__()
    except BaseException:
        await parts.aclose()
        raise


async def _stream_events(
    writer: ResponseWriter, first: Part, rest: AsyncGenerator[Part, None]
) -> AsyncGenerator[bytes, None]:
    def encode_events(events: Iterable[Event]) -> Iterable[bytes]:
        for name, data in events:
            yield encode_event({"type": name} | data if name else data, name)

    try:
        for each in await asyncio.to_thread(list, encode_events(chain(writer.write_start(), writer.write_part(first)))):
            yield each
        async for part in rest:
            for each in encode_events(writer.write_part(part)):
                yield each
        for each in encode_events(writer.write_end()):
            yield each
    except Exception as fault:
        log.warning("a stream ended with an error: %s", fault)
        for each in encode_events(writer.write_error(as_api_error(fault))):
            yield each
    if writer.done:
        yield writer.done


def stop_text(choice: Choice, finish: str | None) -> str | None:
    """Return the stop string that ended a choice; None if another cause ended it, or if it has not ended (`finish`)."""
    return choice.stop_cause if finish and isinstance(choice.stop_cause, str) else None


class ClientGone(Exception):
    """Raised when the client has closed its connection."""


def encode_event(value: object, name: str = "") -> bytes:
    """Encode one server-sent event. It takes one line: compact JSON has no line breaks."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come. Ends early if the client disconnects, or reads nothing for `send_seconds`. It always
    closes the events and `pieces`, the iterator that they come from."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], pieces: AsyncGenerator[Part, None], send_seconds: float):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._pieces, self._send_seconds = events, pieces, send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone, TimeoutError):
                await run_while_connected(receive, self._send_all(send))
        finally:
            await self._events.aclose()
            await self._pieces.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for each in self._events:
            message = {"type": "http.response.body", "body": each, "more_body": True}
            with fail_after(self._send_seconds):
                await send(message)
        with fail_after(self._send_seconds):
            await send({"type": "http.response.body", "body": b""})


async def run_while_connected(receive: Receive, work: Coroutine[object, None, T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientGone."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MOST_DEPTH = 64
"""Largest depth of nested lists and objects."""
FEW_BYTES = 1 << 12
"""A larger body is parsed in a thread."""


async def read_fields(request: Request, service: Service, known: Mapping[str, Field]) -> JsonObject:
    """Read the fields of a request that are set. Raises ApiError if the body, a field or the model's name is wrong."""

    def parse() -> JsonObject:
        given = check_fields(_parse_object(read), known)
        service.check_model(given.get("model"))
        return given

    read = await read_body(request, service.limits.body)
    return await asyncio.to_thread(parse) if len(read) > FEW_BYTES else parse()


async def read_body(request: Request, most: int) -> bytearray:
    """Read the body of a request. Raises ApiError 413 for more than `most` bytes, 400 for a content type but JSON."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"the content type is {kind or 'missing'}, but must be application/json")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large(most)
    read = bytearray()
    async for chunk in request.stream():
        read += chunk
        if len(read) > most:
            raise _too_large(most)
    return read


def _parse_object(read: bytearray) -> JsonObject:
    try:
        body = json.loads(read.decode("utf-8"), parse_constant=no_number)
    except (ValueError, RecursionError) as fault:
        raise ApiError(400, f"the body is not JSON in UTF-8: {fault}", code="invalid_json") from fault
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}, but must be an object", code="invalid_json")
    for name, value in body.items():
        _check(name, name)
        _check(name, value)
    return body


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")


def _check(field: str, value: object, depth: int = 0) -> None:
    if depth > MOST_DEPTH:
        raise ApiError(400, f"{field} is nested more than {MOST_DEPTH} levels deep", field, "invalid_json")
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for each in value:
            if not isinstance(each, (int, float)):  # most are ids of tokens
                _check(field, each, depth + 1)
    elif isinstance(value, str):
        if "\0" in value:
            raise ApiError(400, f"{field} contains the character NUL", field, "invalid_text")
        try:
            value.encode()
        except UnicodeEncodeError as fault:
            raise ApiError(400, f"{field} contains half of a surrogate pair", field, "invalid_text") from fault


def read_key(scope: Scope) -> bytes:
    """Return the API key of a request, from OpenAI's header or from Anthropic's; empty if there is none."""
    headers = dict(scope["headers"])
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    return bytes(key.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b""))
