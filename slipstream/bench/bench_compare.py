"""Compares two bench results and tests whether a change is statistically significant.

Two runs share no passes, so only the speed-ups over plain decoding are tested, which each run measured itself, and not
the absolute speeds. A change is significant if the 95 % interval of the quotient of both speed-ups excludes 1. On a
logarithmic scale, its width is the root of the sum of the squares of theirs.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.bench.estimates import Estimate, unsure
from slipstream.bench.report_bench import condition
from slipstream.bench.results import Result, read
from slipstream.bench.tables import Column, Table, ends, percent, words
from slipstream.errors import ResultError

CONDITIONS = (
    "machine", "target", "drafts", "dtype", "executor", "device", "quantize", "kv_dtype", "rule", "prompts", "template",
    "versions",
)  # fmt: skip


def compare(first: str | Path, second: str | Path) -> dict[str, Any]:
    """The arms that are in both files, with the change from the first to the second. Raises ResultError."""
    a, b = read(first, "bench"), read(second, "bench")
    left, right = ({_key(arm): arm for arm in found.data["arms"]} for found in (a, b))
    rows = [change(left[key], right[key]) for key in left if key in right]
    if not rows:
        raise ResultError(
            f"{first} and {second} share no drafter, temperature and batch size",
            fix="measure both with the same --drafter, --temperature and --batch",
        )
    return {
        "rows": rows,
        "differences": differences(a, b),
        "missing": [" ".join(map(str, key)) for key in left.keys() ^ right.keys()],
    }


def change(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """One arm in both files."""
    old, new = a["overall"]["speedup"], b["overall"]["speedup"]
    factor = new["value"] / old["value"]
    moved = Estimate(factor, None, None, old.get("note") or new.get("note") or "")
    if old["low"] is not None and new["low"] is not None:
        width = math.exp(math.hypot(*(math.log(e["high"] / e["low"]) / 2 for e in (old, new))))
        moved = Estimate(factor, factor / width, factor * width)
    return {
        "label": a["label"],
        "plain": a["plain"],
        "temperature": a["temperature"],
        "batch": a["batch"],
        "context": a.get("context"),
        "speedup": [old, new],
        "factor": asdict(moved),
        "significant": not a["plain"] and not unsure(asdict(moved)),
        "tokens_per_second": [arm["overall"]["tokens_per_second"]["value"] for arm in (a, b)],
        "acceptance_rate": [arm["overall"]["acceptance_rate"] for arm in (a, b)],
        "mean_acceptance_length": [arm["overall"]["mean_acceptance_length"] for arm in (a, b)],
    }


def changes(rows: list[dict[str, Any]]) -> Table:
    """The rows of `compare` as a table."""
    columns = [words("method"), words("setting"), Column("before", "x"), Column("after", "x"), Column("change (95%)"),
               Column("accept"), words("")]  # fmt: skip
    cells = []
    for row in rows:
        (old, new), factor = (e["value"] for e in row["speedup"]), row["factor"]
        who = row["label"], condition(row)
        if row["plain"]:
            cells.append([*who, "1", "1", "", "", ""])
            continue
        moved = f"{factor['value'] - 1:+.0%} ({ends(factor, lambda end: f'{end - 1:+.0%}', ' to ')})"
        verdict = ("faster" if factor["value"] > 1 else "slower") if row["significant"] else "no change"
        cells.append([*who, old, new, moved, " to ".join(map(percent, row["acceptance_rate"])), verdict])
    return Table("Speed-up over plain decoding in the first file and in the second", columns, cells)


def differences(a: Result, b: Result) -> list[str]:
    """The differences between the conditions, one line each."""
    out = []
    for name in (*CONDITIONS, "commit"):
        old, new = a.provenance.get(name), b.provenance.get(name)
        if old != new:
            out.append(f"{name}: {_short(old, new)} against {_short(new, old)}")
    for name in ("tokens", "sampling"):
        if a.settings[name] != b.settings[name]:
            out.append(f"{name}: {a.settings[name]} against {b.settings[name]}")
    out += [f"{which} file is of an unfinished run" for which, r in (("first", a), ("second", b)) if not r.complete]
    return out


def _key(arm: dict[str, Any]) -> tuple[str, int, float, int, int | None]:
    return arm["label"], arm["draft_tokens"], arm["temperature"], arm["batch"], arm.get("context")


def _short(value: Any, other: Any) -> str:
    """The entries of a mapping that differ from `other`, or the value."""
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{key} {value.get(key)}" for key in value if value.get(key) != other.get(key)) or "nothing"
    return str(value)
