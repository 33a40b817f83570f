"""The table of architectures in docs/support.md."""

from __future__ import annotations

import re
from collections.abc import Mapping

from benchmarks.architectures.worker import (
    CRASHED,
    DIFFERS,
    NOT_BUILT,
    ONE_BY_ONE,
    ONE_EACH,
    OWN,
    PACKED,
    REFUSED,
    Found,
)
from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.protocol import ROOT

PAGE = ROOT / "docs" / "support.md"
FIRST, LAST = "<!-- architectures: made by make architectures -->", "<!-- end of architectures -->"
RUN = {
    OWN: 'our own decoder; also packed, with `executor="transformers"`',
    PACKED: "packed",
    ONE_EACH: "one cache for each sequence",
    ONE_BY_ONE: "one token at a time",
}
"""For each outcome, how models with this outcome run."""
_LONGEST = 160


def replaced(page: str, outcomes: Mapping[str, Found]) -> str:
    """Return the page with its table replaced by the table of these outcomes."""
    before, after = page.split(FIRST)[0], page.split(LAST)[-1]
    return f"{before}{FIRST}\n\n{table(outcomes)}\n\n{LAST}{after}"


def table(by_model: Mapping[str, Found]) -> str:
    import transformers

    outcomes = (*RUN, REFUSED, NOT_BUILT, DIFFERS, CRASHED)
    of = {outcome: [name for name, one in by_model.items() if one.outcome == outcome] for outcome in outcomes}
    running = [[how, len(of[kind]), _names(of[kind], by_model)] for kind, how in RUN.items() if of[kind]]
    parts = [
        f"transformers {transformers.__version__}, {len(by_model)} architectures: {sum(n for _, n, _ in running)} run, "
        f"{len(of[REFUSED])} are refused, {len(of[NOT_BUILT])} were not built.",
        rows(["equal to `generate`", "", "architectures"], running, (0, 2)),
    ]
    for outcome, head in (
        (REFUSED, "refused"), (NOT_BUILT, "not built"), (DIFFERS, "**other text**"), (CRASHED, "**fault**")
    ):  # fmt: skip
        if of[outcome]:
            parts.append(rows([head, "why"], [[f"`{name}`", _why(by_model[name])] for name in of[outcome]], (0, 1)))
    return "\n\n".join(parts)


def listed(page: str) -> dict[str, str]:
    """Read the outcome of each `model_type` from the page: the first cell of its row, or the head of its table."""
    part, where, head = page.split(FIRST)[1].split(LAST)[0], dict[str, str](), ""
    for line in part.splitlines():
        if not line.startswith("| "):
            continue
        cells = line.strip("| ").split(" | ")
        if cells[0].startswith("`"):
            where[cells[0].strip("`")] = head
        elif len(cells) == 3:
            where |= dict.fromkeys(re.findall(r"`([\w.-]+)`", cells[2]), cells[0])
        head = cells[0] if cells[-1] == "why" else head
    return where


def _names(names: list[str], outcomes: Mapping[str, Found]) -> str:
    return ", ".join(f"`{name}`" + (f" ({outcomes[name].note})" if outcomes[name].note else "") for name in names)


def _why(one: Found) -> str:
    """Return the reason in one line, without memory addresses and paths of this machine."""
    words = " ".join(". ".join(part for part in (one.why, one.note) if part).split())
    words = words.replace("<", "&lt;")
    return words if len(words) <= _LONGEST else words[:_LONGEST].rsplit(" ", 1)[0] + " ..."
