"""examples/ray: the applications can be built. `kill_a_replica.py` runs one (docs/log.md has its result)."""

import ast
import importlib
import sys

import pytest

from tests.examples.served import EXAMPLES

FILES = sorted(EXAMPLES.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_an_example_imports_of_slipstream_exists(path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream."):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("name", ["slipstream_app", "vllm_app"])
def test_the_application_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    if name == "vllm_app":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES / "ray"))
    app = importlib.import_module(name).app
    application = app({"replicas": "2"}) if callable(app) else app
    assert application._bound_deployment.name
    sys.modules.pop(name)
