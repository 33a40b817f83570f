"""Fill the board: each engine's ways of speculating against the same engine without.

python -m benchmarks.board                              every cell that has no record, engine by engine
python -m benchmarks.board --cell "transformers | assisted | T 1"      one cell again, from nothing
python -m benchmarks.board --row 3                      the cells of one row of the page, from nothing
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
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from threading import Timer
from typing import Any

import numpy as np

from benchmarks.board import judge, page
from benchmarks.board.lineup import (
    CHECKS,
    CONTROLS,
    ENGINES,
    EXAMPLE,
    LOOKUPS,
    PLAIN,
    PROMPTS,
    RARELY_COPIED,
    SAMPLES,
    Cell,
    Check,
    Engine,
    cells,
    rows,
)
from benchmarks.board.models import HYBRID, VOCAB, models_of
from benchmarks.protocol import ROOT, ContenderError, Worker
from slipstream.measure.prompts import select_entries
from slipstream.measure.results import write_text
from slipstream.tokens.text import load_tokenizer
from slipstream.verify.verification import FEWEST_DRAFTED
from slipstream.zoo import target_dir

RECORDS = ROOT / "benchmarks" / "results" / "board.json"
LIMIT = 1200
"""Seconds that one answer of an engine may take."""
REFUSALS = ("Refused", "NotImplementedError", "ParameterError", "ValueError", "VLLMValidationError")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The models are small, and threads that wait for each other are slow on a machine that does other things, too."""
CONTRACT = "answered otherwise than its adapter's contract: "


class Side:
    """An engine in one way of decoding and one setup, in a process of its own."""

    def __init__(self, engine: Engine, method: str, check: Check):
        self.worker = Worker(f"{engine.name}, {method}", engine.worker, engine.python, ONE_THREAD)
        self.drafted: int | None = None
        self.versions = self._call("info")["versions"]
        target, draft = map(str, models_of(method, engine.hybrid[0]))
        self._call("load", method=method.removesuffix(HYBRID), target=target, draft=draft, **check.setup)

    def texts(self, ids: list[int], check: Check, seeds: list[int]) -> list[list[int]]:
        """One text after the prompt `ids` for each seed."""
        tokens = check.tokens
        asked = {"sampling": dict(check.sampling), "schema": check.schema}
        reply = self._call("generate", ids=ids, tokens=tokens, seeds=seeds, **asked)
        texts = reply.get("texts")
        self._check(isinstance(texts, list) and len(texts) == len(seeds), "not one text for each seed")
        assert isinstance(texts, list)
        for text in texts:
            whole = isinstance(text, list) and all(type(token) is int for token in text)
            self._check(whole, "a text that is no list of token ids")
            length = f"a text of {len(text)} tokens, {tokens} were asked for"
            self._check(len(text) == tokens or (check.schema is not None and len(text) < tokens), length)
        if "drafted" in reply:
            self.drafted = (self.drafted or 0) + int(reply["drafted"])
        return texts

    def _check(self, right: bool, what: str) -> None:
        if not right:
            raise ContenderError(f"{self.worker.name} {CONTRACT}{what}")

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        late = list[bool]()

        def stop() -> None:
            late.append(True)
            self.worker.process.kill()

        watch = Timer(LIMIT, stop)
        watch.start()
        try:
            return self.worker.call(op, **arguments)
        except (ContenderError, ValueError) as fault:
            if late:
                self.worker.process.wait()
                raise ContenderError(f"{self.worker.name} gave no answer to {op!r} within {LIMIT} seconds") from fault
            if isinstance(fault, ContenderError):
                raise
            raise ContenderError(f"{self.worker.name} {CONTRACT}a reply that is no JSON") from fault
        finally:
            watch.cancel()


class Sides:
    """The processes of one engine: without speculation, and of one method. Texts without speculation are kept, because
    every method is compared with them."""

    def __init__(self) -> None:
        self.running: dict[tuple[str, str, str], Side] = {}
        self.kept: dict[tuple[Any, ...], list[list[int]]] = {}

    def of(self, engine: Engine, method: str, check: Check) -> Side:
        setup = json.dumps(check.setup)
        place = engine.name, method, setup
        for old in [*self.running]:
            beside = old[1] == method or {PLAIN, PLAIN + HYBRID} & {method, old[1]}
            others = old[1].endswith(HYBRID) != method.endswith(HYBRID)
            if (old[0], old[2]) != (engine.name, setup) or others or not beside:
                self.close([old])
        if place not in self.running:
            self.running[place] = Side(engine, method, check)
        return self.running[place]

    def close(self, places: list[tuple[str, str, str]] | None = None) -> None:
        for key in [*self.running] if places is None else places:
            self.running.pop(key).worker.close()

    def plain_texts(self, engine: Engine, cell: Cell, ids: list[int], seeds: list[int]) -> list[list[int]]:
        """Texts without speculation."""
        plain, check = PLAIN + HYBRID * cell.method.endswith(HYBRID), CHECKS[cell.check]
        key = engine.name, plain, cell.check, tuple(ids), tuple(seeds)
        if key not in self.kept:
            self.kept = {old: texts for old, texts in self.kept.items() if old[0] == engine.name}
            self.kept[key] = self.of(engine, plain, check).texts(ids, check, seeds)
        return self.kept[key]


def prompts(method: str) -> list[list[int]]:
    """The hybrid, which is random, reads the same ids modulo its vocabulary."""
    tokenizer = load_tokenizer(target_dir())
    entries, _ = select_entries("code,edit", 2 * PROMPTS, (), "raw")
    vocab = VOCAB if method.endswith(HYBRID) else 2**31
    return [[token % vocab for token in tokenizer.encode(entry.text)] for entry in entries]


