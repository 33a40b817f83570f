"""The places of tests and their helpers; which tests are slow, and what `make test` may take."""

import re

from tests.durations import BUDGETS, HERE, slow_functions

IMPORT = re.compile(r"^\s*(?:from|import) tests\b.*\btest_\w+", re.MULTILINE)
CORES, MINUTES = 2, 10
LEFT_OUT = {"vllm", "mutants", "pinned"}
"""Folders without tests of `make test`."""


def test_helpers_are_in_helper_modules() -> None:
    """No test module imports another: shared helpers are in separate modules."""
    imported = {path.name: IMPORT.findall(path.read_text(encoding="utf-8")) for path in HERE.rglob("*.py")}
    assert {name: lines for name, lines in imported.items() if lines} == {}


def test_each_folder_of_tests_has_a_budget_and_they_leave_a_minute_for_lint_and_types() -> None:
    folders = {path.parent.relative_to(HERE).parts[0] for path in HERE.glob("*/**/test_*.py")} - LEFT_OUT
    assert set(BUDGETS) == {".", *folders}
    assert sum(BUDGETS.values()) <= 60 * CORES * (MINUTES - 1)


def test_each_slow_test_exists() -> None:
    everywhere = "".join(file.read_text(encoding="utf-8") for file in sorted(HERE.rglob("*.py")))
    defined = set(re.findall(r"^\s*(?:async )?(?:def|class) (\w+)", everywhere, re.MULTILINE))
    for function in slow_functions():
        path, *names = function.split("::")
        assert (HERE.parent / path).exists(), function
        assert defined.issuperset(names), function  # anywhere: a class may inherit its tests
    assert slow_functions() == sorted(set(slow_functions()))


def test_the_page_of_helpers_names_each() -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    named = ("test_", "conftest", "__")
    helpers = {path.name for path in HERE.rglob("*.py") if not path.name.startswith(named)}
    assert {name for name in helpers if name not in page} == set()
    assert set(re.findall(r"\w+\.py", page)) <= {path.name for path in HERE.rglob("*.py")}
