"""Compares GGUF files on our own kernels with ik_llama.cpp and llama.cpp: plain decoding, prompts, perplexity, memory.

    python -m benchmarks.gguf                      # SmolLM2; needs `make ik-llamacpp`, and `make gguf` for llama.cpp
    python -m benchmarks.gguf --model 510M --prompts ../data/question.jsonl

Each contender is a process of its own. For each prompt every contender runs once, in rotating order. A contender counts
in a comparison if its perplexity is at most 5 % above the lowest perplexity. If no rival's perplexity is, rivals count
whose perplexity is at most 20 % above Slipstream's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.figures import spread
from benchmarks.gguf.files import started
from benchmarks.gguf.lineup import IK, LLAMACPP, MODELS, SLIPSTREAM, Side, bars, sides
from benchmarks.markdown import beside, bound, document, noise, run_of, versions
from benchmarks.markdown_tables import render_markdown_rows as rows
from benchmarks.protocol import ROOT
from benchmarks.provenance import provenance
from slipstream import zoo
from slipstream.measure.estimates import estimate_ratio
from slipstream.measure.provenance import OtherProcesses, digest
from slipstream.measure.results import from_json
from slipstream.measure.tables import Estimate, ends
from slipstream.tokens.text import load_tokenizer

REQUEST, LENGTHS, ROWS = 80, (512, 2048), (1, 2, 4, 6, 8)
WINDOW, ORDERLY = 512, 1.05


def arguments(words: Seq[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--prompts", type=Path, help="Spec-Bench's question.jsonl; without it the embedded prompts")
    parser.add_argument("--each", type=int, default=1, help="prompts of each category")
    parser.add_argument("--only", nargs="+", choices=(SLIPSTREAM, IK, LLAMACPP), default=[SLIPSTREAM, IK, LLAMACPP])
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS, help="tokens of prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit: no round begins later")
    parser.add_argument("--scored", type=int, default=9675, help="tokens of the text whose perplexity is measured")
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "gguf", help="where converted models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(words)


def texts_of(options: argparse.Namespace) -> tuple[dict[str, list[int]], list[int]]:
    """Return (prompts by name, ids of a long text). Prompts are code for synthetic targets, and chats for SmolLM2."""
    chat = options.model == "smollm2"
    tokenizer = load_tokenizer(zoo.smollm2_file() if chat else zoo.target_dir())
    if options.prompts is None:
        asked = {f"{kind} {i}": one["prompt"] for kind in ("varied", "edit", "code")
                 for i, one in enumerate(zoo.prompts(kind)[: 8 * options.each], 1)}  # fmt: skip
    else:
        asked, counts = {}, dict[str, int]()
        for line in options.prompts.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            number = counts[one["category"]] = counts.get(one["category"], 0) + 1
            asked[f"{one['category']} {number}"] = one["turns"][0]
    whole = tokenizer.encode("\n\n".join(asked.values()))
    kept = {name: text for name, text in asked.items() if int(name.split()[-1]) <= options.each}
    ids = {name: tokenizer.encode(text) for name, text in kept.items()}
    if chat:
        talk = {name: [{"role": "user", "content": text}] for name, text in kept.items()}
        frames = {
            n: tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for n, t in talk.items()
        }
        ids = {name: tokenizer.encode(text) for name, text in frames.items()}
    return {name: one[-1024:] for name, one in ids.items()}, whole


class Run:
    """The workers and their measurements. seconds: seconds per token by kind of measurement, then by contender, as
    [texts][rounds]."""

    def __init__(self, who: Mapping[str, Side], model: str, files: Path):
        self.who, self.seconds = dict(who), dict[str, dict[str, list[list[float]]]]()
        self.workers = {key: started(side, model, files) for key, side in who.items()}
        self.facts = dict[str, dict[str, Any]]()

    def text(self, what: str, number: int, place: int, ids: list[int], tokens: int) -> None:
        """Send one request to every contender, and keep the times."""
        keys = list(self.who)
        turn = (number + place) % len(keys)
        for key in keys[turn:] + keys[:turn]:
            took = self.workers[key].call("request", name="model", ids=ids, tokens=tokens)
            later = (took["seconds"] - took["first"]) / max(1, tokens - took["count"])
            values = {what: took["seconds"] / tokens} if tokens == 1 else {"requests": took["seconds"] / tokens,
                                                                         "decoding": later}  # fmt: skip
            for name, value in values.items():
                cells = self.seconds.setdefault(name, {}).setdefault(key, [])
                while len(cells) <= place:
                    cells.append([])
                cells[place].append(value)

    def scores(self, whole: list[int]) -> None:
        """Measure perplexity, times of passes over several rows, and memory of each contender."""
        windows = [whole[i : i + WINDOW] for i in range(0, len(whole) - 1, WINDOW)]
        for key, worker in self.workers.items():
            losses = [worker.call("loss", name="model", ids=window) for window in windows]
            mean = sum(one["loss"] for one in losses) / sum(one["count"] for one in losses)
            self.facts[key] = {"perplexity": math.exp(mean), **worker.call("memory", name="model")}
            if self.who[key].who == SLIPSTREAM:
                self.facts[key] |= worker.call("bandwidth")
                passes = {n: list[float]() for n in ROWS}
                for _ in range(5):
                    for n in ROWS:
                        passes[n] += worker.call("rows", name="model", count=n, repeats=12)["milliseconds"][2:]
                self.facts[key]["rows"] = {n: statistics.median(times) for n, times in passes.items()}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def main(words: Seq[str] | None = None) -> int:
    """Measure, and write gguf-MODEL.json and gguf-MODEL.md. Returns 1 if a bar is missed."""
    options = arguments(words)
    requests, whole = texts_of(options)
    run, neighbours = Run({k: s for k, s in sides(options.model).items() if s.who in options.only}, options.model,
                          options.files), OtherProcesses()  # fmt: skip
    try:
        run.scores(whole[: options.scored])
        deadline = monotonic() + 60 * options.minutes
        for number in range(-1, options.rounds):  # the first round warms up and is not kept
            for place, ids in enumerate(requests.values()):
                run.text("requests", number, place, ids, REQUEST)
            for length in options.lengths:
                run.text(f"prompt of {length}", number, 0, whole[:length], 1)
            if number < 0:
                run.seconds.clear()
            elif monotonic() > deadline:
                break
        seen = {name: worker.call("info")["versions"] for name, worker in run.workers.items()}
    finally:
        run.close()
    prompts = {} if options.prompts is None else {options.prompts.name: digest([options.prompts])}
    command = ["python", "-m", "benchmarks.gguf", *(sys.argv[1:] if words is None else words)]
    source = provenance(options.model, options.model, prompts, command)
    source |= {"versions": seen, "neighbours": neighbours.share(), "model": options.model, "requests": list(requests)}
    results = {"schema": 2, "provenance": source, "figures": figures_of(run, options.model),
               "contenders": {key: run.facts[key] | {"seconds": {what: each[key] for what, each in run.seconds.items()}}
                              for key in run.who}}  # fmt: skip
    table = document(results, [heading, noise, figures, speeds, widths])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"gguf-{options.model}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / f"gguf-{options.model}.md").write_text(table)
    print(table)
    return 0 if all(row["reached"] for row in results["figures"]) else 1


def figures_of(run: Run, model: str) -> list[dict[str, Any]]:
    """Compare the measurements with `bars`. A bar without a rival that counts has no figure."""
    best = min(one["perplexity"] for one in run.facts.values())
    rows = []
    for bar in bars(model):
        orderly = [key for key in bar.bottoms if key in run.facts and run.facts[key]["perplexity"] <= ORDERLY * best]
        orderly = orderly or [key for key in bar.bottoms if key in run.facts and bar.top in run.facts
                              and run.facts[key]["perplexity"] <= 1.2 * run.facts[bar.top]["perplexity"]]  # fmt: skip
        if bar.top not in run.facts or not orderly or bar.what not in run.seconds:
            continue
        cells = run.seconds[bar.what]
        ratios = {key: estimate_ratio(cells[key], cells[bar.top]) for key in orderly}
        rival = min(ratios, key=lambda key: ratios[key].value)
        rows.append({"text": f"{bar.what}: {bar.top} against {rival}", "reach": bar.reach, **vars(ratios[rival]),
                     "reached": ratios[rival].value >= bar.reach})  # fmt: skip
    return rows


def heading(results: dict[str, Any]) -> list[str]:
    source = results["provenance"]
    return [
        f"# GGUF files: {MODELS[source['model']]}",
        "",
        f"{run_of(source)}. {versions(source)} Greedy, plain decoding; ratios are of typical times, with 95 % "
        "intervals.",
    ]


def figures(results: dict[str, Any]) -> list[str]:
    body = [
        (
            row["text"], f"at least {bound(row['reach'], unit='x')}", beside(row["value"], row["reach"], unit="x"),
            ends(from_json(Estimate, row), "{:.2f}".format, " to "), "yes" if row["reached"] else "**no**",
        )
        for row in sorted(results["figures"], key=lambda row: row["reached"])
    ]  # fmt: skip
    return [rows(["figure", "must reach", "measured", "95 % interval", "reached"], body, (0, 1))]


def speeds(results: dict[str, Any]) -> list[str]:
    measured = next(iter(results["contenders"].values()))["seconds"]
    whats = ["requests", "decoding", *(what for what in measured if what.startswith("prompt"))]
    body = []
    for key, row in results["contenders"].items():
        cells = []
        for what in whats:
            scale = int(what.split()[-1]) if what.startswith("prompt") else 1
            rate = spread([[scale / s for s in text] for text in row["seconds"][what]])
            cells.append(f"{rate['median']:.0f} ({rate['q1']:.0f} to {rate['q3']:.0f})")
        over = share = ""
        if "weights" in row:
            over = f"{row['peak'] / (row['weights'] + row['kv']):.2f}"
        if "bandwidth" in row:
            times = [seconds for text in row["seconds"]["decoding"] for seconds in text]
            share = f"{row['weights'] / statistics.median(times) / row['bandwidth']:.2f}"
        body.append((key, f"{row['perplexity']:.3f}", *cells, f"{row['peak'] / 2**20:.0f}", over, share))
    heads = ["contender", "perplexity", *(f"{what}, tokens/s" for what in whats), "peak MiB", "over weights and KV",
             "read bandwidth used while decoding"]  # fmt: skip
    return [rows(heads, body)]


def widths(results: dict[str, Any]) -> list[str]:
    """Tabulate the milliseconds of a pass by its number of rows."""
    row_counts = {key: one["rows"] for key, one in results["contenders"].items() if "rows" in one}
    if not row_counts:
        return []
    body = []
    for key, times in row_counts.items():
        first = next(iter(times.values()))
        body.append((key, *(f"{ms:.2f} ({ms / first:.2f}x)" for ms in times.values())))
    return [rows(["ms of a pass over so many rows", *map(str, ROWS)], body)]


if __name__ == "__main__":
    sys.exit(main())
