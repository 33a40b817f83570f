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
"""Verdict of a difference that is not published yet: something of what fairness asks for is missing."""
UNRUN = "not run"
"""Verdict of a cell that has no record yet."""
Records = dict[str, dict[str, Any]]

HEAD = f"""# The lossless board

Speculative decoding promises the text of the model without it. This page says which engine keeps that promise, on a
CPU. Each row compares an engine that speculates with the same engine without.

- **same**: greedy texts are equal, or part where two logits are as good as equal in float64; samples show no
  difference. *Shift* is the total variation that samples would have shown with a probability of 0.9.
- **differs**: samples differ, twice, on new samples, or greedy texts do. All cells together say so of right engines
  with a probability of at most {LEVEL:g}: {level_of_cell():.1e} for each.
- **{OPEN}**: a difference was seen that is not published, because a link to the maintainers' issue, or a reproduction
  without Slipstream, is missing.
- **refused**: the engine says that it does not do this. **not tested**: the notes say why. **{UNRUN}**: no record yet.

The model is the embedded pair of 14.2M and 2.4M parameters. Greedy: {2 * PROMPTS} prompts, {GREEDY_TOKENS} tokens each.
Samples: {PROMPTS} prompts, texts of {TOKENS} tokens (penalty: 16). Filters and penalty: top-k, top-p, min-p, repetition
penalty. Structured: a JSON schema. `python -m benchmarks.board --row 1` repeats row 1 from nothing.
"""

TAIL = """## Run it

`make lossless-board` runs all cells that have no record in `benchmarks/results/board.json`, goes on where it was
interrupted, and writes this page. Engines whose environment is not made are "not tested". A record has the command
that repeats its cell:

    {example}

`--row` and `--cell` make the engine's environment first, if it is missing. An engine that dies, hangs for 20 minutes,
or answers otherwise than its adapter's contract says has cells that say so; the other cells run.

An engine that ignores the option would be "same". So adapters count draft tokens, and a cell without any is "not
tested". Engines that do not tell: transformers, vLLM, and OpenVINO GenAI's prompt lookup.

## Add an engine

Write a module as `benchmarks/board/transformers_engine.py`, about 60 lines, that runs in the engine's own environment
and answers three operations on its standard input (`benchmarks/protocol.py`):

- `info()`: `versions`, of the packages that matter.
- `load(method, target, draft, streams, prefix_cache)`: load the checkpoint `target`. `method` is "plain", or one of its
  ways of speculating. At most `streams` texts are decoded at once. `prefix_cache`: keep states of prompts, or do not.
- `generate(ids, tokens, sampling, schema, seeds)`: `texts`, one list of token ids for each seed, exactly `tokens` long,
  or shorter if they have the JSON schema `schema`. `sampling` is empty for greedy decoding, else fields as
  `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`. `drafted` is the number of draft tokens, if the engine
  tells. What it does not do raises NotImplementedError: the cell is "refused".

Then add an `Engine` to `benchmarks/board/lineup.py`, with what its documentation promises. A difference is published
once `known` says which issue or fix of its maintainers it goes with, that the newest version was tried, and which
program of at most 15 lines, without Slipstream, shows it.
"""


def page(board: dict[str, Any]) -> str:
    records: Records = board["cells"]
    columns = list(dict.fromkeys(check.column for check in CHECKS.values()))
    lines = [HEAD, f"| row | engine | method | {' | '.join(columns)} | shift | date | notes |"]
    lines.append("|---" * (len(columns) + 6) + "|")
    for number, (engine, method) in enumerate(rows(), 1):
        lines.append(_row(number, engine, method, columns, records))
    absent = [engine for engine in ENGINES.values() if engine.absent]
    lines += [f"| | {engine.name} | |{f' {UNTESTED} |' * len(columns)} | | {engine.absent} |" for engine in absent]
    tested = [engine for engine in ENGINES.values() if engine.promises]
    lines += ["", "What they promise:", "", *(f"- {engine.name}: {engine.promises}." for engine in tested)]
    lines += ["", *_controls(records)]
    lines += ["", TAIL.format(example="python -m benchmarks.board --cell 'transformers | assisted | T 1'")]
    return "\n".join(lines)


