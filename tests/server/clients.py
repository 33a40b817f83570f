"""The official clients, `clients.openai` and `clients.anthropic`. Each is imported when a test first uses it: it takes
many seconds, which no process should need to collect the tests."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("openai", "anthropic"):
        return importlib.import_module(name)
    raise AttributeError(name)
