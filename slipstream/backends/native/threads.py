"""The worker threads of the kernels, and how many of them a call gets.

Calls take turns: one pass at a time has all threads. Passes that other processes keep from running get one thread for a
while, because a thread without a core only makes the others wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.backends.native.kernels import records
from slipstream.backends.native.kernels.compiled import ready
from slipstream.backends.native.kernels.layer import one_layer
from slipstream.backends.native.kernels.pool import COUNTER_BYTES, MOST_THREADS, POSTED, STOP, serve
from slipstream.backends.native.kernels.units import run_unit

IDLE_TURNS = 60_000
"""Turns (one or two milliseconds) that an idle worker waits for work before it sleeps: longer than the host's work
between two passes, so that workers are awake when the next one begins."""

SMALL_BYTES = 4 << 20
"""Weights below which a pass over a few rows is done before other threads have begun (measured), ..."""

FEW_ROWS = 32
"""... and the most rows for which that holds."""


def available_threads() -> int:
    """Threads that can run at once: OMP_NUM_THREADS if it is set, else the cores (not hyperthreads) that this process
    may use, but no more than the processor time that its container is allowed."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdigit() and int(asked) > 0:
        return min(int(asked), MOST_THREADS)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota = container_quota()
    count = len(_cores(allowed))
    if quota is not None:
        count = min(count, max(1, int(quota)))
    return max(1, min(count, MOST_THREADS))


def _cores(cpus: set[int]) -> set[str]:
    """Of logical processors, the physical cores; each counts by itself where the system does not tell."""
    found = set()
    for cpu in cpus:
        try:
            found.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            found.add(str(cpu))
    return found


