"""`python -m benchmarks` measures all figures of the table, or the figures named by --only, in one interleaved run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import memory
from benchmarks.contenders import CONTENDERS
from benchmarks.figures import FIGURES
from benchmarks.prompts import SETS, Prompts, load
from benchmarks.protocol import ROOT
from benchmarks.provenance import provenance
from benchmarks.report import assemble, markdown
from benchmarks.session import Session
from slipstream import zoo
from slipstream.measure.provenance import OtherProcesses, digest
from slipstream.tokens.text import load_tokenizer

MEMORY_REPEATS = 3

ROWS = {"plain": "float32", "int8": "int8"}
"""Contenders for whose target passes over 1 and 8 rows are timed, with the name of the series of measurements."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="timed runs of every contender on every prompt")
    parser.add_argument("--minutes", type=float, default=8, help="time limit: no round begins that would end later")
    parser.add_argument("--prompts", type=int, default=10, help="prompts of each set")
    parser.add_argument("--only", nargs="+", choices=FIGURES, metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--target", help="checkpoint folder; the embedded model by default")
    parser.add_argument("--draft", help="checkpoint folder; the embedded draft by default")
    parser.add_argument("--prompt-folder", type=Path, default=ROOT / "slipstream" / "zoo" / "prompts")
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results, help="folder for bench.json and bench.md")
    return parser.parse_args()


def wanted(figures: list[str]) -> list[str]:
    """Return the contenders that the figures need, in the order of `CONTENDERS`."""
    names = {end.split("_", 1)[1] if end.startswith(("outside_", "step_")) else end
             for key in figures for end in (FIGURES[key].top, FIGURES[key].bottom)}  # fmt: skip
    if "ngram_edit" in names:
        names.add("plain_edit")
    names |= {CONTENDERS[name].same_k for name in names & CONTENDERS.keys()}
    return [key for key in CONTENDERS if key in names]


def run(session: Session, figures: list[str], prompts: Prompts, spare: Prompts, rounds: int, minutes: float) -> None:
    """Measure everything that the figures need. The session receives the measurements."""
    deadline = monotonic() + 60 * minutes
    ends = {end for key in figures for end in (FIGURES[key].top, FIGURES[key].bottom)}
    extra = [model for model, name in ROWS.items() if f"rows1_{name}" in ends]
    contenders = wanted(figures)
    session.start(dict.fromkeys([*contenders, *extra]))
    session.measure(contenders, prompts, spare, rounds, deadline)
    for model in extra:
        session.rows(ROWS[model], model)
    if "memory" in figures:
        session.advance("peak memory")
        try:
            peaks = [memory.measure(session.target, prompts["code"][0].ids) for _ in range(MEMORY_REPEATS)]
            session.series |= {"peak": [f["peak"] for f in peaks], "weights_and_kv": [f["needed"] for f in peaks]}
        except RuntimeError as error:
            session.skip(("peak",), str(error))


def main() -> int:
    options, console = arguments(), Console(stderr=True)
    target, draft = options.target or str(zoo.target_dir()), options.draft or str(zoo.draft_dir())
    prompts, spare = load(options.prompt_folder, load_tokenizer(target), options.prompts)
    figures = [key for key in FIGURES if key in (options.only or FIGURES)]
    texts = {name: digest([options.prompt_folder / f"{name}.jsonl"]) for name in SETS}
    source = provenance(target, draft, texts, ["python", "-m", "benchmarks", *sys.argv[1:]])
    neighbours = OtherProcesses()
    clocks = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *clocks, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        session = Session(target, draft, lambda doing: progress.update(task, description=doing, advance=1))
        progress.update(task, total=session.calls(wanted(figures), options.prompts, options.rounds))
        try:
            run(session, figures, prompts, spare, options.rounds, options.minutes)
            source["versions"] = {name: worker.call("info")["versions"] for name, worker in session.workers.items()}
            results = assemble(session, figures, prompts, source)
        finally:
            session.close()
    source["neighbours"] = neighbours.share()  # after all child processes have ended
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "bench.md").write_text(markdown(results))
    print(markdown(results))
    return 1 if any(row["verdict"] == "missed" for row in results["figures"]) else 0


if __name__ == "__main__":
    sys.exit(main())