def asked_of(cell: Cell) -> list[list[int]]:
    """The prompts of a cell: the ends of `prompts`. Methods that copy would find too little in some checks: they get
    whole prompts, or texts that have the schema."""
    check, whole = CHECKS[cell.check], prompts(cell.method)
    if not cell.method.startswith(LOOKUPS) or cell.check not in RARELY_COPIED:
        return [ids[-check.context :] for ids in whole]
    if check.schema is None:
        return whole
    examples = load_tokenizer(target_dir()).encode(EXAMPLE)
    return [ids[-check.context // 2 :] + examples for ids in whole]


def judged(cell: Cell, engine: Engine, sides: Sides, samples: int) -> dict[str, Any]:
    """Write one cell."""
    check = CHECKS[cell.check]
    asked = asked_of(cell)
    sides.of(engine, cell.method, check).drafted = None
    if check.greedy:
        plain = [sides.plain_texts(engine, cell, ids, [0])[0] for ids in asked]
        other = sides.of(engine, cell.method, check)
        texts = [other.texts(ids, check, [0])[0] for ids in asked]
        target = str(models_of(cell.method, engine.hybrid[0])[0])
        precision = engine.hybrid[1] if cell.method.endswith(HYBRID) else engine.precision
        return {"versions": other.versions} | judge.greedy(target, precision, asked, plain, texts)

    def look(number: int) -> list[tuple[list[list[int]], list[list[int]]]]:
        pairs = []
        for i, ids in enumerate(asked[:PROMPTS]):
            seeds = [np.random.SeedSequence([number, i, n]).generate_state(samples, np.uint32).tolist() for n in (0, 1)]
            plain = sides.plain_texts(engine, cell, ids, seeds[0])
            pairs.append((plain, sides.of(engine, cell.method, check).texts(ids, check, seeds[1])))
        return pairs

    return judge.sampled(look) | {"versions": sides.of(engine, cell.method, check).versions}


def records() -> dict[str, Any]:
    """Read the board so far, by cell."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {"cells": {}}


def run(wanted: list[Cell], samples: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Judge cells one after another; yields each with its record. A cell that fails says why, and the next one runs."""
    sides = Sides()
    for cell in wanted:
        engine = ENGINES.get(cell.engine, CONTROLS)
        started = time.monotonic()
        record: dict[str, Any] = {"date": datetime.now(timezone.utc).date().isoformat(), "samples": samples}
        record["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
        more = "" if samples == SAMPLES else f" --samples {samples}"
        record["command"] = f"python -m benchmarks.board --cell '{cell.key}'{more}"
        try:
            if not engine.needs.exists():
                raise FileNotFoundError(f"its environment is not made: {engine.make}")
            record |= judged(cell, engine, sides, samples)
            side = sides.of(engine, cell.method, CHECKS[cell.check])
            if side.drafted is not None and not cell.negative:
                record["drafted"] = side.drafted
                if side.drafted < FEWEST_DRAFTED["greedy" if CHECKS[cell.check].greedy else "distribution"]:
                    record |= {"verdict": judge.UNTESTED, "why": f"only {side.drafted} tokens were drafted"}
        except FileNotFoundError as fault:
            record |= {"verdict": judge.UNTESTED, "why": str(fault)}
        except ContenderError as fault:
            said = [line for line in str(fault).strip().splitlines() if line.strip()][-1][:300]
            refused = said.startswith(REFUSALS) or any(f".{name}:" in said for name in REFUSALS)
            record |= {"verdict": judge.REFUSED if refused else judge.FAILS, "why": said}
            if not refused:
                sides.close()  # dead, or no longer at the beginning of a request
        yield cell, record | {"seconds": round(time.monotonic() - started)}
    sides.close()


def is_recorded(record: dict[str, Any] | None, samples: int) -> bool:
    """Return whether a cell need not run. A record of fewer samples is not enough, and an environment that was not made
    may be there now."""
    return (
        record is not None and record["samples"] >= samples and "environment is not made" not in record.get("why", "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="only the cells of this engine, or of: controls")
    parser.add_argument("--method", help="only cells of this method")
    parser.add_argument("--check", action="append", help="only this check; may be given several times")
    parser.add_argument("--cell", help="only this cell, also if it has a record")
    parser.add_argument("--row", type=int, help="only the cells of this row of the page, also if they have a record")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"texts of each prompt at each side ({SAMPLES})")
    parser.add_argument("--again", action="store_true", help="also cells that have a record")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    board, chosen = records(), list(cells())
    if options.row:
        engine, method = rows()[options.row - 1]
        options.engine, options.method = engine.name, method
    chosen = [
        cell
        for cell in chosen
        if options.cell in (None, cell.key)
        and options.engine in (None, cell.engine)
        and options.method in (None, cell.method)
        and (options.check is None or cell.check in options.check)
        and (
            options.cell
            or options.row
            or options.again
            or not is_recorded(board["cells"].get(cell.key), options.samples)
        )
    ]
    if options.cell or options.row:
        for engine in {
            ENGINES[cell.engine].make: ENGINES[cell.engine] for cell in chosen if cell.engine in ENGINES
        }.values():
            if not engine.needs.exists():
                subprocess.run(engine.make.split(), cwd=ROOT, check=True)
    for cell, record in run([] if options.page else chosen, options.samples):
        board = records()  # another process may have written some
        board["cells"][cell.key] = record
        write_text(RECORDS, json.dumps(board, indent=1) + "\n")
        print(
            f"{cell.key}: {record['verdict']}", *(f"{k}={record[k]}" for k in ("p", "why") if k in record), flush=True
        )
    write_text(ROOT / "docs" / "lossless-board.md", page.page(records()))
    print(page.summary(records()))


if __name__ == "__main__":
    main()
