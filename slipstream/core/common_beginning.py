"""How far two texts are the same."""

from __future__ import annotations

from collections.abc import Iterable


def common_beginning(a: Iterable[object], b: Iterable[object]) -> int:
    """Number of items with which both begin."""
    count = 0
    for mine, theirs in zip(a, b, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
