"""`Script`: writes the answer to one request, whole or as events; each endpoint has one. `endpoint` is its route."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from slipstream.server.api_error import ApiError, api_error
from slipstream.server.event_stream import EventStream, event, while_connected
from slipstream.server.fields import REQUIRED, body_schema, fields_of, flag
from slipstream.server.generation import Choice, Generation, Part
from slipstream.server.request_body import given_key, request_fields
from slipstream.server.service import Service

log = logging.getLogger("slipstream")

Object = dict[str, Any]

Event = tuple[str, Object]
"""(name, data); an event without a name has "" for it."""


class Script(ABC):
    """generation: whose answer it writes. done: what follows the last event."""

    done = b""

    def __init__(self, generation: Generation):
        self.generation = generation

    @abstractmethod
    def begun(self) -> Iterable[Event]:
        """The events before the first part."""

    @abstractmethod
    def added(self, part: Part) -> Iterable[Event]:
        """The events of a part."""

    @abstractmethod
    def ended(self) -> Iterable[Event]:
        """The events after the last part."""

    @abstractmethod
    def failed(self, fault: ApiError) -> Iterable[Event]:
        """The events of an error within a stream."""

    def hear(self, part: Part) -> None:
        """Take a part of an answer that is not streamed."""
        for _ in self.added(part):
            pass

    @abstractmethod
    def whole(self) -> Object:
        """The answer, when all parts were heard."""


def endpoint(
    router: APIRouter,
    service: Service,
    where: str,
    path: str,
    summary: str,
    script: Callable[[Service, Object], Awaitable[Script]],
) -> None:
    """The route of an endpoint. where: as in `Field`; script: from the fields that are set.

    The answer is one body, or a stream that begins with the first token. Everything that is wrong before the first
    token is raised, and has a status of its own."""
    known = fields_of(where)

    @router.post(path, openapi_extra=body_schema(known, REQUIRED[where]), summary=summary, name=where)
    async def create(request: Request) -> Response:
        given = await request_fields(request, service, known)
        streamed = flag(given, "stream")
        writer = await script(service, given)
        generation = writer.generation
        if service.keys:
            generation.key = given_key(request.scope)
        if not streamed:
            await while_connected(request.receive, _hear_all(writer))
            return JSONResponse(writer.whole())
        parts = generation.parts()
        first = await while_connected(request.receive, _first(parts))
        # The parts are closed even if no event is asked for: a generator around them passes that on only once begun.
        return EventStream(_events(writer, first, parts), parts, service.limits.send_seconds)


async def _hear_all(script: Script) -> None:
    async with aclosing(script.generation.parts()) as parts:
        async for part in parts:
            script.hear(part)


async def _first(parts: AsyncGenerator[Part, None]) -> Part:
    try:
        return await parts.__anext__()
    except BaseException:
        await parts.aclose()
        raise


async def _events(script: Script, first: Part, rest: AsyncGenerator[Part, None]) -> AsyncGenerator[bytes, None]:
    def written(events: Iterable[Event]) -> Iterable[bytes]:
        for name, data in events:
            yield event({"type": name} | data if name else data, name)

    async with aclosing(rest):
        try:
            for each in written(chain(script.begun(), script.added(first))):
                yield each
            async for part in rest:
                for each in written(script.added(part)):
                    yield each
            for each in written(script.ended()):
                yield each
        except Exception as fault:
            log.warning("a stream ended with an error: %s", fault)
            for each in written(script.failed(api_error(fault))):
                yield each
    if script.done:
        yield script.done


def stop_text(choice: Choice, finish: str | None) -> str | None:
    """The stop string that ended a choice, in its last part."""
    return choice.stop_cause if finish and isinstance(choice.stop_cause, str) else None
