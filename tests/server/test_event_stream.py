"""Streams end when their client goes, in whatever moment it goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from slipstream.server.event_stream import EventStream

MANY = 1000


@pytest.mark.parametrize("later", range(10))
def test_a_client_that_goes_while_a_piece_is_sent_ends_its_stream(later: int) -> None:
    """`asyncio.wait_for` of Python 3.10 and 3.11 forgets that it was cancelled if what it waited for has just ended;
    then the stream would go on for nobody. later: turns of the event loop from a piece that was sent to the news that
    the client has gone."""
    sent, ended = [], []

    async def run() -> None:
        news = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                for _ in range(MANY):
                    await asyncio.sleep(0)
                    yield b"piece"
            finally:
                ended.append(True)

        async def send(message: object) -> None:
            sent.append(message)
            if len(sent) == 5:
                news.set()

        async def receive() -> dict[str, str]:
            await news.wait()
            for _ in range(later):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        stream = events()
        await EventStream(stream, stream, 10.0)({"type": "http"}, receive, send)

    asyncio.run(run())
    assert ended == [True]
    assert len(sent) < MANY / 10
