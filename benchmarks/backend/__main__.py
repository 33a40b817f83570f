"""`python -m benchmarks.backend`: forward passes of the CPU backends, timed in interleaved rounds."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.backend import models
from benchmarks.backend.lineup import CONTENDERS, GROUPS, MOST_ROWS, ROWS, chosen
from benchmarks.backend.report import assemble, markdown
from benchmarks.backend.session import Session, hide, places
from benchmarks.protocol import ROOT, THREADS
from slipstream import zoo
from slipstream.bench.provenance import OtherProcesses, commit, machine, now

RESULTS = ROOT / "benchmarks" / "results"
MODELS = Path(tempfile.gettempdir()) / "slipstream-benchmark-models"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backend", description=__doc__)
    parser.add_argument(
        "--before", type=Path, metavar="FOLDER", help="checkout of the version to compare with, with its .venv"
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP",
                        help=f"models and conditions to time, of {', '.join(GROUPS)}")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="CONTENDER",
                        help=f"of {', '.join(CONTENDERS)}")  # fmt: skip
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="numbers of rows to time")
    parser.add_argument("--no-prompt", action="store_true", help="do not time the pass over a long prompt")
    parser.add_argument(
        "--minutes", type=float, default=15, help="time for the rounds of all groups together, without loading"
    )
    parser.add_argument(
        "--cold", type=int, default=2, help="first uses with an empty cache (0: do not measure first uses)"
    )
    parser.add_argument("--cached", type=int, default=5, help="first uses with the compiled kernels on disk")
    parser.add_argument(
        "--models", type=Path, default=MODELS, metavar="FOLDER", help="where checkpoints are written and kept"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for backend.json and backend.md")
    options = parser.parse_args()
    if not all(1 <= rows <= MOST_ROWS for rows in options.rows):
        parser.error(f"--rows must be between 1 and {MOST_ROWS}")
    return options


def checkpoints(folder: Path) -> Any:
    """(model, worker) -> the folder that this worker reads. "target" and "draft" are the embedded pair."""

    def find(model: str, worker: str) -> Path:
        if model in ("target", "draft"):
            return Path(zoo.target_dir() if model == "target" else zoo.draft_dir())
        path = models.checkpoint(model, folder)
        return models.widened(path, folder / f"{model}-float32-copy") if worker == "llamacpp" else path

    return find


def commit_of(folder: Path | None) -> str | None:
    """The short commit of a checkout."""
    if folder is None:
        return None
    git = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or None


def main() -> int:
    options, console = arguments(), Console(stderr=True)
    groups = chosen(options.groups, options.only, options.rows, not options.no_prompt)
    total = sum(group.weight for group in groups.values())
    neighbours = OtherProcesses()
    with console.status("starting") as status:
        session = Session(places(options.before), checkpoints(options.models), status.update)
        if options.cold:
            session.first_use("before", 1, options.cached)
            session.first_use("now", options.cold, options.cached)
        for key, group in groups.items():
            session.measure(key, group, 60 * options.minutes * group.weight / total)
    given = [each for each in (options.before, options.models, options.out) if each]
    private = [ROOT, *given, *(each.resolve() for each in given)]
    provenance = {
        "date": now(),
        "command": hide(" ".join(["python", "-m", "benchmarks.backend", *sys.argv[1:]]), private),
        "commit": commit(),
        "before": commit_of(options.before),
        "machine": machine(),
        "threads": THREADS,
        "versions": session.versions,
        "neighbours": neighbours.share(),  # now that every child has been waited for
    }
    skipped = {name: hide(reason, private) for name, reason in session.skipped.items()}
    results = assemble(session.series, session.logits, skipped, session.first_uses, session.notes, provenance)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "backend.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "backend.md").write_text(markdown(results))
    print(markdown(results))
    return 1 if any(row["verdict"] == "missed" for row in results["figures"]) else 0


if __name__ == "__main__":
    sys.exit(main())