def container_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Processors' worth of time that the control group allows (v2 `cpu.max`, v1 `cpu.cfs_quota_us`); None: no limit."""
    try:
        groups = [line.split(":", 2)[2] for line in own.read_text().splitlines() if line.startswith("0::")]
    except (OSError, IndexError):
        groups = []
    least: float | None = None
    for group in {"/", *groups}:
        at = root / group.strip("/")
        for folder in (at, *(p for p in at.parents if p == root or root in p.parents)):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                quota, period = (folder / "cpu.max").read_text().split()[:2]
                if quota != "max":
                    least = min(least or float("inf"), int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = (root / "cpu" / "cpu.cfs_quota_us").read_text()
        if int(quota) > 0:
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
            least = min(least or float("inf"), int(quota) / int(period))
    return least


class Company:
    """Tells whether other processes take the cores: then the processor time of passes is well below what their threads
    could have had. Spinning counts as processor time, so an undisturbed pass has all of it.

    window    seconds of passes that are judged together; two such windows decide, because a single pass may be held up
    enough    share of the possible processor time below which there is company
    shortest, longest  seconds that passes then run on one thread: doubled each time that the company is still there
    """

    def __init__(self, window: float = 0.02, enough: float = 0.75, shortest: float = 0.25, longest: float = 4.0):
        self.window, self.enough, self.shortest, self.longest = window, enough, shortest, longest
        self._wall = self._busy = 0.0
        self._suspected = False
        self._pause, self._until = shortest, 0.0

    def threads(self, most: int, now: float) -> int:
        """Threads for the next pass."""
        return 1 if now < self._until else most

    def observe(self, wall: float, busy: float, threads: int, now: float) -> None:
        """A pass on several threads took so many seconds, and the process so many of processor time."""
        self._wall += wall
        self._busy += busy / threads
        if self._wall < self.window:
            return
        short = self._busy < self.enough * self._wall
        if short and self._suspected:
            self._until = now + self._pause
            self._pause = min(2 * self._pause, self.longest)
        elif not short:
            self._pause = self.shortest
        self._suspected = short
        self._wall = self._busy = 0.0


class WorkerPool:
    """The main thread and `size - 1` workers, which begin when they are first needed."""

    def __init__(self, size: int):
        self.size = size
        self.company = Company()
        room = np.zeros(COUNTER_BYTES + 64, np.uint8)
        start = -room.ctypes.data % 64
        self._counters = room[start : start + COUNTER_BYTES].view(np.int64)
        self.board = np.zeros(1, records.BOARD)
        self.board["threads"] = self.board["size"] = size
        self.board["counters"], self.board["address"] = self._counters.ctypes.data, self.board.ctypes.data
        self.board["run"], self.board["run_layer"] = ready(run_unit), ready(one_layer)
        self._gates: list[Any] = []
        self._asleep: set[int] = set()
        self._running = self._closed = False
        self._known: set[Any] = set()

    def _start(self) -> None:
        serve(self.board, 0, 0)  # loads the code, which takes longer than a pass
        for number in range(1, self.size):
            self._gates.append(threading.Lock())
            self._gates[-1].acquire()
            name = f"slipstream-{number}"
            threading.Thread(target=self._serve, args=(number,), name=name, daemon=True).start()

    def _serve(self, number: int) -> None:
        gate = self._gates[number - 1]
        while not serve(self.board, number, IDLE_TURNS):
            self._asleep.add(number)
            if self._running or self._closed:  # since then, and did not see that this worker needs to be woken
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

    def run(self, function: Callable[..., Any], *args: Any, threads: int) -> Any:
        """function(board, *args, threads), with `threads` or fewer of the pool. The caller holds `calls()`."""
        threads = min(threads, self.size)
        if threads > 1:
            threads = self.company.threads(threads, time.perf_counter())
        if threads == 1:
            return function(self.board, *args, threads)
        self._running = True
        try:
            self._wake()
            busy, began = time.process_time(), time.perf_counter()
            found = function(self.board, *args, threads)
            end = time.perf_counter()
        finally:
            self._running = False
        if function in self._known:  # the first call of a kernel loads it
            self.company.observe(end - began, time.process_time() - busy, threads, end)
        self._known.add(function)
        return found

    def close(self) -> None:
        """End the workers."""
        self._closed = True
        self._counters[STOP // 8] = 1
        self._counters[POSTED // 8] += 1
        if self._gates:
            self._wake()


_pool: WorkerPool | None = None
_calls = threading.RLock()


def calls() -> threading.RLock:  # type: ignore[valid-type]
    """Held by whoever calls a kernel or changes what kernels read: calls of several Python threads take turns. Two
    passes on the same cores would gain nothing."""
    return _calls


def pool(size: int = 1) -> WorkerPool:
    """The pool of this process, of at least `size` threads. The caller holds `calls()`."""
    global _pool
    if _pool is None or _pool.size < size:
        if _pool is not None:
            _pool.close()
        _pool = WorkerPool(max(size, available_threads()))
    return _pool


def _after_fork() -> None:
    """A child has none of its parent's threads, and locks may be held by them: it begins anew."""
    global _pool, _calls
    _pool, _calls = None, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Threads:
    """How many threads a model's calls take. most: None for as many as can run at once; nbytes: of the weights that a
    pass reads."""

    def __init__(self, most: int | None, nbytes: int):
        self.most = min(most or available_threads(), MOST_THREADS)
        self._small = nbytes < SMALL_BYTES

    def of(self, rows: int) -> int:
        return 1 if self._small and rows <= FEW_ROWS else self.most

    def run(self, function: Callable[..., Any], *args: Any, rows: int) -> Any:
        """function(board, *args, threads): see `WorkerPool.run`."""
        return pool(self.most).run(function, *args, threads=self.of(rows))


class Workspace:
    """Runs kernels with memory to work in, which grows as they ask for it."""

    def __init__(self, threads: Threads):
        self.threads, self._arena = threads, np.empty(1 << 16, np.uint8)

    def run(self, kernel: Callable[..., Any], *args: Any, rows: int) -> int:
        """kernel(board, *args, arena, threads), again with a larger arena where its status is negative: so many bytes
        are needed. Returns its status."""
        while True:
            status = int(self.threads.run(kernel, *args, self._arena, rows=rows))
            if status >= 0:
                return status
            self._arena = np.empty(-status + (-status >> 2), np.uint8)


def placed(values: np.ndarray) -> np.ndarray:
    """A copy, uint8, at an address that is a multiple of 64 bytes. As many threads as run a pass write one slice each,
    so that on machines with several memories it is spread over them as it will be read."""
    values = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    room = np.empty(values.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    made = room[start : start + values.nbytes]
    count = available_threads() if values.nbytes > 1 << 20 else 1
    edges = [values.nbytes * t // count for t in range(count + 1)]

    def copy(t: int) -> None:
        made[edges[t] : edges[t + 1]] = values[edges[t] : edges[t + 1]]

    with ThreadPoolExecutor(count) if count > 1 else contextlib.nullcontext() as helpers:
        list(helpers.map(copy, range(count)) if helpers else map(copy, range(count)))
    return made
