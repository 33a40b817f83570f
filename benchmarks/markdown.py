"""Shared code of the benchmark reports in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

from benchmarks.protocol import THREADS

QUIET = 0.03
"""If other processes use a larger share of the machine's time, the report has a warning."""

Part = Callable[[dict[str, Any]], list[str]]


def document(results: dict[str, Any], parts: Seq[Part]) -> str:
    """Join the lines of all parts. Empty parts are left out."""
    blocks = ["\n".join(part(results)) for part in parts]
    return "\n\n".join(block for block in blocks if block) + "\n"


def noise(results: dict[str, Any]) -> list[str]:
    """Return a warning if other processes used the machine during the run."""
    share = results["provenance"]["neighbours"]
    if share is None or share < QUIET:
        return []
    return [f"**Not a quiet machine:** {100 * share:.0f} % of its time went to other work. These figures mean little."]


def run_of(source: dict[str, Any]) -> str:
    """Describe the run: what, when and where."""
    return (
        f"`{source['command']}`, {source['date']}, {source['machine']['cpu']}, {THREADS} threads, commit "
        f"{source['commit']}"
    )


def versions(source: dict[str, Any]) -> str:
    """Describe the package versions of every process."""
    texts = (f"{n}: " + ", ".join(f"{p} {v}" for p, v in each.items()) for n, each in source["versions"].items())
    return f"Versions, by process: {'; '.join(texts)}."


FINEST = 4
"""Largest number of decimals that is printed."""


def beside(value: float, bar: float, digits: int = 2, unit: str = "") -> str:
    """Format `value` with `digits` decimals, or with as many more as are needed to show on which side of `bar` it is:
    if the bar is 1.10, 1.0958 becomes 1.096. A value that is still closer becomes "below 1.1" or "above 1.1"."""
    for count in range(digits, max(digits, FINEST) + 1):
        shown = f"{value:.{count}f}"
        if _side(float(shown), bar) == _side(value, bar):
            return shown + unit
    return f"{'above' if value > bar else 'below'} {bar:g}{unit}"


def bound(bar: float, digits: int = 2, unit: str = "") -> str:
    """Format a bar with `digits` decimals, or with all its decimals if it has more."""
    return max(f"{bar:.{digits}f}", f"{bar:g}", key=len) + unit


def _side(value: float, bar: float) -> int:
    near = abs(value - bar) <= 1e-12 * abs(bar)
    return 0 if near else 1 if value > bar else -1
