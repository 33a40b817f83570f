"""docs/lossless-board.md, made from the records."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.board.judge import DIFFERS, SAME, UNTESTED, level_of_cell
from benchmarks.board.lineup import CHECKS, CONTROLS, ENGINES, LEVEL, PLAIN, PROMPTS, TOKENS, Cell, Engine

HEAD = f"""# The lossless board

Speculative decoding promises the text of the model without it. This page says which engine keeps that promise, on a
CPU. Each row compares an engine that speculates with the same engine without. `make lossless-board` fills it, the page
is written from `benchmarks/results/board.json`, and every row has the date of its last cell.

- **same**: greedy texts are equal, or part where two logits are as good as equal in float64; samples show no
  difference. The notes name the shift of total variation that samples would have shown with probability 0.9.
- **differs**: with the p-value, and the smallest request that shows it. All cells together say so of right engines
  with a probability of at most {LEVEL:g}: {level_of_cell():.1e} for each.
- **refused**: the engine says that it does not do this. **not tested**: with the reason.

What the board does not know: whether an engine drafted anything. One that ignores the option is "same".

The model is the embedded pair of 14.2M and 2.4M parameters. Greedy: {2 * PROMPTS} prompts, {4 * TOKENS} tokens each.
Samples: {PROMPTS} prompts, texts of {TOKENS} tokens.
"""

TAIL = """## Repeat a row

    {example}

runs one cell from nothing. Without `--cell`, `python -m benchmarks.board` runs all cells that have no record, and goes
on where it was interrupted.

## Add an engine

Write a module as `benchmarks/board/transformers_engine.py`, about 60 lines, that runs in the engine's own environment
and answers three operations on its standard input (`benchmarks/protocol.py`):

- `info()`: `versions`, of the packages that matter.
- `load(method, target, draft)`: load the checkpoint `target`. `method` is "plain", or one of its ways of speculating.
- `generate(ids, tokens, sampling, seeds)`: `texts`, one list of token ids for each seed, exactly `tokens` long.
  `sampling` is empty for greedy decoding, else fields as `temperature`, `top_k`, `top_p`, `min_p`,
  `repetition_penalty`. What the engine does not do raises NotImplementedError: the cell is "refused".

Then add an `Engine` to `benchmarks/board/lineup.py`, with what its documentation promises. Before a difference is
published: the maintainers' issue or fix is linked, the newest version is tried, and a reproduction of at most 15 lines
needs no Slipstream.
"""


def page(board: dict[str, Any]) -> str:
    records = board["cells"]
    lines = [
        HEAD,
        "| engine | method | greedy | sampled | filters and penalty | date | notes |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine in ENGINES.values():
        if engine.absent:
            lines.append(f"| {engine.name} | | {UNTESTED} | {UNTESTED} | {UNTESTED} | | {engine.absent} |")
        for method in engine.methods:
            lines.append(_row(engine, method, records))
    lines += ["", *_controls(records)]
    lines += ["", TAIL.format(example="python -m benchmarks.board --cell 'transformers | assisted | T 1'")]
    return "\n".join(lines)


def _row(engine: Engine, method: str, records: dict[str, Any]) -> str:
    each = {check: records.get(Cell(engine.name, method, check).key, {"verdict": UNTESTED}) for check in CHECKS}
    groups = [[each["greedy"]], [each["T 1"], each["T 0.7"]], [each[c] for c in ("top-k", "top-p", "min-p", "penalty")]]
    dates = sorted(record["date"] for record in each.values() if "date" in record)
    versions = next((record["versions"] for record in each.values() if "versions" in record), {})
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if name not in ("python", "torch"))
    said, notes = " | ".join(map(_verdicts, groups)), _notes(engine, method, each)
    return f"| {engine.name}: {shown} | {method} | {said} | {''.join(dates[-1:])} | {notes} |"


def _verdicts(group: list[dict[str, Any]]) -> str:
    counts = Counter(record["verdict"] for record in group)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def _notes(engine: Engine, method: str, each: dict[str, dict[str, Any]]) -> str:
    notes = []
    shifts = [record["smallest_shift"] for record in each.values() if "smallest_shift" in record]
    if shifts:
        notes.append(f"shift seen from {max(shifts):.2f}")
    for check, record in each.items():
        if record.get("ties"):
            notes.append(f"{check}: {record['ties']} texts part at a tie of {record['largest_margin']:.1g}")
        if record["verdict"] == DIFFERS:
            p = f"p = {record['second_p']:.1g}" if "second_p" in record else record["request"]
            notes.append(f"{check}: {p}; {engine.known.get(method) or engine.known.get('') or 'no issue known'}")
        elif "why" in record:
            notes.append(f"{check}: {record['why'][:120]}")
    return "; ".join([*notes, f"promises {engine.promises}" if engine.promises else ""]).replace("|", "/")


def _controls(records: dict[str, Any]) -> list[str]:
    lines = [
        "## Controls",
        "",
        "Bugs that engines really had, planted into Slipstream (`benchmarks/board/controls.py`):",
        "",
    ]
    lines += ["| planted | found by |", "|---|---|"]
    for method in CONTROLS.methods:
        asked = {check: records.get(Cell(CONTROLS.name, method, check).key) for check in CHECKS}
        found = [check for check, record in asked.items() if record and record["verdict"] == DIFFERS]
        lines.append(f"| {method} | {', '.join(found) or ('nothing' if any(asked.values()) else UNTESTED)} |")
    alone = [
        record for key, record in records.items() if f"| {PLAIN} |" in key and record["verdict"] in (SAME, DIFFERS)
    ]
    alarms = sum(record["verdict"] == DIFFERS for record in alone)
    return [*lines, "", f"Each engine without speculation against itself: {alarms} alarms in {len(alone)} cells."]
