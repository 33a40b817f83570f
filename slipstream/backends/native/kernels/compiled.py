"""`kernel` and `entry`: Numba's `njit`, with the machine code of entries stored on disk for later processes.

Numba's own cache has two weaknesses, which are corrected here. Processes that compile at the same time may overwrite
each other's machine code, so that a function gets the code of another function; so we write under a lock. Numba takes a
function as unchanged if its own file is unchanged, even if it calls functions of a changed file; so our digest covers
all kernels.
"""

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock
from numba import config, njit as _njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, UserWideCacheLocator
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys

from slipstream.checkpoints import weight_formats

njit: Any = _njit
_log = logging.getLogger("slipstream")

FAST = {"reassoc", "contract", "arcp", "nsz"}  # without nnan and ninf: an overflow must be detected
EXACT = {"contract"}  # keeps the order of operations


def _digest() -> str:
    """Digest of the source of all kernels, and of the table of weight formats from which kernels are generated."""
    digest = hashlib.sha256()
    for file in (Path(weight_formats.__file__), *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


_SOURCE = _digest()


def _candidates() -> Iterator[Path]:
    """Yield possible folders for machine code, the best one first."""
    chosen: str = config.CACHE_DIR  # type: ignore[attr-defined]  # NUMBA_CACHE_DIR
    if chosen:
        yield Path(chosen)
        return
    yield Path(__file__).parent / "__pycache__"
    home = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # there is no home folder
        yield (Path(home) if home else Path.home() / ".cache") / "slipstream" / "kernels"
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    yield Path(tempfile.gettempdir()) / f"slipstream-kernels-{user}"


def _usable(path: Path) -> bool:
    """Return whether this user can write files there and nobody else can: machine code is loaded from this folder."""
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
    """Folder for machine code: the first writable one of NUMBA_CACHE_DIR, the source's folder, the user's cache and the
    temporary folder; None if none is writable."""
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
        """Load stored machine code. Numba's own method would first import the implementations of everything that it can
        compile (0.4 s of processor time, more if SciPy is installed). Stored code needs only the reference counts that
        its wrappers call."""
        rtsys.initialize(target_context)
        kept = Path(self.cache_path)
        with self._guard_against_spurious_io_errors():
            overload = self._load_overload(sig, target_context)
            if overload is None and _users[kept] and not _turn(kept).is_locked:
                _turn(kept).acquire()
                overload = self._load_overload(sig, target_context)  # another process may have compiled it meanwhile
        if overload is None:
            announce()
        return overload

    def save_overload(self, sig: Any, data: Any) -> None:
        self._impl.locator.ensure_cache_path()
        with FileLock(Path(self.cache_path) / "slipstream-kernels.lock"):
            super().save_overload(sig, data)


@functools.cache
def announce() -> None:
    """Log once per process that compilation starts. A process that finds all machine code on disk logs nothing."""
    kept = "they are kept for the next time" if folder() else "no folder for them can be written, so they are not kept"
    _log.warning("compiling CPU kernels for this processor (about 20 seconds; %s)", kept)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a function that is compiled into its callers, without the GIL, bounds checks and Python's division
    errors. options: as for `njit`."""
    return njit(error_model="numpy", boundscheck=False, nogil=True, no_cpython_wrapper=True, **options)  # type: ignore[no-any-return]


def callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a function that is called by its address, `ready(function)`. Its code is stored on disk like the
    code of entries."""

    def decorate(function: Callable[..., Any]) -> Any:
        options = {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
        compiled: Any = CFunc(function, (signature.args, signature.return_type), {}, options)
        if folder() is not None:
            compiled._cache = _SharedCache(function)
        return compiled

    return decorate


def ready(function: Any) -> int:
    """The address of a callback; compiles it if necessary."""
    if function.address is None:
        function.compile()
    return int(function.address)


def entry(function: Callable[..., Any]) -> Any:
    """Decorator for a function that is called from Python. It is compiled with everything that it calls, and stored on
    disk. It may call kernels, but no other entry, because stored machine code cannot be compiled into a caller."""
    dispatcher: Any = njit(error_model="numpy", boundscheck=False, nogil=True)(function)
    if folder() is not None:
        dispatcher._cache = _SharedCache(function)
    return dispatcher


@contextlib.contextmanager
def compile_lock() -> Iterator[None]:
    """Context for the first calls of entries. The first entry that is not on disk takes a lock between processes. So if
    several processes start at the same time, one compiles, and the others then load its code. A process with nothing to
    compile does not wait."""
    kept = folder()
    if kept is None:
        announce()
        yield
        return
    with global_compiler_lock:
        _users[kept] += 1
    try:
        yield
    finally:
        with global_compiler_lock:  # Numba holds this lock, too, while it loads entries
            _users[kept] -= 1
            if not _users[kept]:
                _turn(kept).release()


_users: Counter[Path] = Counter()  # threads in `compile_lock`, by folder
_turn = functools.cache(lambda kept: FileLock(kept / "slipstream-compiling.lock", thread_local=False))
