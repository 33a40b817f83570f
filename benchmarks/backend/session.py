"""Loads the contenders of one group after another and times their passes in interleaved rounds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Thread
from time import monotonic
from typing import Any

from benchmarks.backend.lineup import CONTENDERS, MOST_ROWS, PAST, PROMPT, Contender, Group, pass_label
from benchmarks.protocol import ROOT, THREADS, ContenderError, Worker

HERE = Path(__file__).resolve().parent
LLAMACPP = ROOT / ".venv-peer-llamacpp" / "bin" / "python"

REQUEST_SECONDS = 0.25
"""Time for which a request repeats its pass; the median of the passes is one measurement."""
FEWEST_ROUNDS = 3
SLOW = 1.0
"""Passes that take longer are not warmed up before each measurement."""


class Process(Worker):
    """A worker that is run by file; `root`: a checkout whose packages it uses."""

    def __init__(self, name: str, script: Path, python: str | Path, root: Path, environment: Mapping[str, str] = {}):
        self.name = name
        threads = {key: str(THREADS) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OPENVINO_LOG_LEVEL": "0"}
        # Only `root` is searched for packages, not the folder of the script, whose modules have common names.
        paths = {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            [str(python), str(script)],
            cwd=root,
            env={**os.environ, **threads, **quiet, **paths, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._log: deque[str] = deque(maxlen=20)
        Thread(target=self._listen, daemon=True).start()


@dataclass
class Place:
    """How the workers of one kind are started. missing: the reason if they cannot be started, or None."""

    script: Path
    python: Path
    root: Path
    missing: str | None = None

    def start(self, name: str, environment: Mapping[str, str] = {}) -> Process:
        if self.missing:
            raise ContenderError(self.missing)
        return Process(name, self.script, self.python, self.root, environment)


def places(before: Path | None) -> dict[str, Place]:
    """The kinds of workers. before: a checkout of the earlier version with its environment in .venv."""
    folders = {
        "now": Place(HERE / "worker.py", Path(sys.executable), ROOT),
        "llamacpp": Place(HERE / "llamacpp_worker.py", LLAMACPP, ROOT),
    }
    if not (LLAMACPP.parent.parent / ".ready").exists():
        folders["llamacpp"].missing = "llama.cpp is not installed: run `make peer-llamacpp`"
    old = Path() if before is None else before.resolve()
    folders["before"] = Place(HERE / "worker.py", old / ".venv" / "bin" / "python", old)
    if before is None:
        folders["before"].missing = "no earlier checkout was given: use --before FOLDER"
    elif not folders["before"].python.exists():
        folders["before"].missing = "the earlier checkout has no environment in .venv"
    return folders


@dataclass
class Session:
    """What has been measured so far.

    checkpoint  (model, worker) -> folder of the model's checkpoint that this worker reads.
    series   group -> contender -> pass (number of rows, as text) -> seconds, one per round.
    skipped  "group contender" -> why it was not measured.
    logits   group -> contender -> some logits of the same pass, to check that all compute the same model.
    notes    "group contender" -> its worker's note about the model.
    """

    places: Mapping[str, Place]
    checkpoint: Callable[[str, str], Path]
    say: Callable[[str], None] = lambda doing: None
    contenders: Mapping[str, Contender] = field(default_factory=lambda: CONTENDERS)
    series: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    logits: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    first_uses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def measure(self, key: str, group: Group, seconds: float) -> None:
        """Time one group for about `seconds`, loading not included, but at least `FEWEST_ROUNDS` rounds."""
        workers: dict[str, Worker] = {}
        try:
            for name in group.passes:
                self.say(f"{group.label}: loading {self.contenders[name].label}")
                worker = self._load(key, group, name)
                if worker:
                    workers[name] = worker
            with busy_processes(group.busy):
                self._rounds(key, group, workers, seconds)
        finally:
            for worker in workers.values():
                worker.close()

    def _load(self, key: str, group: Group, name: str) -> Worker | None:
        who, worker = self.contenders[name], None
        try:
            worker = self.places[who.worker].start(who.label)
            path = str(self.checkpoint(group.model, who.worker))
            options = {"threads": THREADS, **who.options}
            reply = worker.call("load", path=path, past=PAST, most=MOST_ROWS, **options)
            self.versions.setdefault(who.worker, worker.call("info")["versions"])
        except ContenderError as error:
            self.skip(key, name, error)
            if worker:
                worker.close()
            return None
        self.logits.setdefault(key, {})[name] = reply["logits"]
        if "note" in reply:
            self.notes[f"{key} {name}"] = reply["note"]
        return worker

    def skip(self, key: str, name: str, error: Exception) -> None:
        self.skipped[f"{key} {name}"] = reason_of(str(error))
        self.series.get(key, {}).pop(name, None)

    def _rounds(self, key: str, group: Group, workers: dict[str, Worker], seconds: float) -> None:
        series = self.series.setdefault(key, {})
        typical: dict[tuple[str, int], float] = {}
        for name, rows in _interleaved(group, list(workers)):
            if f"{key} {name}" not in self.skipped:
                self.say(f"{group.label}: warming up {self.contenders[name].label}, {pass_label(rows)}")
                typical[name, rows] = self._time(key, workers, name, rows, 1, 0 if rows == PROMPT else 3) or 0.0
        for name in workers:
            if f"{key} {name}" not in self.skipped:
                series[name] = {str(rows): [] for rows in group.passes[name]}
        order, deadline, index, lasted = list(workers), monotonic() + seconds, 0, 0.0
        while series and (index < FEWEST_ROUNDS or monotonic() + lasted < deadline):
            began = monotonic()
            for name, rows in _interleaved(group, order):
                if name not in series:
                    continue
                self.say(f"{group.label}, round {index + 1}: {self.contenders[name].label}, {pass_label(rows)}")
                estimate = typical[name, rows]
                repeats = max(1, min(200, round(REQUEST_SECONDS / max(estimate, 1e-6))))
                took = self._time(key, workers, name, rows, repeats, 0 if estimate > SLOW else 2)
                if took is not None:
                    series[name][str(rows)].append(took)
                    typical[name, rows] = min(estimate, took)
            order = [*order[1:], order[0]]
            index, lasted = index + 1, monotonic() - began

    def _time(
        self, key: str, workers: dict[str, Worker], name: str, rows: int, repeats: int, warmups: int
    ) -> float | None:
        past = 0 if rows == PROMPT else PAST
        try:
            reply = workers[name].call(
                "forwards",
                rows=rows,
                past=past,
                most=MOST_ROWS,
                repeats=repeats,
                warmups=warmups,
                limit=2 * REQUEST_SECONDS,
            )
        except ContenderError as error:
            self.skip(key, name, error)
            return None
        return median(reply["seconds"])

    def first_use(self, worker: str, cold: int, cached: int) -> None:
        """Seconds of the first use of the native backend: `cold` times with an empty cache of compiled kernels, then
        `cached` times with the kernels of the last of these. Every time in a new process."""
        seconds = self.first_uses.setdefault(worker, [])
        paths = {role: str(self.checkpoint(role, worker)) for role in ("target", "draft")}
        try:
            for index in range(cold):
                with tempfile.TemporaryDirectory() as cache:
                    for which in range(1 + (cached if index == cold - 1 else 0)):
                        self.say(f"first use, {'from disk' if which else 'empty cache'} ({worker})")
                        environment = {"NUMBA_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
                        process = self.places[worker].start(worker, environment)
                        try:
                            reply = process.call("first_use", **paths, threads=THREADS)
                        finally:
                            process.close()
                        seconds.append({"cached": bool(which), **reply})
        except ContenderError as error:
            self.skip("first_use", worker, error)


def _interleaved(group: Group, order: list[str]) -> Iterator[tuple[str, int]]:
    """All passes of one round, pass by pass, so that compared passes follow each other."""
    for rows in dict.fromkeys(rows for passes in group.passes.values() for rows in passes):
        for name in order:
            if rows in group.passes[name]:
                yield name, rows


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that compute without pause."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def reason_of(report: str) -> str:
    """The line of a worker's report that says what went wrong: the exception at the end of its traceback."""
    lines = [line for line in report.strip().splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)]
    return (raised or lines or ["it gave no reason"])[-1].strip()


def hide(text: str, folders: Iterable[Path]) -> str:
    """The text without the names of these folders, for publication."""
    for folder in sorted({str(each) for each in folders if str(each) not in (".", "/")}, key=len, reverse=True):
        text = text.replace(folder, "...")
    return text
