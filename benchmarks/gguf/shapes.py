"""Compares Slipstream with ik_llama.cpp and llama.cpp on the same GGUF files, which have the shapes of published models
and random weights.

    python -m benchmarks.gguf.shapes [--models Gemma-3-1B ...] [--minutes 20]

Every contender is a process of its own and runs once per round, in rotating order: decoding after a prompt of 32
tokens, then the first token after a prompt of 512. Before that, the logits of all contenders after a short prompt are
compared, to check that they run the same model; the outputs of random weights would not show a difference. Models that
are in the results file are not measured again, except with --fresh. Mixtures of experts have fewer layers than
published, and share one matrix for embedding and output head.

Hybrids also copy a text that is in the prompt: Slipstream with the drafter "suffix" and the text as a prediction,
llama-server with each of its n-gram drafters. For mixtures, the times of passes over several rows are compared with the
bytes of the experts that these passes read.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.gguf.files import IK_HOME, ik_environment
from benchmarks.gguf.lineup import IK, LLAMACPP, SLIPSTREAM
from benchmarks.gguf.ngram_server import METHODS, SERVER, NgramServer
from benchmarks.gguf.random_models import FIRST, SHAPES, TINY, write_random_model
from benchmarks.gguf.shapes_report import (
    DECODING,
    LONG,
    READING,
    copies,
    figures,
    figures_of,
    heading,
    left_out,
    passes,
    speeds,
)
from benchmarks.markdown import document, noise
from benchmarks.protocol import ROOT, THREADS, ContenderError, Worker
from slipstream.checkpoints.gguf_header import read_header
from slipstream.checkpoints.weight_blocks import TYPES
from slipstream.checkpoints.weight_formats import FORMATS
from slipstream.measure.provenance import OtherProcesses, commit, machine, now, public, public_values

PROMPT, ALIKE = 32, 0.9
"""Tokens of the short prompt; correlation of logits below which a contender is assumed to run another model."""
WIDE = {"gpt-oss-20b": 4, "Qwen3-30B-A3B": 4, "Qwen3.6-35B-A3B": 3}
"""For each mixture, the number of rows whose pass is compared with a pass over one row."""
RIVALS_OFF = ("Qwen3.6-35B-A3B",)
"""Models for which rivals are not run, and only passes are measured."""
PASSAGE, HEAD = 160, 32
"""Tokens of the text that is copied, and how many of its first tokens are given as the beginning of the copy."""


PARTS = [heading, noise, figures, speeds, passes, copies, left_out]


def arguments(words: Seq[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf.shapes", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=(*SHAPES, "tiny"), default=list(SHAPES))
    parser.add_argument("--only", nargs="+", choices=(SLIPSTREAM, IK, LLAMACPP), default=[SLIPSTREAM, IK, LLAMACPP])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="number of tokens to decode")
    parser.add_argument("--minutes", type=float, default=20.0, help="time limit: no model and no round begins later")
    parser.add_argument("--fresh", action="store_true", help="measure models again that are in the results")
    parser.add_argument("--write-only", action="store_true", help="write the files, measure nothing")
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "gguf" / "shapes", help="where files are kept")
    parser.add_argument("--server", type=Path, default=SERVER, help="llama-server, for copies")
    parser.add_argument(
        "--ngrams", nargs="*", choices=METHODS, default=list(METHODS), help="llama-server's n-gram drafters"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(words)


def started(who: str) -> Worker:
    if who == IK:
        return Worker(who, "benchmarks.gguf.rival_worker", IK_HOME / "bin/python", ik_environment())
    if who == SLIPSTREAM:
        return Worker(who, "benchmarks.gguf.slipstream_worker")
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ContenderError("llama-cpp-python is not installed: make gguf")
    path = f"{ROOT}{os.pathsep}{Path(found.origin).parent.parent}"
    return Worker(who, "benchmarks.gguf.rival_worker", environment={"PYTHONPATH": path})


class Measurement:
    """Measures one model. skipped: reasons by contender. facts: as in the results."""

    def __init__(self, name: str, file: Path, only: Seq[str]):
        self.name, self.file, self.shape = name, file, SHAPES.get(name, TINY)
        self.vocab = self.shape.decoder.vocab_size
        self.workers: dict[str, Worker] = {}
        self.skipped: dict[str, str] = {}
        self.alike: dict[str, float] = {}
        self.times: dict[str, dict[str, list[float]]] = {DECODING: {}, READING: {}}
        self.copies: dict[str, Any] = {}
        for who in only if name not in RIVALS_OFF else [SLIPSTREAM]:
            try:
                worker = started(who)
                worker.call("load", name="model", file=str(file), threads=THREADS, **self._drafter(who))
                self.workers[who] = worker
            except ContenderError as error:
                self.skipped[who] = str(error).strip().splitlines()[-1]

    @property
    def hybrid(self) -> bool:
        return any(layer.recurrence is not None for layer in self.shape.decoder.described)

    def _drafter(self, who: str) -> dict[str, str]:
        return {"drafter": "suffix"} if who == SLIPSTREAM else {}

    def text(self, length: int, seed: int) -> list[int]:
        """Return random tokens. The last token is fixed, because the greedy output counts up from it."""
        rng = np.random.default_rng(seed)
        return [*rng.integers(FIRST, self.vocab, length - 1).tolist(), FIRST + seed % 100]

    def compare(self) -> None:
        """Compare the logits of all contenders, and drop contenders that run another model. The largest logit is left
        out, because it does not depend on the layers."""
        ids, found = self.text(PROMPT, 1), dict[str, np.ndarray]()
        with tempfile.TemporaryDirectory() as folder:
            for who, worker in self.workers.items():
                worker.call("logits", name="model", ids=ids, file=f"{folder}/logits.npy")
                found[who] = np.delete(np.load(f"{folder}/logits.npy"), ids[-1] + 1)
        first = next(iter(found.values()))
        self.alike = {who: float(np.corrcoef(first, each)[0, 1]) for who, each in found.items()}
        for who, value in self.alike.items():
            if value < ALIKE:
                self.skipped[who] = f"its logits correlate by {value:.2f} only: another model runs"
                self.workers.pop(who).close()

    def round(self, number: int, tokens: int) -> None:
        keys = list(self.workers)
        turn = number % len(keys)
        for who in keys[turn:] + keys[:turn]:
            ids = self.text(PROMPT, number)
            took = self.workers[who].call("request", name="model", ids=ids, tokens=tokens)
            if took["tokens"] != list(range(ids[-1] + 1, ids[-1] + 1 + tokens)):
                raise ContenderError(f"{who} wrote another text of {self.name}: {took['tokens'][:8]}")
            self._add(DECODING, who, (took["seconds"] - took["first"]) / (tokens - took["count"]))
            took = self.workers[who].call("request", name="model", ids=self.text(LONG, 1000 + number), tokens=1)
            self._add(READING, who, took["seconds"] / LONG)

    def _add(self, what: str, who: str, seconds: float) -> None:
        self.times[what].setdefault(who, []).append(seconds)

    def copy(self, server: Path, rounds: int, log: Path, methods: Seq[str]) -> None:
        """Measure copying a passage of the prompt, in turns with llama-server plain and with each n-gram drafter."""
        passage = list(range(FIRST, FIRST + PASSAGE))
        ids = [*passage, *self.text(16, 5), *passage[:HEAD]]
        rest = passage[HEAD:]
        ways = {"prompt": [], "prediction": rest}
        for method in methods:
            try:
                rival = NgramServer(self.file, method, server, log)
            except RuntimeError as error:
                self.skipped[f"{LLAMACPP} {method}"] = str(error)
                continue
            try:
                for number in range(-1, rounds):
                    took = rival.request(ids, len(rest))
                    if number < 0:  # the first requests compile or allocate
                        own = self._copied(ids, rest, [])
                        continue
                    self._copy_time(f"{LLAMACPP} {method}", took["seconds"], took["tokens"] == rest)
                    self.copies[f"{LLAMACPP} {method}"]["drafted"] = [took["draft_n"], took["draft_n_accepted"]]
                    for way, prediction in ways.items():
                        own = self._copied(ids, rest, prediction)
                        self._copy_time(f"{SLIPSTREAM} {way}", own[0], own[1])
            finally:
                rival.close()

    def _copied(self, ids: list[int], rest: list[int], prediction: list[int]) -> tuple[float, bool]:
        took = self.workers[SLIPSTREAM].call(
            "request", name="model", ids=ids, tokens=len(rest), drafted=True, prediction=prediction
        )
        return (took["seconds"] - took["first"]) / (len(rest) - took["count"]), took["tokens"] == rest

    def _copy_time(self, who: str, seconds: float, right: bool) -> None:
        entry = self.copies.setdefault(who, {"seconds": [], "right": True})
        entry["seconds"].append(seconds)
        entry["right"] &= right

    def sizes(self) -> dict[str, dict[str, float]]:
        """Return sizes in bytes, in the format of the file, which rivals read, and in the format of our kernels:
        "always" (read for every token), "expert" (one expert of a layer), and "token" (all that one token reads)."""
        config, kinds = self.shape.decoder, {each.name: each for each in TYPES.values()}
        sizes = {form: {"always": 0.0, "expert": 0.0} for form in ("file", "packed")}
        for tensor in read_header(self.file).tensors:
            if tensor.name == "token_embd.weight":
                continue
            part, count = "expert" if "_exps" in tensor.name else "always", math.prod(tensor.shape)
            sizes["file"][part] += tensor.nbytes or 0
            sizes["packed"][part] += count * FORMATS[kinds[tensor.type].format].bytes_per_weight
        for each in sizes.values():
            each["token"] = each["always"]
            if config.experts is not None:
                each["expert"] /= config.layers * config.experts.count
                each["token"] += config.layers * config.experts.per_token * each["expert"]
        return sizes

    def passes(self, wide: int, rounds: int) -> dict[str, Any]:
        """Return the milliseconds of passes over one row and over several rows, and the bytes that they read."""
        sizes, found = self.sizes()["packed"], {}
        call, cells = self.workers[SLIPSTREAM].call, {1: list[float](), wide: list[float]()}
        read = {count: list[float]() for count in cells}
        for number in range(8 * rounds):
            for count in cells:
                reply = call("rows", name="model", count=count, repeats=2, first=FIRST + 7 * number)
                cells[count].append(reply["milliseconds"][-1])
                read[count].append(reply["experts"][-1])
        for count in cells:
            size = sizes["always"] + statistics.mean(read[count]) * sizes["expert"]
            found[str(count)] = {"milliseconds": statistics.median(cells[count]), "bytes": size}
        return found

    def results(self) -> dict[str, Any]:
        return {
            "file": self.file.stat().st_size, "alike": self.alike, "skipped": self.skipped, "sizes": self.sizes(),
            "seconds": self.times, "copies": self.copies, "date": now(), "commit": commit(),
        }  # fmt: skip

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def measure(name: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    file = options.files / f"{name}.gguf"
    neighbours, began, run = OtherProcesses(), monotonic(), Measurement(name, file, options.only)
    more: dict[str, Any] = {}
    try:
        run.compare()
        for worker in run.workers.values():
            worker.call("request", name="model", ids=run.text(64, 3), tokens=8)
        for number in range(options.rounds if name not in RIVALS_OFF else 0):
            if number and monotonic() > deadline:
                break
            run.round(number, options.tokens)
        more["bandwidth"] = run.workers[SLIPSTREAM].call("bandwidth")["bandwidth"]
        if name in WIDE:
            more["passes"] = run.passes(WIDE[name], options.rounds)
        if run.hybrid and name not in RIVALS_OFF and options.server.exists():
            for who in set(run.workers) - {SLIPSTREAM}:
                run.workers.pop(who).close()
            run.copy(options.server, options.rounds, options.files / "server.log", options.ngrams)
    finally:
        run.close()
    more["layers"] = [run.shape.decoder.layers, run.shape.layers or run.shape.decoder.layers]
    return run.results() | more | {"neighbours": neighbours.share(), "minutes": (monotonic() - began) / 60}


def main(words: Seq[str] | None = None) -> int:
    """Write shapes.json and shapes.md after each model. Returns 1 if a bar is missed."""
    options, deadline = arguments(words), None
    for name in options.models:
        if not (file := options.files / f"{name}.gguf").exists():
            print(f"writing {file.name}", file=sys.stderr)
            write_random_model(SHAPES.get(name, TINY), file)
    if options.write_only:
        return 0
    deadline, path = monotonic() + 60 * options.minutes, options.out / "shapes.json"
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    command = public(" ".join(["python", "-m", "benchmarks.gguf.shapes", *(sys.argv[1:] if words is None else words)]))
    results: dict[str, Any] = {}
    for name in options.models:
        if (name in models and not options.fresh) or monotonic() > deadline:
            continue
        models[name] = public_values(measure(name, options, deadline))
        shares = [each["neighbours"] for each in models.values() if each["neighbours"] is not None]
        source = {"date": now(), "command": command, "commit": commit(), "machine": machine(), "threads": THREADS}
        source["neighbours"] = max(shares, default=None)
        ordered = {key: models[key] for key in (*SHAPES, "tiny") if key in models}
        results = {"schema": 1, "provenance": source, "models": ordered, "figures": figures_of(ordered)}
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(document(results, PARTS))
        print(f"{name}: {models[name]['minutes']:.1f} minutes", file=sys.stderr)
    if results:
        print(path.with_suffix(".md").read_text())
    return 0 if all(row["reached"] for row in results.get("figures", [])) else 1


if __name__ == "__main__":
    sys.exit(main())
