"""`python -m benchmarks.peers` measures Slipstream and other engines in one interleaved run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.contenders import WORKERS
from benchmarks.peers.lineup import BASE, alternating, lineup
from benchmarks.peers.table import assemble, markdown, plot
from benchmarks.prompts import SETS, choice, load, shortened
from benchmarks.protocol import ROOT, ContenderError
from benchmarks.provenance import provenance
from benchmarks.session import Session
from slipstream import zoo
from slipstream.measure.plots import draw_svg
from slipstream.measure.provenance import OtherProcesses, digest
from slipstream.tokens.text import load_tokenizer


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=8, help="time limit, loading included: no round begins that would end later"
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="maximum number of timed runs of every contender on every prompt"
    )
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=128, help="maximum new tokens per prompt")
    default = "; without it each has the one that is fastest on prompts that are not measured"
    parser.add_argument("--draft-tokens", type=int, help=f"draft length of every draft model{default}")
    parser.add_argument("--lookup-tokens", type=int, help=f"draft length of every lookup{default}")
    names = list(lineup())
    parser.add_argument("--only", nargs="+", choices=names, metavar="CONTENDER", help=f"of {', '.join(names)}")
    parser.add_argument("--target", help="checkpoint folder; the embedded model by default")
    parser.add_argument("--draft", help="checkpoint folder; the embedded draft by default")
    folder, chosen = ROOT / "slipstream" / "zoo" / "prompts", "made by benchmarks.choose_prompts, for instance"
    parser.add_argument("--prompt-folder", type=Path, default=folder, help=f"code.jsonl and edit.jsonl, {chosen}")
    out = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=out, help="folder for peers.json, peers.md and peers.svg")
    return parser.parse_args(words)


def versions(session: Session) -> dict[str, Any]:
    """Return the versions of each worker's packages, once per worker module. Workers that died are left out."""
    versions: dict[str, Any] = {}
    for name, worker in session.workers.items():
        try:
            said = worker.call("info")["versions"]
        except ContenderError:
            continue
        if said not in versions.values():
            versions[name] = said
    return versions


def main(words: list[str] | None = None) -> int:
    """Measure, print, and write three files. Returns 1 if our own plain decoding could not be measured."""
    options, console = arguments(words), Console(stderr=True)
    options.out.mkdir(parents=True, exist_ok=True)  # fails before the run if the folder is not writable
    target, draft = options.target or str(zoo.target_dir()), options.draft or str(zoo.draft_dir())
    contenders = lineup(options.draft_tokens, options.lookup_tokens)
    keys = [key for key in contenders if key in (options.only or contenders) or key == BASE]
    how = choice(options.prompt_folder)
    measured, spare = load(options.prompt_folder, load_tokenizer(target), options.prompts)
    prompts, spare = (shortened(alternating(sets), options.tokens) for sets in (measured, spare))
    texts = {name: digest([options.prompt_folder / f"{name}.jsonl"]) for name in SETS}
    command = ["python", "-m", "benchmarks.peers", *(sys.argv[1:] if words is None else words)]
    source, neighbours = provenance(target, draft, texts, command), OtherProcesses()
    source["choice"] = how
    clocks = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *clocks, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        advance = lambda doing: progress.update(task, description=doing, advance=1)  # noqa: E731
        session = Session(target, draft, advance, contenders, WORKERS)
        progress.update(task, total=session.calls(keys, len(prompts["both"]), options.rounds, len(spare["both"])))
        try:
            deadline = monotonic() + 60 * options.minutes
            session.start(keys)
            session.measure(keys, prompts, spare, options.rounds, deadline)
            source["versions"] = versions(session)
            results = assemble(session, prompts, source)
        finally:
            session.close()
    source["neighbours"] = neighbours.share()  # after all child processes have ended
    table = markdown(results, {key: contenders[key].label for key in keys})
    (options.out / "peers.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "peers.md").write_text(table)
    if BASE in session.cells:
        (options.out / "peers.svg").write_text(draw_svg(plot(results)))
    print(table)
    return 0 if BASE in session.cells else 1


if __name__ == "__main__":
    sys.exit(main())
