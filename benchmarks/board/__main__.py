"""Fill the board: each engine's ways of speculating against the same engine without.

python -m benchmarks.board                              every cell that has no record, engine by engine
python -m benchmarks.board --cell "transformers | assisted | T 1"      one cell again, from nothing
python -m benchmarks.board --engine transformers        the cells of one engine
python -m benchmarks.board --page                       docs/lossless-board.md from the records

Records lie in benchmarks/results/board.json, one for each cell, written when the cell is done: an interrupted board
goes on. An engine that dies, hangs, or is not installed has rows that say so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from datetime import datetime, timezone
from threading import Timer
from typing import Any

import numpy as np

from benchmarks.board import judge, page
from benchmarks.board.lineup import CHECKS, CONTROLS, ENGINES, PLAIN, PROMPTS, TOKENS, Cell, Engine, cells
from benchmarks.protocol import ROOT, ContenderError, Worker
from slipstream.measure.prompts import select_entries
from slipstream.measure.results import write_text
from slipstream.tokens.text import load_tokenizer
from slipstream.zoo import draft_dir, target_dir

RECORDS = ROOT / "benchmarks" / "results" / "board.json"
LIMIT = 1200
"""Seconds that one answer of an engine may take."""
REFUSALS = ("Refused", "NotImplementedError", "ParameterError", "ValueError")


class Side:
    """An engine in one way of decoding, in a process of its own."""

    def __init__(self, engine: Engine, method: str):
        self.worker = Worker(f"{engine.name}, {method}", engine.worker, engine.python)
        self.versions = self._call("info")["versions"]
        self._call("load", method=method, target=str(target_dir()), draft=str(draft_dir()))

    def texts(self, ids: list[int], tokens: int, sampling: dict[str, Any], seeds: list[int]) -> list[list[int]]:
        texts = self._call("generate", ids=ids, tokens=tokens, sampling=sampling, seeds=seeds)["texts"]
        if len(texts) != len(seeds) or not all(isinstance(token, int) for text in texts for token in text):
            raise ContenderError(f"{self.worker.name} did not answer with one text for each seed")
        return texts

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        watch = Timer(LIMIT, self.worker.process.kill)
        watch.start()
        try:
            return self.worker.call(op, **arguments)
        finally:
            watch.cancel()


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(target_dir())
    entries, _ = select_entries("code,edit", 2 * PROMPTS, (), "raw")
    return [tokenizer.encode(entry.text)[-48:] for entry in entries]


def judged(cell: Cell, plain: Side, other: Side, samples: int) -> dict[str, Any]:
    """What one cell says."""
    asked, sampling = prompts(), CHECKS[cell.check]
    if cell.check == "greedy":
        both = [[side.texts(ids, 4 * TOKENS, {}, [0])[0] for ids in asked] for side in (plain, other)]
        return judge.greedy(str(target_dir()), ENGINES.get(cell.engine, CONTROLS).precision, asked, *both)

    def look(number: int) -> list[tuple[list[list[int]], list[list[int]]]]:
        pairs = []
        for i, ids in enumerate(asked[:PROMPTS]):
            seeds = [np.random.SeedSequence([number, i, n]).generate_state(samples, np.uint32).tolist() for n in (0, 1)]
            pairs.append((plain.texts(ids, TOKENS, sampling, seeds[0]), other.texts(ids, TOKENS, sampling, seeds[1])))
        return pairs

    return judge.sampled(look)


def records() -> dict[str, Any]:
    """What the board holds so far, by cell."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {"cells": {}}


def run(wanted: list[Cell], samples: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Judge cells one after another, each method of an engine in one process; yields each with its record."""
    sides: dict[tuple[str, str], Side] = {}

    def side(engine: Engine, method: str) -> Side:
        place = engine.name, method
        for old in [key for key in sides if key[0] != engine.name or key[1] not in (PLAIN, method)]:
            sides.pop(old).worker.close()
        if place not in sides:
            sides[place] = Side(engine, method)
        return sides[place]

    for cell in wanted:
        engine = ENGINES.get(cell.engine, CONTROLS)
        record: dict[str, Any] = {"date": datetime.now(timezone.utc).date().isoformat(), "samples": samples}
        record["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
        record["command"] = f"{engine.make}; python -m benchmarks.board --cell '{cell.key}'"
        try:
            if not engine.python.exists():
                raise FileNotFoundError(f"its environment is not made: {engine.make}")
            plain = side(engine, PLAIN)
            other = plain if cell.negative else side(engine, cell.method)
            record |= {"versions": other.versions} | judged(cell, plain, other, samples)
        except (ContenderError, FileNotFoundError) as fault:
            said = [line for line in str(fault).strip().splitlines() if line.strip()][-1][:300]
            refused = said.startswith(REFUSALS) or any(f".{name}:" in said for name in REFUSALS)
            record |= {"verdict": judge.REFUSED if refused else judge.UNTESTED, "why": said}
            for key in [key for key in sides if sides[key].worker.process.poll() is not None]:
                del sides[key]
        yield cell, record
    for each in sides.values():
        each.worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="only the cells of this engine, or of: controls")
    parser.add_argument("--method", help="only cells of this method")
    parser.add_argument("--check", help="only these checks, with commas between them")
    parser.add_argument("--cell", help="only this cell, also if it has a record")
    parser.add_argument("--samples", type=int, default=100, help="texts of each prompt at each side (default: 100)")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    board = records()
    chosen = [
        cell
        for cell in cells()
        if options.cell in (None, cell.key)
        and options.engine in (None, cell.engine)
        and options.method in (None, cell.method)
        and (options.check is None or cell.check in options.check.split(","))
        and (options.cell or cell.key not in board["cells"])
    ]
    for cell, record in run([] if options.page else chosen, options.samples):
        board = records()  # another process may have written some
        board["cells"][cell.key] = record
        write_text(RECORDS, json.dumps(board, indent=1) + "\n")
        print(
            f"{cell.key}: {record['verdict']}", *(f"{k}={record[k]}" for k in ("p", "why") if k in record), flush=True
        )
    write_text(ROOT / "docs" / "lossless-board.md", page.page(board))


if __name__ == "__main__":
    main()
