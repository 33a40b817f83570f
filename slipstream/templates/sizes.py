"""Formats numbers of bytes and seconds as text."""


def size(n: float) -> str:
    """Format bytes: 28324608 -> "28.3 MB" (powers of 1000)."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= limit:
            return f"{n / limit:.1f} {unit}"
    return f"{n:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds: 180 -> "3 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
