"""GGUF models: Slipstream against llama-cpp-python's own `Llama`, on the same files and the same compiled llama.cpp.

    python -m benchmarks.gguf --minutes 8
    python -m benchmarks.gguf --model 110M --only Q4_K_M --rounds 3

Each contender runs in a process of its own; for each prompt every one runs once, in rotating order.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.backend.models import MODELS, checkpoint
from benchmarks.figures import spread
from benchmarks.gguf.lineup import KINDS, LENGTHS, Side, bars, sides
from benchmarks.markdown import beside, bound, document, noise, rows, versions
from benchmarks.prompts import SETS, Prompt, load, shortened
from benchmarks.protocol import ROOT, THREADS, Worker, fingerprint
from benchmarks.provenance import provenance
from slipstream import zoo
from slipstream.bench.estimates import ratio
from slipstream.bench.provenance import OtherProcesses, digest
from slipstream.bench.tables import ends
from slipstream.models.gguf_convert import convert_to_gguf
from slipstream.models.text import load_tokenizer

console = Console(stderr=True)
WORKERS = {"slipstream": "benchmarks.gguf.slipstream_worker", "bindings": "benchmarks.gguf.bindings_worker"}


def arguments(words: Seq[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf", description=__doc__)
    parser.add_argument("--model", choices=[n for n in MODELS if MODELS[n].kind == "llama"], default="14M")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="quantisations")
    parser.add_argument("--prompt-folder", type=Path, default=ROOT / "slipstream" / "zoo" / "prompts")
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10.0, help="no round begins after so many")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="draft lengths to choose from")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="one thread, and its processor time instead of wall time: for a machine with other work",
    )
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "gguf", help="where converted models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(words)


def converted(folder: Path, kind: str, files: Path) -> Path:
    """The checkpoint as a GGUF file, made once for each content of its weights."""
    file = files / f"{fingerprint(folder)}-{kind}.gguf"
    if not file.exists():
        files.mkdir(parents=True, exist_ok=True)
        convert_to_gguf(folder, file, kind.lower())
    return file


class Run:
    """The workers, and what was measured: contender -> seconds, [prompts][rounds]."""

    def __init__(self, who: dict[str, Side], texts: dict[str, list[Prompt]], processor_time: bool):
        self.who, self.texts, self.processor_time = who, texts, processor_time
        self.workers = {name: Worker(name, module) for name, module in WORKERS.items()}
        self.chosen: dict[str, int] = {}
        self.seconds: dict[str, list[list[float]]] = {key: [[] for _ in texts[side.text]] for key, side in who.items()}
        self.outputs: dict[str, list[list[int]]] = {}
        self.stats: dict[str, list[dict[str, Any]]] = {}

    def one(self, key: str, prompt: Prompt, seed: int, length: int | None) -> dict[str, Any]:
        side = self.who[key]
        own = side.arguments | {"processor_time": self.processor_time}
        if side.text == "random":
            own = own | {"seed": seed}
        if length is not None:
            own = own | {"draft_tokens": length}
        return self.workers[side.worker].call("generate", name=side.model, ids=prompt.ids, tokens=prompt.tokens, **own)

    def choose(self, spare: list[Prompt]) -> None:
        """The fastest of each contender's draft lengths."""
        for key, side in self.who.items():
            if side.lengths:
                times = {
                    n: statistics.median(self.one(key, p, 0, n)["seconds"] / p.tokens for p in spare * 2)
                    for n in side.lengths
                }
                self.chosen[key] = min(times, key=lambda n: times[n])

    def round(self, number: int) -> None:
        keys = list(self.who)
        for text, prompts in self.texts.items():
            own = [key for key in keys if self.who[key].text == text]
            for p, prompt in enumerate(prompts):
                turn = (number + p) % len(own)
                for key in own[turn:] + own[:turn]:
                    found = self.one(key, prompt, p, self.chosen.get(key))
                    self.seconds[key][p].append(found["seconds"])
                    if number == 0:
                        self.outputs.setdefault(key, []).append(found["tokens"])
                        if "stats" in found:
                            self.stats.setdefault(key, []).append(found["stats"])

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def texts_of(options: argparse.Namespace, folder: Path) -> tuple[dict[str, list[Prompt]], list[Prompt]]:
    """(kind of text -> prompts, prompts that draft lengths are chosen on). A model of random weights has random ids,
    whose greedy texts repeat themselves."""
    draw = random.Random(0)
    rows_of = json.loads((folder / "config.json").read_text())["vocab_size"]
    noise = [Prompt([draw.randrange(4, rows_of) for _ in range(64)], options.tokens) for _ in range(options.prompts)]
    if MODELS[options.model].config:
        spare = [Prompt([draw.randrange(4, rows_of) for _ in range(64)], options.tokens) for _ in range(3)]
        return {"greedy": noise, "random": noise}, spare
    measured, spare_sets = load(options.prompt_folder, load_tokenizer(zoo.target_dir()), options.prompts)
    both, spare = (shortened(sets, options.tokens) for sets in (measured, spare_sets))
    return {"greedy": [p for s in SETS for p in both[s]], "random": noise}, [p for s in SETS for p in spare[s]]


