"""Delivers a generation: as one body, or as a stream of events that begins with its first token."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from slipstream.server.api_error import api_error
from slipstream.server.api_keys import given_key
from slipstream.server.event_stream import EventStream, event, while_connected
from slipstream.server.generation import Generation, Part
from slipstream.server.reply_blocks import Event, Script

log = logging.getLogger("slipstream")


class Parts:
    """All parts of a generation, the first of which was read already. It must be closed, also if it was never read on:
    a generator around it would not pass that on unless it had begun."""

    def __init__(self, first: Part, rest: AsyncGenerator[Part, None]):
        self._first: Part | None = first
        self._rest = rest

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> Part:
        if self._first is None:
            return await self._rest.__anext__()
        first, self._first = self._first, None
        return first

    async def aclose(self) -> None:
        """End what runs."""
        await self._rest.aclose()


async def delivered(
    request: Request,
    generation: Generation,
    streamed: bool,
    heard: Callable[[Part], object],
    whole: Callable[[], dict[str, Any]],
    events: Callable[[Parts], AsyncGenerator[bytes, None]],
) -> Response:
    """The answer to a request. Everything that is wrong before the first token is raised, and has a status of its own.

    heard   called with each part of an answer that is not streamed; whole: its body, after the last part.
    events  the stream of all parts.
    """
    generation.headers = request.headers
    if generation.service.keys:
        generation.key = given_key(request.scope)
    if streamed:
        running = generation.parts()
        parts = Parts(await while_connected(request, _next(running)), running)
        return EventStream(events(parts), parts, generation.service.limits.send_seconds)
    await while_connected(request, _all(generation, heard))
    return JSONResponse(whole())


async def scripted(request: Request, script: Script, streamed: bool) -> Response:
    """The answer that a script writes."""

    def hear(part: Part) -> None:
        for _ in script.add(part):
            pass

    return await delivered(
        request, script.generation, streamed, hear, script.whole, lambda parts: _script_events(script, parts)
    )


async def _script_events(script: Script, parts: Parts) -> AsyncGenerator[bytes, None]:
    def written(found: Event) -> bytes:
        name, data = found
        return event({"type": name} | data, name)

    async with aclosing(parts):
        try:
            for each in script.begun():
                yield written(each)
            async for part in parts:
                for each in script.add(part):
                    yield written(each)
            for each in script.ended():
                yield written(each)
        except Exception as fault:
            log.warning("a stream ended with an error: %s", fault)
            for each in script.failed(api_error(fault)):
                yield written(each)


async def _next(parts: AsyncGenerator[Part, None]) -> Part:
    try:
        return await parts.__anext__()
    except BaseException:
        await parts.aclose()
        raise


async def _all(generation: Generation, heard: Callable[[Part], object]) -> None:
    async with aclosing(generation.parts()) as parts:
        async for part in parts:
            heard(part)
