"""Messages to and from an engine thread: plain values, which may cross a pipe between two processes. `Streams` passes
them on to the coroutines of one event loop."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field

from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats, TokenLogprob
from slipstream.errors import ReaderError


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request to an engine thread.

    ids     the prompt, checked.
    params  checked and resolved (see `RequestChecks`).
    rule    name of the rule of verification; None: the model's default.
    prediction  tokens that the output is expected to hold (see `Sequence`).
    """

    ids: list[int]
    params: SamplingParams
    rule: str | None = None
    prediction: Seq[int] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """The tokens that one step added to a request.

    key         key of the request, as it was given to `EngineThread.submit`.
    ids         new output tokens. drafted, proposers (see `Sequence`) and logprobs (None unless asked for) have one
                entry for each of these tokens.
    finish      "stop" or "length" in the last update, else None; `stop_cause` and `stats` come with it.
    error       the error that ended the request; the other fields are then empty.
    started     when the request's first step began, in seconds of `time.monotonic`; ended: when this step ended.
    cached      number of prompt tokens whose KV an earlier request had computed.
    given       whether the ids are a given text to be scored (`Structured.tokens`), not output.
    """

    key: int
    ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    proposers: list[str | None] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    stop_cause: int | str | None = None
    stats: SpecStats | None = None
    error: Exception | None = None
    started: float = 0.0
    ended: float = 0.0
    cached: int = 0
    given: bool = False


@dataclass(slots=True)
class EngineStats:
    """Counts of an engine.

    running, waiting  number of requests.
    kv_usage          share of the KV cache that requests hold, 0 to 1. A cache that grows counts as large as
                      `max_batch` requests of the full context need.
    steps, preemptions, errors  counts of the engine. prefix_queries, prefix_hits: see `SharedPrefixes`.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    preemptions: int = 0
    errors: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """The engine thread's message after a step. dead: why the engine has stopped for good, or None."""

    updates: list[Update]
    stats: EngineStats
    dead: Exception | None = None


MOST_UNREAD = 4096
"""Largest number of updates of a request that wait for their reader; with more, the request is aborted."""


class Streams:
    """Passes reports on to the coroutines that wait for them. submit, abort: as in `EngineThread`.

    on_report  called in the event loop with each report, after its updates were passed on.
    """

    def __init__(self, submit: Callable[[int, RequestSpec], None], abort: Callable[[int], None]):
        self.stats = EngineStats()
        self.dead: Exception | None = None
        self.on_report: Callable[[Report], None] = lambda report: None
        self._submit, self._abort = submit, abort
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
            with suppress(RuntimeError):  # the loop is closed, so no coroutine waits
                self._loop.call_soon_threadsafe(self._take, report)

    async def follow(self, spec: RequestSpec) -> AsyncGenerator[Update, None]:
        """Yield the updates of a request. Closing the iterator aborts the request. Raises the error that ended it."""
        self._loop = asyncio.get_running_loop()
        if self.dead is not None:
            raise self.dead
        key, unread = next(self._keys), asyncio.Queue[Update]()
        self._unread[key] = unread
        ended = False
        try:
            self._submit(key, spec)
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
        """Abort every request; each reader gets the error."""
        for key in list(self._unread):
            self._lose(key, fault)

    def _take(self, report: Report) -> None:
        self.stats = report.stats
        if report.dead is not None:
            self.dead = report.dead
        for update in report.updates:
            unread = self._unread.get(update.key)
            if unread is None:
                continue
            if unread.qsize() >= MOST_UNREAD:
                fault = ReaderError(
                    f"{unread.qsize()} updates of the request were not read",
                    why="the request was ended, because the memory for unread updates is bounded",
                    fix="read the stream faster",
                )
                self._lose(update.key, fault)
            else:
                unread.put_nowait(update)
        if self.dead is not None:
            for key, unread in list(self._unread.items()):  # requests that the engine does not know yet
                unread.put_nowait(Update(key, error=self.dead))
        self.on_report(report)

    def _lose(self, key: int, fault: Exception) -> None:
        unread = self._unread.pop(key)
        while not unread.empty():
            unread.get_nowait()
        unread.put_nowait(Update(key, error=fault))
        if self.dead is None:
            self._abort(key)
