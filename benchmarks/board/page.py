"""docs/lossless-board.md, made from the records."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from benchmarks.board.judge import DIFFERS, FAILS, REFUSED, SAME, UNTESTED
from benchmarks.board.lineup import (
    CHECKS,
    CONTROL_CHECKS,
    CONTROLS,
    ENGINES,
    GREEDY_TOKENS,
    HARMLESS,
    LEVEL,
    PLAIN,
    PROMPTS,
    TOKENS,
    Cell,
    Engine,
    rows,
)  # fmt: skip

OPEN = "open"
"""Verdict of a difference that lacks something of what fairness asks for."""
UNRUN = "not run"
"""Verdict of a cell that has no record yet."""
Records = dict[str, dict[str, Any]]

NO_RECORD = "–"
ERROR = re.compile(r"\A[\w.]*(Error|Refused): ")
"""The class of an error, before its message."""
HEAD = """# The lossless board

Does speculation on a CPU keep the output's distribution? Each row compares an engine with and without speculation.
{counts}.

- **same**: no difference was found. **differs**: texts differ, and differ again on new samples (p at most {p:.1g}).
  **open**: they differ, but no report by the maintainers was found. **refused**: the engine reports that it does not
  support this. **fails**: it ends with an error or hangs. {none}: not run yet. "1 of 2": one of two checks was run.
- *shift*: a fault that emits the most likely token too often, by this share of all tokens, would have been found with a
  probability of 0.9. Dates are of 2026. vLLM is a third party's wheel for CPUs.
"""

LEGEND = f"""
How a cell is judged:

- Greedy: {2 * PROMPTS} prompts, {GREEDY_TOKENS} tokens each. Texts must be equal, or first differ where two
  logits are equal up to rounding in float64.
- Sampled: temperatures 1 and 0.7, {PROMPTS} prompts, texts of {TOKENS} tokens. Filters, penalty: top-k, top-p, min-p,
  and a repetition penalty over 16 tokens. Structured: a JSON schema. 8 streams: eight at once, with a prefix cache.
- N-gram methods get longer prompts for penalty and schema, and `ngram-map-k` an empty table for each text.
- If all engines are correct, the probability that any cell says "differs" is at most {LEVEL:g}.
- The model is the embedded pair of 14.2M and 2.4M parameters; "hybrid": a random Qwen3.5 of four layers, three of them
  recurrent, and a draft model with nearly the same weights. vLLM's is a Qwen3-Next in bfloat16
  with experts, an MTP layer, and a draft model without recurrent layers.

What the engines promise:

"""

TAIL = """## Run it

`make lossless-board` runs all cells that have no record in `benchmarks/results/board.json`, and writes this page. To
run a cell again (`--row 1`: a row):

    {example}

With too few draft tokens, a cell is "not tested"; only OpenVINO GenAI's prompt lookup does not report its drafts.

`benchmarks/board/__init__.py` says how to add an engine.
"""


def page(board: dict[str, Any]) -> str:
    records: Records = board["cells"]
    columns = list(dict.fromkeys(check.column for check in CHECKS.values()))
    notes = dict[str, int]()
    p = max((record.get("second_p", 0) for record in records.values() if record["verdict"] == DIFFERS), default=0)
    lines = [HEAD.format(counts=summary(board), none=NO_RECORD, p=p)]
    lines.append(f"| row | engine | method | {' | '.join(columns)} | shift | date | notes |")
    lines.append("|---" * (len(columns) + 6) + "|")
    for number, (engine, method) in enumerate(rows(), 1):
        lines.append(_row(number, engine, method, columns, records, notes))
    lines += ["", "Notes:", "", *(f"{number}. {note}" for note, number in notes.items())] if notes else []
    lines += ["", "Not tested:", "", *(f"- {each.name}: {each.absent}." for each in ENGINES.values() if each.absent)]
    lines += LEGEND.splitlines()
    for engine in ENGINES.values():
        if engine.promises:
            lines.append(f"- {engine.name} ({_versions(engine, records) or 'not run'}): {engine.promises}.")
    lines += ["", *_controls(records)]
    lines += ["", TAIL.format(example="python -m benchmarks.board --cell 'transformers | assisted | T 1'")]
    return "\n".join(lines)


def shown(engine: Engine, method: str, check: str, records: Records) -> dict[str, Any]:
    """The record of a cell as the page shows it: with `known`, or "open", where it differs."""
    record = records.get(Cell(engine.name, method, check).key, {"verdict": UNRUN})
    if record["verdict"] != DIFFERS:
        return record
    known, pending = (of.get(f"{method} | {check}") or of.get(method) for of in (engine.known, engine.pending))
    if known:
        return record | {"known": known}
    return record | {"verdict": OPEN, "known": pending or "no issue or reproduction yet"}


def _row(number: int, engine: Engine, method: str, columns: list[str], records: Records, notes: dict[str, int]) -> str:
    """One row of the table. notes: numbers of the notes of the page so far, to which the row adds its own."""
    each = {check: shown(engine, method, check, records) for check in CHECKS}
    groups = [{name: each[name] for name, check in CHECKS.items() if check.column == column} for column in columns]
    dates = sorted(record["date"] for record in each.values() if "date" in record)
    version = _versions(engine, records).partition(",")[0].rpartition(" ")[2]
    shifts = [record["smallest_shift"] for record in each.values() if record.get("smallest_shift")]
    name = engine.name.split(" (")[0]
    cells = [str(number), f"{name} {version}".strip(), method, *map(_verdicts, groups)]
    marks = [str(notes.setdefault(note, len(notes) + 1)) for note in _notes(each)]
    cells += [f"{max(shifts):.2f}" if shifts else "", "".join(dates[-1:])[5:], ", ".join(marks)]
    return f"| {' | '.join(cells)} |"


def _versions(engine: Engine, records: Records) -> str:
    """The packages that matter, of the engine's latest record."""
    own = [record for key, record in records.items() if key.startswith(f"{engine.name} | ") and "versions" in record]
    latest = max(own, key=lambda record: record["date"], default={"versions": {}})["versions"]
    return ", ".join(f"{name} {version}" for name, version in latest.items() if name not in ("python", "torch"))


