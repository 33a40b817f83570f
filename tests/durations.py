"""Durations of tests. Slow tests are listed in slow.txt and left out by `make check`; each folder of tests has a
budget.

    pytest --folder-times    shows the seconds of each folder beside its budget; fails if a folder takes over twice as
    many pytest --record-slow     writes slow.txt: the functions whose tests took at least `SLOW` seconds together

Seconds are processor time, child processes included, so they hardly depend on other work of the machine. They are
checked only with one of these options, so that no test fails because the machine is busy.
"""

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SLOW_TESTS = HERE / "slow.txt"

SLOW = 0.3
"""A test function is slow if it takes this many seconds. Fixtures do not count, because the first test that uses a
fixture would pay for it."""

BUDGETS = {
    ".": 100, "backends": 100, "benchmarks": 25, "checkpoints": 15, "cli": 100, "core": 50, "drafters": 80,
    "end_to_end": 40, "engine": 35, "examples": 5, "grammar": 40, "heads": 20, "host": 5, "integrations": 25, "kv": 5,
    "measure": 55, "recipes": 20, "server": 150, "targets": 90, "theory": 10, "tokens": 15, "training": 50,
    "verify": 40, "zoo": 5,
}  # fmt: skip
"""Seconds that the tests of each folder may take. "." stands for the modules in tests/ itself."""

_folders: Counter[str] = Counter()
_functions: Counter[str] = Counter()
"""Seconds of this run by test function."""

_spent = 0.0
"""Processor time of this process when the last report was made."""


def folder_of(test: str) -> str:
    """Return the folder of a test: "server" for "tests/server/test_x.py::test_y"."""
    parts = test.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "."


def function_of(test: str) -> str:
    """Return the name of a test without its parameters."""
    return test.split("[")[0]


def slow_functions() -> list[str]:
    """Return the test functions in slow.txt."""
    return SLOW_TESTS.read_text(encoding="utf-8").splitlines()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--folder-times", action="store_true", help="Compare the seconds of each folder with its budget.")
    parser.addoption("--record-slow", action="store_true", help="Write tests/slow.txt.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(slow_functions())
    for item in items:
        if function_of(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    global _spent
    report = yield
    before, _spent = _spent, sum(os.times()[:4])
    report.processor = _spent - before  # pytest-xdist sends it with the report to the main process
    return report


def pytest_runtest_logreport(report: Any) -> None:
    seconds = getattr(report, "processor", 0.0)  # a process that was killed reports none
    _folders[folder_of(report.nodeid)] += seconds
    _functions[function_of(report.nodeid)] += seconds if report.when == "call" else 0.0


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--record-slow"):
        not_run = [function for function in slow_functions() if function not in _functions]
        slow = [function for function, seconds in _functions.items() if seconds >= SLOW]
        SLOW_TESTS.write_text("\n".join(sorted([*slow, *not_run])) + "\n", encoding="utf-8")
    if config.getoption("--folder-times"):
        terminalreporter.section("seconds of processor time, and budgets")
        for folder, seconds in _folders.most_common():
            terminalreporter.write_line(f"{folder:14} {seconds:7.1f} {BUDGETS.get(folder, 0):5}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    asked = session.config.getoption("--folder-times") and not hasattr(session.config, "workerinput")
    if asked and any(seconds > 2 * BUDGETS.get(folder, 0) for folder, seconds in _folders.items()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
