"""Numbers of bytes as text."""

from __future__ import annotations


def size(n: float) -> str:
    """28324608 -> "28.3 MB" (powers of 1000)."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= limit:
            return f"{n / limit:.1f} {unit}"
    return f"{n:.0f} B"
