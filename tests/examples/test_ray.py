"""examples/ray: what the applications import exists. `kill_a_replica.py` runs one (docs/log.md has its result)."""

import ast
import importlib

import pytest

from tests.examples.served import EXAMPLES

FILES = sorted(EXAMPLES.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_an_example_imports_of_slipstream_exists(path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream."):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)
