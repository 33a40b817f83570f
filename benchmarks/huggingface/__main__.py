"""`python -m benchmarks.huggingface` compares our loop with transformers' own, on targets that transformers runs.

    python -m benchmarks.huggingface --only assisted --minutes 4
    python -m benchmarks.huggingface --only control --target FOLDER --draft FOLDER

The target is the embedded target, made wider and deeper with zeros. It writes the same text and costs as much as any
model of its size, so the embedded draft model has the same acceptance rate as with the embedded target.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.derived_models import larger, random_weights
from benchmarks.huggingface.lineup import ASSISTED, CONTENDERS, FIGURES, GROUPS, KINDS, models
from benchmarks.peers.lineup import alternating
from benchmarks.prompts import SETS, SPARE, Prompts, choice, load, shortened
from benchmarks.protocol import ROOT
from benchmarks.provenance import provenance
from benchmarks.report import assemble, markdown
from benchmarks.session import Session
from slipstream import zoo
from slipstream.measure.estimates import estimate_mean
from slipstream.measure.provenance import OtherProcesses, digest
from slipstream.tokens.text import load_tokenizer

TOGETHER = 8
"""Number of requests in a batch."""
T5 = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
"""The shape of T5-small, 60M parameters."""


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.huggingface", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups; each is one run")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of every contender on every prompt")
    parser.add_argument("--minutes", type=float, default=6, help="time limit of a group, loading included")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each set")
    parser.add_argument("--spare", type=int, default=1, help="prompts of each set on which draft lengths are chosen")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--target", type=Path, help="checkpoint folder; the embedded one made larger by default")
    parser.add_argument("--draft", type=Path, help="checkpoint folder; the embedded draft by default")
    parser.add_argument("--prompt-folder", type=Path, default=ROOT / "slipstream" / "zoo" / "prompts")
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "huggingface", help="where made models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(words)


def bad_draft(files: Path) -> Path:
    """Return a draft model with random weights, which is right only by chance. It is made once."""
    path = files / "random-draft"
    return path if path.exists() else random_weights(path, zoo.draft_dir())


def texts_at_once(session: Session, prompts: Prompts, tokens: int, rounds: int) -> dict[str, bool]:
    """Measure the series apart_X and together_X for X plain, draft and t5. Returns whether outputs were the same."""
    worker = session.workers["slipstream"]
    rng = np.random.default_rng(0)
    sources = [rng.integers(3, T5["vocab_size"], 40 + 8 * i).tolist() for i in range(TOGETHER)]
    worker.call("load_t5", name="t5", config=T5)
    prompt_ids = [prompt.ids for prompt in prompts["both"][:TOGETHER]]
    assert len(prompt_ids) == TOGETHER, f"{len(prompt_ids)} prompts, {TOGETHER} are needed"
    same = {}
    for name, texts in (("plain", prompt_ids), ("draft", prompt_ids), ("t5", sources)):
        session.advance(f"{TOGETHER} texts at once, {name}")
        result = worker.call("batch", name=name, prompts=texts, tokens=tokens, rounds=rounds)
        session.series |= {f"{how}_{name}": result[how] for how in ("together", "apart")}
        same[name] = result["same_texts"]
    return same


def fastest(session: Session) -> str | None:
    """Return the contender with assisted generation whose typical time is lowest. Its times become the series
    "assisted"."""
    there = [key for key in ASSISTED if key in session.cells]
    if not there:
        return None
    best = min(there, key=lambda key: estimate_mean(session.cells[key]).value)
    session.series["assisted"] = session.cells[best]
    return best


def main(words: list[str] | None = None) -> int:
    """Measure, and write huggingface-GROUP.json and huggingface-GROUP.md of each group. Returns 1 if a bar is
    missed."""
    options = arguments(words)
    options.words = sys.argv[1:] if words is None else words
    return max([measure(options, name) for name in options.only])


def measure(options: argparse.Namespace, name: str) -> int:
    """Measure one group."""
    group, console = GROUPS[name], Console(stderr=True)
    options.files.mkdir(parents=True, exist_ok=True)
    target, draft = (str(path) for path in (options.target or larger(options.files), options.draft or zoo.draft_dir()))
    measured, kept = load(options.prompt_folder, load_tokenizer(target), options.prompts)
    kept = {name: rows[: min(options.spare, SPARE)] for name, rows in kept.items()}
    prompts, spare = (shortened(alternating(sets), options.tokens) for sets in (measured, kept))
    texts = {name: digest([options.prompt_folder / f"{name}.jsonl"]) for name in SETS}
    command = ["python", "-m", "benchmarks.huggingface", *options.words]
    source, neighbours = provenance(target, draft, texts, command), OtherProcesses()
    source["choice"] = choice(options.prompt_folder)
    keys = list(group.contenders)
    clocks = (MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *clocks, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        session = Session(
            target, draft, lambda doing: progress.update(task, description=doing, advance=1), CONTENDERS, KINDS,
            models(target, draft, str(bad_draft(options.files))),
        )  # fmt: skip
        try:
            deadline = monotonic() + 60 * options.minutes
            session.start(keys or ["plain", "draft"])
            if keys:
                session.measure(keys, prompts, spare, options.rounds, deadline)
            else:
                source["same_texts"] = texts_at_once(session, prompts, options.tokens, options.rounds)
            source["fastest_assisted"] = fastest(session)
            source["versions"] = {name: worker.call("info")["versions"] for name, worker in session.workers.items()}
            results = assemble(session, list(group.figures), prompts, source, FIGURES)
        finally:
            session.close()
    source["neighbours"] = neighbours.share()  # after all child processes have ended
    options.out.mkdir(parents=True, exist_ok=True)
    file, table = options.out / f"huggingface-{name}", shown(results)
    file.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    file.with_suffix(".md").write_text(table)
    print(table)
    return 1 if any(row["verdict"] == "missed" for row in results["figures"]) else 0


def shown(results: dict[str, Any]) -> str:
    """Render the results as Markdown."""
    source = results["provenance"]
    more = []
    if source["fastest_assisted"]:
        more.append(f"The fastest assisted generation is: {CONTENDERS[source['fastest_assisted']].label}.")
    if "same_texts" in source:
        said = ", ".join(f"{name}: {'yes' if same else 'no'}" for name, same in source["same_texts"].items())
        more.append(f"The same texts at once and one after another? {said}.")
    return "\n".join([markdown(results), *more]) + ("\n" if more else "")


if __name__ == "__main__":
    sys.exit(main())
