"""`EngineThread`: one thread that steps one engine, for callers in other threads and processes.

        submit(key, spec)  -> a request is prepared while steps run, and joins between two steps
        abort(key)         -> the request is gone after the current step
        deliver(report)    <- once a step, the new tokens of all requests

Preparing a request may take long, because a grammar is compiled. So other threads prepare: one for requests with a
grammar and one for requests without.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from slipstream.core.rules import Rule
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.engine.engine import Engine
from slipstream.engine.messages import EngineStats, Report, RequestSpec, Update
from slipstream.errors import EngineError, SlipstreamError, TargetError

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Prepared:
    """The arguments of `Engine.add`."""

    seq: Sequence
    rule: Rule | None = None
    draft_tokens: int | None = None


@dataclass(eq=False)
class _Live:
    """A request in the engine. sent: number of its output tokens that were delivered."""

    key: int
    seq: Sequence
    sent: int = 0
    started: float = 0.0


Command = Callable[[], list[Update]]
"""Called in the engine's thread between two steps; returns updates for requests that were refused."""


class EngineThread:
    """Steps an engine in a thread. prepare: makes the engine's request from a `RequestSpec`, or raises its error.
    deliver: called in the engine's thread, once a step. It must return soon, because decoding waits for it."""

    def __init__(self, engine: Engine, prepare: Callable[[RequestSpec], Prepared], deliver: Callable[[Report], None]):
        self.engine = engine
        self.dead: Exception | None = None
        """The error after which no request can be decoded any more; None while the engine works."""
        self._prepare, self._deliver = prepare, deliver
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._wanted: set[int] = set()  # submitted, and neither aborted nor ended
        self._live: dict[int, _Live] = {}  # sequence id -> request
        self._guard = threading.Lock()  # protects `dead` and `_wanted`
        # Compiling a grammar may take seconds; the second thread prepares other requests meanwhile.
        self._preparers = [ThreadPoolExecutor(1, thread_name_prefix="slipstream-prepare") for _ in range(2)]
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

    def submit(self, key: int, spec: RequestSpec) -> None:
        """Queue a request under a key that no other request has. Raises EngineError if the engine is dead; any other
        error of the request is delivered."""
        with self._guard:
            if self.dead is not None:
                raise self.dead
            self._wanted.add(key)
            self._preparers[spec.params.structured is not None].submit(self._make, key, spec)

    def abort(self, key: int) -> None:
        """Forget a request; after the current step no update for it is delivered. Unknown keys are ignored."""
        with self._guard:
            self._wanted.discard(key)
        self._commands.put(partial(self._drop, key))

    def close(self) -> None:
        """End every request and the thread, after the current step."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for preparer in self._preparers:
            preparer.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> EngineStats:
        engine, prefixes = self.engine, self.engine.prefixes
        memory, blocks = engine.target.capabilities.memory, kv_blocks(engine.target, engine.max_batch)
        usage = 0.0 if memory is None or blocks is None else min(1.0, memory.usage.used / blocks[1])
        counted = replace(engine.stats, prefix_queries=prefixes.queries, prefix_hits=prefixes.hits)
        return replace(counted, running=engine.running, waiting=engine.waiting, kv_usage=usage)

    # --- in the preparing thread ---------------------------------------------------------------------------------

    def _make(self, key: int, spec: RequestSpec) -> None:
        if key not in self._wanted:
            return
        try:
            request = self._prepare(spec)
        except Exception as fault:
            self._commands.put(partial(self._refuse, key, _deliverable(fault)))
        else:
            self._commands.put(partial(self._add, key, request))

    # --- in the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                refused: list[Update] = []
                for command in self._take_commands():
                    if command is None:
                        self._end(EngineError("the engine was closed", fix="create a new engine"))
                        return
                    refused += command()
                self._deliver(Report([*refused, *self._step()], self.stats()))
        except BaseException as fault:
            log.exception("the engine has stopped")
            self._end(
                EngineError(f"the engine has stopped ({type(fault).__name__}: {fault})", fix="start the server again")
            )

    def _take_commands(self) -> list[Command | None]:
        """Return the commands that have arrived; waits for one if no request is unfinished."""
        taken = [] if self.engine.unfinished else [self._commands.get()]
        while not self._commands.empty():
            taken.append(self._commands.get())
        return taken

    def _add(self, key: int, request: Prepared) -> list[Update]:
        if key not in self._wanted:
            return []
        try:
            self.engine.add(request.seq, request.rule, request.draft_tokens)
        except SlipstreamError as fault:  # the KV cache is too small for the request
            return self._refuse(key, fault)
        self._live[request.seq.id] = _Live(key, request.seq)
        return []

    def _refuse(self, key: int, fault: Exception) -> list[Update]:
        if key not in self._wanted:
            return []
        self._forget(key)
        return [Update(key, error=fault)]

    def _drop(self, key: int) -> list[Update]:
        for live in [live for live in self._live.values() if live.key == key]:
            del self._live[live.seq.id]
            self.engine.abort(live.seq)
        return []

    def _step(self) -> list[Update]:
        if not self.engine.unfinished:
            return []
        began = time.monotonic()
        updates = []
        ran = self.engine.step()
        ended = time.monotonic()
        for seq in ran:
            live = self._live[seq.id]
            if not live.started:
                live.started = began
            if len(seq.proposers) > live.sent or seq.finish:
                updates.append(self._update(live, ended))
        return updates

    def _update(self, live: _Live, ended: float) -> Update:
        seq, first = live.seq, live.sent
        live.sent = len(seq.proposers)
        if seq.finish:
            del self._live[seq.id]
            self._forget(live.key)
        structured = seq.params.structured
        if seq.error is not None:
            return Update(live.key, error=_deliverable(seq.error), started=live.started)
        return Update(
            live.key,
            seq.tokens[seq.prompt + first :],
            seq.was_drafted(first),
            seq.proposers[first:],
            None if seq.params.logprobs is None else seq.logprobs[first:],
            seq.finish,
            seq.stop_cause,
            seq.stats if seq.finish else None,
            started=live.started,
            ended=ended,
            cached=seq.cached,
            given=structured is not None and structured.tokens is not None,
        )

    def _forget(self, key: int) -> None:
        with self._guard:
            self._wanted.discard(key)

    def _end(self, fault: Exception) -> None:
        with self._guard:
            self.dead = fault
            left = sorted(self._wanted)
            self._wanted.clear()
        for live in self._live.values():
            try:
                self.engine.abort(live.seq)
            except Exception:  # the engine is broken; free the other requests
                log.exception("a request could not be freed")
        self._live.clear()
        self._deliver(Report([Update(key, error=fault) for key in left], self.stats(), fault))


def kv_blocks(target: Target, max_batch: int) -> tuple[int, int] | None:
    """Return (tokens in a block of the KV cache, number of blocks). For a cache that grows, the second is the number of
    blocks that `max_batch` requests of full context length need. Return None if each sequence has its own cache."""
    memory = target.capabilities.memory
    return None if memory is None else (memory.block, memory.capacity or max_batch * -(-target.context // memory.block))


def _deliverable(fault: Exception) -> Exception:
    """Return the fault as one of our errors, which can be pickled."""
    if isinstance(fault, SlipstreamError):
        return fault
    return TargetError(f"the request failed ({type(fault).__name__}: {fault})")
