"""An event loop whose clock jumps to the next timer instead of waiting, and a server of exactly known latencies."""

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """A selector that does not wait, but advances the virtual time by the timeout."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing is left to wait for"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock begins at 0 and advances only while all tasks sleep. It does not support sockets."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@dataclass(frozen=True)
class Script:
    """How a request is answered: seconds before the first piece of text and between two pieces, and tokens in each
    piece."""

    first: float = 0.5
    gap: float = 0.1
    pieces: int = 5
    tokens: int = 1
    status: int = 200
    usage: bool = True
    cut: bool = False


@dataclass
class ScriptedServer(httpx.AsyncBaseTransport):
    """Answers the i-th request by script(i). places: number of requests that run at the same time; further requests
    wait."""

    script: Callable[[int], Script] = lambda i: Script()
    places: int = 10**6
    metrics: Callable[["ScriptedServer"], str] | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    _free: asyncio.Semaphore | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(404) if self.metrics is None else httpx.Response(200, text=self.metrics(self))
        body = json.loads(request.content) | {"path": request.url.path}
        self._free = self._free or asyncio.Semaphore(self.places)
        how = self.script(len(self.asked))
        self.asked.append(body)
        self.arrived.append(asyncio.get_running_loop().time())
        if how.status != 200:
            return httpx.Response(how.status, json={"error": {"message": "no room"}})
        return httpx.Response(200, stream=_Stream(self._events(how, self._free)))

    async def _events(self, how: Script, free: asyncio.Semaphore) -> AsyncIterator[bytes]:
        def event(choices: list[Any], **more: Any) -> bytes:
            return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"

        async with free:
            yield event([{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for n in range(how.pieces):
                await asyncio.sleep(how.gap if n else how.first)
                yield event([{"delta": {"content": "word "}, "finish_reason": None}])
        if how.cut:
            return
        yield event([{"delta": {}, "finish_reason": "length"}])
        if how.usage:
            yield event([], usage={"prompt_tokens": 7, "completion_tokens": how.pieces * how.tokens})
        yield b"data: [DO"
        yield b"NE]\n\n"


class _Stream(httpx.AsyncByteStream):
    def __init__(self, events: AsyncIterator[bytes]):
        self._events = events

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events
