"""The worker threads of the kernels, and how many of them a call gets.

Only one pass runs at a time, on all threads. If other processes compete for the cores, passes run on one thread for a
while, because the other threads would wait for a thread that has no core.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from slipstream.backends.native.kernels import records
from slipstream.backends.native.kernels.compiled import ready
from slipstream.backends.native.kernels.layer import one_layer
from slipstream.backends.native.kernels.matrices import run_unit
from slipstream.backends.native.kernels.pool import COUNTER_BYTES, MOST_THREADS, POSTED, STOP, serve
from slipstream.host.machine import available_cores

IDLE_SPINS = 60_000
"""Spins (one or two milliseconds in all) before an idle worker sleeps. This is longer than the host's work between two
passes, so workers are awake when the next pass begins."""

SMALL_BYTES, FEW_ROWS = 4 << 20, 32
"""A pass with fewer bytes of weights over at most FEW_ROWS rows runs on one thread: it ends before other threads would
have started (measured)."""


def available_threads() -> int:
    """Number of threads that can run at once (see `host.machine`), at most MOST_THREADS."""
    return min(available_cores(), MOST_THREADS)


class ContentionMonitor:
    """Detects other processes that compete for the cores. The processor time of passes is then well below wall time
    times threads. Spinning counts as processor time, so an undisturbed pass uses the full wall time of all its threads.

    window     seconds of passes that are measured together; two consecutive windows decide, because one pass may be
               delayed by chance
    min_share  smallest ratio of processor time to wall time times threads without contention
    shortest, longest  seconds for which passes run on one thread after contention; doubled while contention continues
    """

    def __init__(self, window: float = 0.02, min_share: float = 0.75, shortest: float = 0.25, longest: float = 4.0):
        self.window, self.min_share, self.shortest, self.longest = window, min_share, shortest, longest
        self._wall = self._busy = 0.0
        self._suspected = False
        self._pause, self._until = shortest, 0.0

    def threads(self, most: int, now: float) -> int:
        return 1 if now < self._until else most

    def observe(self, wall: float, busy: float, threads: int, now: float) -> None:
        """Record a pass on several threads. wall: seconds of wall time. busy: seconds of processor time of the
        process."""
        self._wall += wall
        self._busy += busy / threads
        if self._wall < self.window:
            return
        short = self._busy < self.min_share * self._wall
        if short and self._suspected:
            self._until = now + self._pause
            self._pause = min(2 * self._pause, self.longest)
        elif not short:
            self._pause = self.shortest
        self._suspected = short
        self._wall = self._busy = 0.0


class WorkerPool:
    """The main thread and `size - 1` workers, which start when they are first needed."""

    def __init__(self, size: int):
        self.size = size
        self.contention = ContentionMonitor()
        self._counters = allocate_aligned(COUNTER_BYTES).view(np.int64)
        self.board = np.zeros(1, records.BOARD)
        self.board["threads"] = self.board["size"] = size
        self.board["counters"], self.board["address"] = self._counters.ctypes.data, self.board.ctypes.data
        self.board["run"], self.board["run_layer"] = ready(run_unit), ready(one_layer)
        self._gates: list[Any] = []
        self._asleep: set[int] = set()
        self._running = self._closed = False
        self._known: set[Any] = set()

    def _start(self) -> None:
        serve(self.board, 0, 0)  # load the code now, which takes longer than a pass
        for number in range(1, self.size):
            self._gates.append(threading.Lock())
            self._gates[-1].acquire()
            name = f"slipstream-kernel-{number}"
            threading.Thread(target=self._serve, args=(number,), name=name, daemon=True).start()

    def _serve(self, number: int) -> None:
        gate = self._gates[number - 1]
        while not serve(self.board, number, IDLE_SPINS):
            self._asleep.add(number)
            if self._running or self._closed:  # a call that began meanwhile did not wake this worker
                self._asleep.discard(number)
            else:
                gate.acquire()

    def _wake(self) -> None:
        if not self._gates:
            self._start()
        for number in tuple(self._asleep):
            self._asleep.discard(number)
            if self._gates[number - 1].locked():
                self._gates[number - 1].release()

    def run(self, function: Callable[..., Any], *args: object, threads: int) -> Any:
        """Call function(board, *args, threads) with at most `threads` threads. The caller holds `kernel_lock()`."""
        threads = min(threads, self.size)
        if threads > 1:
            threads = self.contention.threads(threads, time.perf_counter())
        if threads == 1:
            return function(self.board, *args, threads)
        self._running = True
        try:
            self._wake()
            busy, began = time.process_time(), time.perf_counter()
            result = function(self.board, *args, threads)
            end = time.perf_counter()
        finally:
            self._running = False
        if function in self._known:  # the first call of a kernel loads it
            self.contention.observe(end - began, time.process_time() - busy, threads, end)
        self._known.add(function)
        return result

    def close(self) -> None:
        self._closed = True
        self._counters[STOP // 8] = 1
        self._counters[POSTED // 8] += 1
        if self._gates:
            self._wake()


_pool: WorkerPool | None = None
_calls = threading.RLock()


def kernel_lock() -> threading.RLock:  # type: ignore[valid-type]
    """The lock for calling a kernel or changing the memory that kernels read. Only one Python thread at a time runs a
    pass: two passes on the same cores would not be faster."""
    return _calls


def pool(size: int = 1) -> WorkerPool:
    """The pool of this process, with at least `size` threads. The caller holds `kernel_lock()`."""
    global _pool
    if _pool is None or _pool.size < size:
        if _pool is not None:
            _pool.close()
        _pool = WorkerPool(max(size, available_threads()))
    return _pool


def _after_fork() -> None:
    """Reset pool and lock in a child process. It has none of its parent's threads, one of which may hold the lock."""
    global _pool, _calls
    _pool, _calls = None, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Workspace:
    """Runs a model's kernels, with scratch memory, which grows when a kernel needs more.

    most    maximum number of threads; None: as many as can run at once.
    nbytes  bytes of weights that a pass reads.
    """

    def __init__(self, most: int | None, nbytes: int):
        self.most = min(most or available_threads(), MOST_THREADS)
        self._small = nbytes < SMALL_BYTES
        self._arena = np.empty(1 << 16, np.uint8)

    def threads(self, rows: int) -> int:
        return 1 if self._small and rows <= FEW_ROWS else self.most

    @property
    def experts_read(self) -> int:
        """Number of experts that the last pass read, over all layers, if `kernel_lock()` was held since then."""
        return int(pool(self.most).board[0]["experts_read"])

    def run(self, kernel: Callable[..., Any], *args: object, rows: int) -> int:
        """Call kernel(board, *args, arena, threads) (see `WorkerPool.run`) and return its status. A negative status -n
        means that n bytes are needed: the call is then repeated with a larger arena."""
        while True:
            status = int(pool(self.most).run(kernel, *args, self._arena, threads=self.threads(rows)))
            if status >= 0:
                return status
            self._arena = np.empty(-status + (-status >> 2), np.uint8)


def allocate_aligned(nbytes: int, value: int = 0) -> np.ndarray:
    """Allocate uint8 [nbytes], aligned to 64 bytes and filled with this value. Every thread that runs passes fills one
    slice, so that on NUMA machines pages are on the node whose threads will read them."""
    room = np.empty(nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    memory = room[start : start + nbytes]
    count = available_threads() if nbytes > 1 << 20 else 1
    edges = [nbytes * t // count for t in range(count + 1)]

    def fill(t: int) -> None:
        memory[edges[t] : edges[t + 1]] = value

    with ThreadPoolExecutor(count) if count > 1 else contextlib.nullcontext() as helpers:
        list(helpers.map(fill, range(count)) if helpers else map(fill, range(count)))
    return memory