def _verdicts(group: dict[str, dict[str, Any]]) -> str:
    """The verdicts of one column of a row, by check where they are not the same."""
    checks = dict[str, list[str]]()
    for check, record in group.items():
        checks.setdefault(record["verdict"], []).append(check)
    checks.pop(UNRUN, None)
    names = {verdict: f"**{verdict}**" if verdict in (DIFFERS, OPEN) else verdict for verdict in checks}
    if not checks:
        return NO_RECORD
    if len(checks) > 1:
        return "; ".join(f"{names[verdict]} ({', '.join(of)})" for verdict, of in checks.items())
    ((verdict, of),) = checks.items()
    return names[verdict] if len(of) == len(group) else f"{names[verdict]} ({len(of)} of {len(group)})"


def _notes(each: dict[str, dict[str, Any]]) -> list[str]:
    """Return the notes of a row's cells, each with the checks that it is about. Causes are notes of their own, because
    rows share them."""
    notes = dict[str, list[str]]()
    causes = dict[str, None]()
    for check, record in each.items():
        if record.get("ties"):
            tie = f"{record['ties']} texts part at a tie of {record['largest_margin']:.1g}"
            notes.setdefault(tie, []).append(check)
        if "known" in record:
            if "request" in record:
                notes.setdefault(record["request"], []).append(check)
            causes[record["known"]] = None
        elif "why" in record:
            why = record["why"]
            why = ERROR.sub("", why).partition(" Fix: ")[0] if record["verdict"] == REFUSED else why.partition(". ")[0]
            notes.setdefault(why, []).append(check)
    ran = sum(record["verdict"] != UNRUN for record in each.values())
    return [*(f"{', '.join(of)}: {note}" if len(of) < ran else note for note, of in notes.items()), *causes]


def _controls(records: Records) -> list[str]:
    lines = [
        "## Controls",
        "",
        "Bugs that engines really had, planted into Slipstream (`benchmarks/board/controls.py` says where each was",
        "seen). The board must find each:",
        "",
        "| planted | looked for by | verdict | p |",
        "|---|---|---|---|",
    ]
    for method in CONTROLS.methods:
        check = CONTROL_CHECKS.get(method, "T 1")
        record = records.get(Cell(CONTROLS.name, method, check).key, {"verdict": UNTESTED})
        p = record.get("second_p", record.get("p", ""))
        name = f"{method} (no bug: must be same)" if method in HARMLESS else method
        lines.append(f"| {name} | {check} | {record['verdict']} | {p} |")
    alone = [
        record for key, record in records.items() if f"| {PLAIN} |" in key and record["verdict"] in (SAME, DIFFERS)
    ]
    alarms = sum(record["verdict"] == DIFFERS for record in alone)
    total = f"Each engine without speculation was compared with itself: {alarms} of {len(alone)} cells differ."
    return [*lines, "", total]


def summary(board: dict[str, Any]) -> str:
    """Count engines, methods and cells that have a verdict."""
    judged = Counter[str]()
    pairs = set[tuple[str, str]]()
    for engine, method in rows():
        for check in CHECKS:
            verdict = shown(engine, method, check, board["cells"])["verdict"]
            if verdict in (SAME, DIFFERS, REFUSED, FAILS, OPEN):
                judged[verdict] += 1
                pairs.add((engine.name, method))
    counts = ", ".join(f"{n} {verdict}" for verdict, n in judged.items())
    return f"{len({name for name, _ in pairs})} engines, {len(pairs)} methods, {judged.total()} cells: {counts}"
