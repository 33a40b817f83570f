"""`kernel` and `entry`: Numba's `njit`, with the machine code of entries kept on disk for later processes.

Numba's own cache has two weaknesses here. Processes that compile at the same time may overwrite each other's machine
code, after which a function is loaded under the name of another; so writing takes a lock. And a function counts as
unchanged as long as its own file is, though what it calls may lie in another file; so the digest covers all kernels.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock
from numba import config, njit as _njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, UserWideCacheLocator
from numba.core.ccallback import CFunc

njit: Any = _njit
_log = logging.getLogger("slipstream")

FAST = {"reassoc", "contract", "arcp", "nsz"}  # not nnan, ninf: an overflow must be seen
EXACT = {"contract"}  # where the order of operations decides the result


def _digest() -> str:
    """Of the source of all kernels."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


_SOURCE = _digest()


def _candidates() -> Iterator[Path]:
    """Folders for machine code, best first."""
    chosen: str = config.CACHE_DIR  # type: ignore[attr-defined]  # NUMBA_CACHE_DIR
    if chosen:
        yield Path(chosen)
        return
    yield Path(__file__).parent / "__pycache__"
    home = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home
        yield (Path(home) if home else Path.home() / ".cache") / "slipstream" / "kernels"
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    yield Path(tempfile.gettempdir()) / f"slipstream-kernels-{user}"


def _usable(path: Path) -> bool:
    """Whether files can be kept there, and nobody else may put some there: machine code is loaded from it."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and (path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022):
            return False
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


@functools.cache
def folder() -> Path | None:
    """Where machine code is kept: NUMBA_CACHE_DIR, beside the source, in the user's cache or in the temporary folder,
    whichever can be written first; None if none can."""
    return next(filter(_usable, _candidates()), None)


class _Locator(UserWideCacheLocator):
    """Keeps machine code in `folder()`."""

    def __init__(self, function: Any, file: Any):
        self._py_file, self._lineno = file, function.__code__.co_firstlineno
        self._cache_path = str(folder())


class _Implementation(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012


class _SharedCache(FunctionCache):
    """The compiled versions of one function."""

    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, _SOURCE)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None:
            announce()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        self._impl.locator.ensure_cache_path()
        with FileLock(Path(self.cache_path) / "slipstream-kernels.lock"):
            super().save_overload(sig, data)


@functools.cache
def announce() -> None:
    """Say, once a process, that compiling begins. It is not said where everything is found on disk."""
    kept = "they are kept for the next time" if folder() else "no folder for them can be written, so they are not kept"
    _log.warning("compiling CPU kernels for this processor (about 20 seconds; %s)", kept)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: compiled into its callers, without the interpreter's lock, bounds checks and Python's errors of
    division; `options` as those of `njit`."""
    return njit(error_model="numpy", boundscheck=False, nogil=True, no_cpython_wrapper=True, **options)  # type: ignore[no-any-return]


def callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: what is called through its address, `ready(function)`; kept on disk as entries are."""

    def made(function: Callable[..., Any]) -> Any:
        options = {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
        found: Any = CFunc(function, (signature.args, signature.return_type), {}, options)
        if folder() is not None:
            found._cache = _SharedCache(function)
        return found

    return made


def ready(function: Any) -> int:
    """The address of a callback, compiled if need be."""
    if function.address is None:
        function.compile()
    return int(function.address)


def entry(function: Callable[..., Any]) -> Any:
    """The same for what is called from Python: compiled with all that it calls, and kept on disk. Only kernels may be
    called in it, no other entry: machine code that was kept cannot be compiled into a caller."""
    made: Any = njit(error_model="numpy", boundscheck=False, nogil=True)(function)
    if folder() is not None:
        made._cache = _SharedCache(function)
    return made


@contextlib.contextmanager
def compiling_in_turn() -> Iterator[None]:
    """Around the first calls of entries: processes that start at the same time take turns, since the later ones then
    find on disk what they need."""
    kept = folder()
    if kept is None:
        announce()
        yield
        return
    with FileLock(kept / "slipstream-compiling.lock"):
        yield