def main(words: Seq[str] | None = None) -> int:
    """Measure, and write gguf-MODEL.json and gguf-MODEL.md; 1 if a bar is missed."""
    options = arguments(words)
    kinds = tuple(kind for kind in KINDS if kind in options.only)
    folder = checkpoint(options.model, options.files)
    files = {kind: converted(folder, kind, options.files) for kind in kinds}
    texts, spare = texts_of(options, folder)
    who, neighbours, run = sides(kinds, tuple(options.lengths)), OtherProcesses(), None
    threads = 1 if options.processor_time else THREADS
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("loading", total=options.rounds)
        run = Run(who, texts, options.processor_time)
        try:
            for kind, file in files.items():
                run.workers["slipstream"].call("load", name=kind, file=str(file), threads=threads)
                for name, lookup in ((kind, False), (f"{kind} lookup", True)):
                    own = {"name": name, "kind": kind, "lookup": lookup, "threads": threads}
                    run.workers["bindings"].call("load", file=str(file), **own)
            run.choose(spare)
            for key in who:  # warm up; draft lengths are learned
                run.one(key, spare[0], 0, run.chosen.get(key))
            deadline = monotonic() + 60 * options.minutes
            for number in range(options.rounds):
                progress.update(task, description=f"round {number + 1}", completed=number)
                run.round(number)
                if monotonic() > deadline:
                    break
            seen = {name: worker.call("info")["versions"] for name, worker in run.workers.items()}
        finally:
            run.close()
    prompts = {name: digest([options.prompt_folder / f"{name}.jsonl"]) for name in SETS}
    command = ["python", "-m", "benchmarks.gguf", *(sys.argv[1:] if words is None else words)]
    source = provenance(str(folder), str(folder), prompts, command)
    source |= {"versions": seen, "neighbours": neighbours.share(), "model": options.model, "threads": threads}
    source["processor_time"] = options.processor_time
    results = assembled(run, kinds, source)
    table = document(results, [heading, noise, figures, speeds])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"gguf-{options.model}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"gguf-{options.model}.md").write_text(table)
    print(table)
    return 0 if all(row["reached"] for row in results["figures"]) else 1


def assembled(run: Run, kinds: tuple[str, ...], source: dict[str, Any]) -> dict[str, Any]:
    """The results as plain JSON values."""
    made = []
    for bar in bars(kinds):
        found = ratio(run.seconds[bar.bottom], run.seconds[bar.top])
        same = None
        if run.who[bar.top].text == "greedy":
            pairs = zip(run.outputs[bar.top], run.outputs[bar.bottom], strict=True)
            same = statistics.mean(a == b for a, b in pairs)
        made.append(
            {"text": bar.text, "reach": bar.reach, **vars(found), "reached": found.value >= bar.reach,
             "same_texts": same}
        )  # fmt: skip
    contenders = []
    for key, side in run.who.items():
        speed = [[p.tokens / s for s in row] for p, row in zip(run.texts[side.text], run.seconds[key], strict=True)]
        stats = run.stats.get(key, [])
        proposed, accepted = (sum(s[n] for s in stats) for n in ("proposed", "accepted"))
        contenders.append(
            {"key": key, "label": side.label, "draft_tokens": run.chosen.get(key), "seconds": run.seconds[key],
             "tokens_per_second": spread(speed),
             "acceptance_rate": accepted / proposed if proposed else None}
        )  # fmt: skip
    return {"schema": 1, "provenance": source, "figures": made, "contenders": contenders}


def heading(results: dict[str, Any]) -> list[str]:
    source = results["provenance"]
    return [
        f"# GGUF: Slipstream and llama-cpp-python, {MODELS[source['model']].label}",
        "",
        f"`{source['command']}`, {source['date']}, {source['machine']['cpu']}, {source['threads']} threads, commit "
        f"{source['commit']}. {versions(source)}"
        + (" Times are processor time, not wall time." if source["processor_time"] else "")
        + " Both run the same llama.cpp on the same files. Ratios are of typical times, "
        "with 95 % intervals; see [README](../README.md#gguf).",
    ]


def figures(results: dict[str, Any]) -> list[str]:
    body = [
        (
            row["text"],
            f"at least {bound(row['reach'], unit='x')}",
            beside(row["value"], row["reach"], unit="x"),
            ends(row, "{:.2f}".format, " to "),
            "yes" if row["reached"] else "**no**",
            "" if row["same_texts"] is None else f"{row['same_texts']:.0%}",
        )
        for row in results["figures"]
    ]
    return [rows(["figure", "must reach", "measured", "95 % interval", "reached", "same texts"], body, (0, 1))]


def speeds(results: dict[str, Any]) -> list[str]:
    body = []
    for row in results["contenders"]:
        speed, rate = row["tokens_per_second"], row["acceptance_rate"]
        body.append(
            (
                row["label"],
                f"{speed['median']:.0f} ({speed['q1']:.0f} to {speed['q3']:.0f})",
                "" if row["draft_tokens"] is None else str(row["draft_tokens"]),
                "" if rate is None else f"{rate:.0%}",
            )
        )
    return [rows(["contender", "tokens/s (quartiles)", "draft length", "acceptance rate"], body)]


if __name__ == "__main__":
    sys.exit(main())
