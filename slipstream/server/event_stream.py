"""Server-sent events, and handlers that end when their client has gone.

Times are limited by anyio, not by `asyncio.wait_for`: that of Python 3.10 and 3.11 forgets a cancellation that comes
just when what it waits for has ended, and an aborted request would run to its end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from anyio import fail_after
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def event(value: Any, name: str = "") -> bytes:
    """One event. JSON has no line breaks outside of strings, and escapes those within."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come. It ends early if the client goes, or does not read for `send_seconds`. The events and
    what they are made of, `source`, are closed in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None], send_seconds: float):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._source, self._send_seconds = events, source, send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone, TimeoutError):
                await while_connected(receive, self._send_all(send))
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for each in events:
                message = {"type": "http.response.body", "body": each, "more_body": True}
                with fail_after(self._send_seconds):
                    await send(message)
        with fail_after(self._send_seconds):
            await send({"type": "http.response.body", "body": b""})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes; then raises ClientGone."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
