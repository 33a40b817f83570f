"""The places of tests and their helpers."""

import re
from pathlib import Path

HERE = Path(__file__).parent
IMPORT = re.compile(r"^\s*(?:from|import) tests\b.*\btest_\w+", re.MULTILINE)


def test_helpers_are_in_helper_modules() -> None:
    """No test module imports another: shared helpers are in separate modules."""
    found = {path.name: IMPORT.findall(path.read_text(encoding="utf-8")) for path in HERE.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}
