"""The official clients, `clients.openai` and `clients.anthropic`. A client is imported when a test first uses it,
because the import takes many seconds, and would slow down the collection of tests."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("openai", "anthropic"):
        return importlib.import_module(name)
    raise AttributeError(name)
