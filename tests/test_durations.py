"""What is said of slow tests and of budgets is about tests that exist, and adds up to what `make test` may take."""

from __future__ import annotations

from tests.durations import BUDGETS, HERE, folder_of, function_of, slow_functions

CORES, MINUTES = 2, 10
LEFT_OUT = {"vllm", "mutants", "pinned"}
"""Folders without tests of `make test`."""


def test_each_folder_of_tests_has_a_budget() -> None:
    folders = {path.parent.relative_to(HERE).parts[0] for path in HERE.glob("*/**/test_*.py")} - LEFT_OUT
    assert set(BUDGETS) == {".", *folders}


def test_the_budgets_leave_a_minute_for_lint_and_types() -> None:
    assert sum(BUDGETS.values()) <= 60 * CORES * (MINUTES - 1)


def test_each_slow_test_exists() -> None:
    for function in slow_functions():
        path, *names = function.split("::")
        source = (HERE.parent / path).read_text(encoding="utf-8")
        assert all(f"def {name}(" in source or f"class {name}" in source for name in names), function
    assert slow_functions() == sorted(set(slow_functions()))


def test_folder_and_function_of_a_test() -> None:
    assert [folder_of(test) for test in ("tests/test_llm.py::test_a", "tests/targets/gguf/test_b.py::test_c[d/e]")] == [
        ".", "targets",
    ]  # fmt: skip
    assert function_of("tests/test_llm.py::TestA::test_b[c::d]") == "tests/test_llm.py::TestA::test_b"
