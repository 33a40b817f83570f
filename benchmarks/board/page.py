"""docs/lossless-board.md, made from the records."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.board.judge import DIFFERS, REFUSED, SAME, UNTESTED, level_of_cell
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
HEAD = """# The lossless board

Does speculation on a CPU keep the output's distribution? Each row compares an engine with and without speculation.
{counts}.

- **same**: no difference was found. **differs**: texts differ, and differ again on new samples. **refused**: the engine
  reports that it does not support this. {none}: not run yet. "1 of 2": only one of two checks was run.
- *shift*: a fault that emits the most likely token too often, by this share of all tokens, would have been found with a
  probability of 0.9. Dates are of 2026.
"""

LEGEND = f"""
How a cell is judged:

- Greedy: {2 * PROMPTS} prompts, {GREEDY_TOKENS} tokens each. Texts must be equal, or first differ where two
  logits are equal up to rounding in float64.
- Sampled: temperatures 1 and 0.7, {PROMPTS} prompts, texts of {TOKENS} tokens. Filters, penalty: top-k, top-p, min-p,
  and a repetition penalty over 16 tokens. Structured: a JSON schema. 8 streams: eight at once, with a prefix cache.
- N-gram methods would draft too little: they get longer prompts for penalty and schema, and
  `ngram-map-k` an empty table for each text.
- If all engines are correct, the probability that any cell says "differs" is at most {LEVEL:g}
  ({level_of_cell():.1e} per cell).
- The model is the embedded pair of 14.2M and 2.4M parameters; "hybrid": a random Qwen3.5 of four layers, three of them
  recurrent, and a draft model with nearly the same weights.

What the engines promise:

"""

TAIL = """## Run it

`make lossless-board` runs all cells that have no record in `benchmarks/results/board.json`, and writes this page. To
run one row or one cell again:

    python -m benchmarks.board --row 1
    {example}

If an engine crashes, hangs for 20 minutes or breaks the contract below, its cells say so. With too few
draft tokens, a cell is "not tested"; only OpenVINO GenAI's prompt lookup does not report its drafts.

## Add an engine

Write a module of about 60 lines like `benchmarks/board/transformers_engine.py`, which runs in the engine's own
environment and answers three operations on its standard input:

- `info()` returns `versions`: the versions of the relevant packages.
- `load(method, target, draft, streams, prefix_cache)` loads the models. `method` is "plain" or one of the engine's
  methods of speculation. At most `streams` texts are decoded at once. `prefix_cache`: keep states of prompts.
- `generate(ids, tokens, sampling, schema, seeds)` returns `texts`, one list of token ids for each seed: exactly
  `tokens` ids, or fewer with the JSON schema `schema`. `sampling` is empty for greedy decoding, else it has fields such
  as `top_k`. `drafted` is the number of draft tokens, if the engine reports it.
  For a method or parameter that the engine lacks, raise NotImplementedError: the cell is then "refused".

Then add an `Engine` to `benchmarks/board/lineup.py`, with the promise of its documentation. A difference is "open"
until the engine's field `known` names the maintainers' issue or fix, says that the newest version was tried, and names
a program of at most 15 lines, without Slipstream, that reproduces it.
"""


def page(board: dict[str, Any]) -> str:
    records: Records = board["cells"]
    columns = list(dict.fromkeys(check.column for check in CHECKS.values()))
    notes = dict[str, int]()
    lines = [HEAD.format(counts=summary(board), none=NO_RECORD)]
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
    name, *more = engine.name.split(" (", 1)
    cells = [str(number), " (".join([f"{name} {version}".strip(), *more]), method, *map(_verdicts, groups)]
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
            p = f"p = {record['second_p']:.1g}" if "second_p" in record else record["request"]
            notes.setdefault(p, []).append(check)
            causes[record["known"]] = None
        elif "why" in record:
            notes.setdefault(record["why"].removeprefix("NotImplementedError: "), []).append(check)
    return [*(f"{', '.join(checks)}: {note}" for note, checks in notes.items()), *causes]


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
            if verdict in (SAME, DIFFERS, REFUSED, OPEN):
                judged[verdict] += 1
                pairs.add((engine.name, method))
    counts = ", ".join(f"{n} {verdict}" for verdict, n in judged.items())
    return f"{len({name for name, _ in pairs})} engines, {len(pairs)} methods, {judged.total()} cells: {counts}"