def shown(engine: Engine, method: str, check: str, records: Records) -> dict[str, Any]:
    """The record of a cell as the page shows it: with `known`, or "open", where it differs."""
    record = records.get(Cell(engine.name, method, check).key, {"verdict": UNRUN})
    if record["verdict"] != DIFFERS:
        return record
    known = engine.known.get(f"{method} | {check}") or engine.known.get(method)
    return record | ({"known": known} if known else {"verdict": OPEN, "known": "no issue or reproduction yet"})


def _row(number: int, engine: Engine, method: str, columns: list[str], records: Records) -> str:
    each = {check: shown(engine, method, check, records) for check in CHECKS}
    groups = [[each[name] for name, check in CHECKS.items() if check.column == column] for column in columns]
    dates = sorted(record["date"] for record in each.values() if "date" in record)
    versions = next((record["versions"] for record in each.values() if "versions" in record), {})
    which = ", ".join(f"{name} {version}" for name, version in versions.items() if name not in ("python", "torch"))
    shifts = [record["smallest_shift"] for record in each.values() if "smallest_shift" in record]
    cells = [str(number), f"{engine.name}: {which}" if which else engine.name, method, *map(_verdicts, groups)]
    cells += [f"{max(shifts):.2f}" if shifts else "", "".join(dates[-1:]), _notes(each)]
    return f"| {' | '.join(cells)} |"


def _verdicts(group: list[dict[str, Any]]) -> str:
    counts = Counter(record["verdict"] for record in group)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def _notes(each: dict[str, dict[str, Any]]) -> str:
    notes = dict[str, list[str]]()
    for check, record in each.items():
        if record.get("ties"):
            notes.setdefault(f"{record['ties']} texts part at a tie of {record['largest_margin']:.1g}", []).append(
                check
            )
        if "known" in record:
            p = f"p = {record['second_p']:.1g}" if "second_p" in record else record["request"]
            notes.setdefault(f"{p}; {record['known']}", []).append(check)
        elif "why" in record:
            notes.setdefault(record["why"][:160], []).append(check)
    return "; ".join(f"{', '.join(checks)}: {note}" for note, checks in notes.items()).replace("|", "/")


def _controls(records: Records) -> list[str]:
    lines = [
        "## Controls",
        "",
        "Bugs that engines really had, planted into Slipstream (`benchmarks/board/controls.py` names where each was",
        "seen, and how large it is). The board must find each, in a cell of the same size as the others:",
        "",
        "| planted | looked for by | verdict | p | shift |",
        "|---|---|---|---|---|",
    ]
    for method in CONTROLS.methods:
        check = CONTROL_CHECKS.get(method, "T 1")
        record = records.get(Cell(CONTROLS.name, method, check).key, {"verdict": UNTESTED})
        p, shift = record.get("second_p", record.get("p", "")), record.get("smallest_shift")
        name = f"{method} (no bug: must be same)" if method in HARMLESS else method
        lines.append(f"| {name} | {check} | {record['verdict']} | {p} | {f'{shift:.2f}' if shift else ''} |")
    alone = [
        record for key, record in records.items() if f"| {PLAIN} |" in key and record["verdict"] in (SAME, DIFFERS)
    ]
    alarms = sum(record["verdict"] == DIFFERS for record in alone)
    return [*lines, "", f"Each engine without speculation against itself: {alarms} alarms in {len(alone)} cells."]


def summary(board: dict[str, Any]) -> str:
    """Engines and methods that have a verdict."""
    judged = [
        (engine.name, method)
        for engine, method in rows()
        if any(
            shown(engine, method, check, board["cells"])["verdict"] in (SAME, DIFFERS, REFUSED, OPEN)
            for check in CHECKS
        )
    ]
    return f"{len({name for name, _ in judged})} engines, {len(judged)} methods with a verdict"
