"""Fixtures of the native backend's tests, which are skipped without Numba."""

import importlib.util

import pytest

NUMBA = importlib.util.find_spec("numba") is not None

collect_ignore_glob = [] if NUMBA else ["test_*.py"]


@pytest.fixture(autouse=NUMBA)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every call all its threads, even on a busy machine."""
    from slipstream.backends.native.threads import ContentionMonitor

    monkeypatch.setattr(ContentionMonitor, "threads", lambda self, most, now: most)
