"""What is compiled is kept for other processes, and never under another function's name."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

import numba
from numba.core.caching import FunctionCache

from slipstream.kernels import compiled


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Makes the same kernel, as another process would."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def doubled(x):  # type: ignore[no-untyped-def]
        return x + x

    return lambda: compiled.entry(doubled)


def hits(made: object) -> int:
    return sum(made.stats.cache_hits.values())  # type: ignore[attr-defined]


def test_a_second_process_need_not_compile(twice: Callable[[], object]) -> None:
    first, second = twice(), twice()
    assert first(3) == second(3) == 6  # type: ignore[operator]
    assert (hits(first), hits(second)) == (0, 1)


def test_a_change_in_any_kernel_makes_all_compile_anew(
    twice: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    twice()(3)  # type: ignore[operator]
    monkeypatch.setattr(compiled, "_SOURCE", "another")
    changed = twice()
    assert changed(3) == 6  # type: ignore[operator]
    assert hits(changed) == 0


def test_nothing_is_written_while_another_process_writes(twice: Callable[[], object], tmp_path: Path) -> None:
    made = twice()
    folder = Path(made._cache.cache_path)  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    done = threading.Event()
    with FileLock(folder / "slipstream-kernels.lock"):
        thread = threading.Thread(target=lambda: (made(3), done.set()))  # type: ignore[operator]
        thread.start()
        assert not done.wait(2)
        assert not list(folder.glob("*.nb[ic]"))
    assert done.wait(60)
    thread.join()
    assert list(folder.glob("*.nbc"))


def test_without_a_folder_to_keep_it_in_a_kernel_is_compiled_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(self: FunctionCache, function: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(FunctionCache, "__init__", nowhere)
    assert compiled.entry(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_long_compilation_is_announced_and_a_short_one_is_not(
    seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_LOADED_WITHIN", 0.05)
    with compiled.readied():
        time.sleep(seconds)
    assert [record.message.split(",")[0] for record in caplog.records] == (
        ["compiling kernels for this processor"] if seconds else []
    )


def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(compiled, "_launch_threads", lambda: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    compiled._start_threads()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    compiled._start_threads()
    assert seen == [compiled.SPINS, "7"]
