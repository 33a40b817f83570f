"""What calls of a function were given."""

from collections.abc import Callable
from typing import Any

import pytest


def spied(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """What `note` makes of the arguments of each call from now on. The function still does what it does."""
    seen, original = list[Any](), getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    patch.setattr(owner, name, call)
    return seen
