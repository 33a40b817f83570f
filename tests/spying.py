"""Records the arguments of calls."""

from collections.abc import Callable
from typing import Any

import pytest


def spied(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Record calls of the function `owner.name` from now on, which still works as before. Returns a list that receives
    the result of `note(arguments)` for each call."""
    seen, original = list[Any](), getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    patch.setattr(owner, name, call)
    return seen
