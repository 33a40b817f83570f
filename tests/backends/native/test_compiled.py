"""Machine code is stored for other processes, in a folder that only this user can write, and never under another
function's name. Compiling is logged."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import pytest
from filelock import FileLock
from numba import types

from slipstream.backends.native.kernels import compiled
from tests.backends.native.models import executor

POSIX = pytest.mark.skipif(not hasattr(os, "getuid"), reason="rights of POSIX")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """The state at the start of a process."""
    kept = compiled.folder, compiled.announce  # which tests may replace
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The possible folders for machine code, all empty."""
    folders = {name: tmp_path / name for name in ("package", "home", "temporary")}
    for path in folders.values():
        path.mkdir()
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(compiled, "__file__", str(folders["package"] / "compiled.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folders["home"]))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folders["temporary"]))
    return folders


def refuse(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Make these folders appear read-only, even for a superuser."""
    usable = compiled._usable
    monkeypatch.setattr(compiled, "_usable", lambda path: not any(f in path.parents for f in folders) and usable(path))


def doubled(x):  # type: ignore[no-untyped-def]
    return x + x


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Creates the same kernel again, as another process would."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return lambda: compiled.entry(doubled)


def hits(dispatcher: Any) -> int:
    return sum(dispatcher.stats.cache_hits.values())


def test_a_second_process_need_not_compile(twice: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    first = twice()
    assert first(3) == 6
    assert caplog.text.count("compiling CPU kernels") == 1
    caplog.clear()
    compiled.announce.cache_clear()
    second = twice()
    assert second(3) == 6
    assert (hits(first), hits(second)) == (0, 1)
    assert not caplog.text


def test_callbacks_are_stored_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def nothing(x):  # type: ignore[no-untyped-def]
        pass

    callbacks = [compiled.callback(types.void(types.int64))(nothing) for _ in range(2)]
    assert all(compiled.ready(each) for each in callbacks)
    assert [each.cache_hits for each in callbacks] == [0, 1]


def test_a_change_in_any_kernel_recompiles_all(twice: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    twice()(3)
    monkeypatch.setattr(compiled, "_SOURCE", "another")
    changed = twice()
    assert changed(3) == 6
    assert hits(changed) == 0


def test_the_digest_is_of_every_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    seen = {compiled._digest()}
    for name, content in (("a.py", "1"), ("b.py", "2"), ("a.py", "3")):
        (tmp_path / name).write_text(content)
        seen.add(compiled._digest())
    assert len(seen) == 4


def test_nothing_is_written_while_another_process_writes(twice: Callable[[], Any], tmp_path: Path) -> None:
    entry, done = twice(), threading.Event()
    with FileLock(tmp_path / "slipstream-kernels.lock"):
        thread = threading.Thread(target=lambda: (entry(3), done.set()))
        thread.start()
        assert not done.wait(0.5)
        assert not list(tmp_path.glob("*.nb[ic]"))
    assert done.wait(60)
    thread.join()
    assert list(tmp_path.glob("*.nbc"))


def test_functions_of_the_same_name_are_not_confused(twice: Callable[[], Any]) -> None:
    def another() -> Any:
        def doubled(x):  # type: ignore[no-untyped-def]
            return x - 1

        doubled.__qualname__ = "doubled"
        return compiled.entry(doubled)

    for _ in range(2):
        assert [make()(5) for make in (twice, another)] == [10, 4]


def test_machine_code_is_stored_next_to_the_source_else_in_the_users_cache_or_the_temporary_folder(places, monkeypatch):
    assert compiled.folder() == places["package"] / "__pycache__"
    compiled.folder.cache_clear()
    refuse(monkeypatch, places["package"])
    assert compiled.folder() == places["home"] / "slipstream" / "kernels"
    compiled.folder.cache_clear()
    refuse(monkeypatch, places["home"])
    folder = compiled.folder()
    assert folder.parent == places["temporary"]
    if hasattr(os, "getuid"):
        assert str(os.getuid()) in folder.name
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_without_a_writable_folder_kernels_are_compiled_for_the_process_and_it_is_logged(places, monkeypatch, caplog):
    refuse(monkeypatch, *places.values())
    assert compiled.folder() is None
    assert compiled.entry(lambda x: x + 1)(1) == 2
    with compiled.compile_lock(), compiled.compile_lock():
        pass
    assert caplog.text.count("compiling CPU kernels") == 1
    assert "are not kept" in caplog.text


def test_a_folder_that_the_user_has_chosen_is_the_only_one(places, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "chosen"))
    assert compiled.folder() == tmp_path / "chosen"
    compiled.folder.cache_clear()
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "below"))
    assert compiled.folder() is None


@POSIX
@pytest.mark.parametrize("rights", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(rights: int, places: dict[str, Path]) -> None:
    cache = places["package"] / "__pycache__"
    cache.mkdir()
    cache.chmod(rights)
    assert compiled.folder() == places["home"] / "slipstream" / "kernels"
    cache.chmod(0o755)
    compiled.folder.cache_clear()
    assert compiled.folder() == cache


@POSIX
def test_a_folder_of_another_user_is_refused(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the temporary folder, another user may have created one with our name."""
    refuse(monkeypatch, places["package"], places["home"])
    user = os.getuid()
    foreign = places["temporary"] / f"slipstream-kernels-{user + 1}"
    foreign.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert compiled.folder() is None


TINY_ENTRY = """
import logging, sys
import numpy as np
logging.basicConfig(format="%(message)s")
from slipstream.backends.native.kernels import compiled

def tripled(x):
    return 3 * x[0]

with compiled.compile_lock():
    entry = compiled.entry(tripled)
    assert entry(np.full(4, 7.0)) == 21
print("hit" if sum(entry.stats.cache_hits.values()) else "compiled", "numba.np.arraymath" in sys.modules)
"""


def test_of_two_processes_that_start_together_one_compiles_and_logs_it(tmp_path: Path) -> None:
    """The second one loads the code from disk, without the modules that only compiling needs."""
    script = tmp_path / "script.py"
    script.write_text(TINY_ENTRY)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, script], env=environment, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert sorted(out.strip() for out, _ in outputs) == ["compiled True", "hit False"]
    for out, err in outputs:
        assert ("compiling CPU kernels" in err) == out.startswith("compiled")


def run_together(*work: Callable[[], Any]) -> bool:
    """Whether threads that do this end."""
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return not any(thread.is_alive() for thread in threads)


def test_a_process_that_finds_every_kernel_does_not_wait_for_one_that_compiles() -> None:
    executor()
    if (kept := compiled.folder()) is None:
        pytest.skip("no folder for kernels can be written here")
    with FileLock(kept / "slipstream-compiling.lock"):
        assert run_together(executor)


def test_threads_that_compile_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiles a kernel, and another one when all have compiled the first."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    entries = [compiled.entry(FunctionType(doubled.__code__, {}, f"doubled_{i}")) for i in range(4)]
    both = threading.Barrier(2, timeout=60)

    def work(first: Any, second: Any) -> None:
        with compiled.compile_lock():
            first(3)
            both.wait()
            second(3)

    assert run_together(lambda: work(*entries[:2]), lambda: work(*entries[2:]))
    assert sum(len(each.signatures) for each in entries) == 4
    with FileLock(tmp_path / "slipstream-compiling.lock", timeout=0):
        pass  # it is free


def test_a_process_that_finds_every_kernel_logs_nothing() -> None:
    executor()  # compiles what is not stored yet
    if compiled.folder() is None:
        pytest.skip("no folder for kernels can be written here")
    code = "from tests.backends.native.models import *; executor().forward(chain(0, 0, [3]))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (process.stdout, process.stderr) == ("", "")
