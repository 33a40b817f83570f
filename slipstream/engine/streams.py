"""`Streams`: hands what an engine reports once a step to the coroutines of one event loop that wait for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from slipstream.engine.messages import Ask, Load, Report, Update
from slipstream.errors import ReaderError

MOST_UNREAD = 4096
"""Updates of one request that wait for their reader. A reader that is slower loses the request."""


class Streams:
    """submit, abort: as in `EngineThread`; called in the event loop.

    heard  called in the event loop with each report, after it was handed out.
    """

    def __init__(
        self, submit: Callable[[int, Ask], None], abort: Callable[[int], None], most_unread: int = MOST_UNREAD
    ):
        self.load = Load()
        self.dead: Exception | None = None
        self.heard: Callable[[Report], None] = lambda report: None
        self._submit, self._abort, self._most_unread = submit, abort, most_unread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keys = itertools.count()
        self._unread: dict[int, asyncio.Queue[Update]] = {}

    def __len__(self) -> int:
        return len(self._unread)

    def deliver(self, report: Report) -> None:
        """Take a report, in any thread."""
        if self._loop is None:
            self._take(report)
        else:
            with suppress(RuntimeError):  # the loop was closed, so nobody waits
                self._loop.call_soon_threadsafe(self._take, report)

    async def follow(self, ask: Ask) -> AsyncGenerator[Update, None]:
        """The updates of a request, to the last one. Closing the iterator aborts it. Raises what ended the request."""
        self._loop = asyncio.get_running_loop()
        if self.dead is not None:
            raise self.dead
        key, unread = next(self._keys), asyncio.Queue[Update]()
        self._unread[key] = unread
        ended = False
        try:
            self._submit(key, ask)
            while not ended:
                update = await unread.get()
                ended = update.error is not None or update.finish is not None
                if update.error is not None:
                    raise update.error
                yield update
        finally:
            if self._unread.pop(key, None) is not None and not ended and self.dead is None:
                self._abort(key)

    def end_all(self, fault: Exception) -> None:
        """Abort every request; its reader gets the error."""
        for key in list(self._unread):
            self._lose(key, fault)

    def revive(self) -> None:
        """Take requests again, in any thread: there is another engine."""
        if self._loop is None:
            self.dead = None
        else:
            with suppress(RuntimeError):  # as above
                self._loop.call_soon_threadsafe(setattr, self, "dead", None)

    def _take(self, report: Report) -> None:
        self.load = report.load
        if report.dead is not None:
            self.dead = report.dead
        for update in report.updates:
            unread = self._unread.get(update.key)
            if unread is None:
                continue
            if unread.qsize() >= self._most_unread:
                self._lose(update.key, _unread(unread.qsize()))
            else:
                unread.put_nowait(update)
        if self.dead is not None:
            for key, unread in list(self._unread.items()):  # those that the engine did not know yet
                unread.put_nowait(Update(key, error=self.dead))
        self.heard(report)

    def _lose(self, key: int, fault: Exception) -> None:
        unread = self._unread.pop(key)
        while not unread.empty():
            unread.get_nowait()
        unread.put_nowait(Update(key, error=fault))
        if self.dead is None:
            self._abort(key)


def _unread(count: int) -> ReaderError:
    return ReaderError(
        f"{count} updates of the request wait for their reader",
        why="memory for them is bounded, so the request was ended",
        fix="read the stream faster",
    )
