"""`kernel` and `entry`: Numba's `njit`, with what it compiles kept on disk so that later processes need not compile it
again.

Numba's own cache has two weaknesses here. Processes that compile at the same time may write over each other's machine
code, after which a function is loaded under the name of another; so writing takes a lock. And a function is taken for
unchanged as long as its own file is, though what it calls may lie in another; so all files of kernels count.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.np.ufunc.parallel import _launch_threads

_log = logging.getLogger("slipstream")

_LOADED_WITHIN = 2.0
"""Seconds: kernels that are on disk are there sooner."""

SPINS = "15000"
"""How often a thread that waits for work looks for it before it sleeps: long enough to be awake after what one thread
does between two products."""

FAST = {"reassoc", "contract", "arcp", "nsz"}  # not nnan, ninf: what overflowed must be seen
EXACT = {"contract"}  # where the order of operations is what makes it accurate


def _digest() -> str:
    """Of the source of all kernels."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


_SOURCE = _digest()


class _SharedCache(FunctionCache):
    """The compiled versions of one function. `folder`: where such are kept, None if nowhere."""

    folder: Path | None = None

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        _SharedCache.folder = Path(self.cache_path)
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, _SOURCE)

    def save_overload(self, sig: Any, data: Any) -> None:
        self._impl.locator.ensure_cache_path()
        with FileLock(Path(self.cache_path) / "slipstream-kernels.lock"):
            super().save_overload(sig, data)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: compiled into its callers, without the interpreter's lock, checks of bounds and Python's errors of
    division; `options` as those of `njit`."""
    return njit(error_model="numpy", boundscheck=False, nogil=True, **options)  # type: ignore[no-any-return]


def entry(function: Callable[..., Any]) -> Any:
    """The same for what is called from outside: compiled with all that it calls, and kept on disk. Only kernels may be
    called in it, no other entry: machine code that was kept cannot be compiled into a caller."""
    made = kernel()(function)
    with contextlib.suppress(RuntimeError):  # no folder to keep it in: each process compiles for itself
        made._cache = _SharedCache(function)
    return made


def _start_threads() -> None:
    """Start Numba's threads, which by default (GNU's OpenMP) spin for milliseconds when they have done their share, on
    a core that something else may want next. What the user has set stays as it is."""
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return _launch_threads()
    os.environ["GOMP_SPINCOUNT"] = SPINS  # read when the library is loaded
    try:
        _launch_threads()
    finally:
        del os.environ["GOMP_SPINCOUNT"]


@contextlib.contextmanager
def readied() -> Iterator[None]:
    """Around the first calls of kernels: says so where they take their time, being compiled. Processes that begin at
    the same time take turns, since the later ones then find on disk what they need."""
    notice = threading.Timer(
        _LOADED_WITHIN,
        _log.warning,
        ("compiling kernels for this processor, which takes up to a minute; they are kept for the next time",),
    )
    notice.daemon = True
    notice.start()
    with contextlib.ExitStack() as stack:
        stack.callback(notice.cancel)
        if _SharedCache.folder is not None:
            _SharedCache.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(_SharedCache.folder / "slipstream-compiling.lock"))
        _start_threads()
        yield
