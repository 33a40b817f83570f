"""Results as Markdown: shared code of the benchmark reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence as Seq
from typing import Any

from slipstream.lab.tables import Table

QUIET = 0.03
"""Share of the machine's time that other processes may use before the report has a warning."""

Part = Callable[[dict[str, Any]], list[str]]


def document(results: dict[str, Any], parts: Seq[Part]) -> str:
    """The lines of all parts; empty parts are left out."""
    blocks = ["\n".join(part(results)) for part in parts]
    return "\n\n".join(block for block in blocks if block) + "\n"


def noise(results: dict[str, Any]) -> list[str]:
    """A warning if other processes used the machine during the run."""
    share = results["provenance"]["neighbours"]
    if share is None or share < QUIET:
        return []
    return [f"**Not a quiet machine:** {100 * share:.0f} % of its time went to other work. These figures mean little."]


def versions(source: dict[str, Any]) -> str:
    """The versions of every process."""
    found = (f"{n}: " + ", ".join(f"{p} {v}" for p, v in each.items()) for n, each in source["versions"].items())
    return f"Versions, by process: {'; '.join(found)}."


def rows(heads: Seq[str], body: Iterable[Seq[Any]], left: Collection[int] = (0,)) -> str:
    """A table; columns that are not `left` are numbers."""
    lines = [list(heads), ["---" if i in left else "---:" for i in range(len(heads))], *body]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def table(made: Table) -> str:
    left = [i for i, column in enumerate(made.columns) if column.words]
    return rows([column.heading for column in made.columns], made.texts(), left)
