"""`python -m benchmarks.serve` makes the speed table of the server, measured over HTTP.

The arms of a group are interleaved in one run. With --only, the results of other groups are kept. With --larger, the
target has 79M parameters (`derived_models.larger`), and the results are written to other files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.derived_models import larger
from benchmarks.protocol import ROOT, Worker
from benchmarks.serve import probes, vllm_lineup
from benchmarks.serve.figures import rows
from benchmarks.serve.lineup import GROUPS, Group, fixed, texts_of_prompts
from benchmarks.serve.report import markdown
from benchmarks.serve.row_drafts_host import measure
from benchmarks.serve.servers import Pair, running
from slipstream.measure.endpoint import Endpoint
from slipstream.measure.provenance import OtherProcesses, command_line, public
from slipstream.measure.traffic import TrafficArm, TrafficConfig, count_requests, measure_traffic

HOST_ROUNDS, HOST_TOKENS = 5, 64
PARTS = ("runs", "probes", "skipped")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*GROUPS, *vllm_lineup.GROUPS], help="groups to measure")
    parser.add_argument("--vllm", action="store_true", help="drafters inside vLLM, with the target of 79M parameters")
    parser.add_argument("--larger", action="store_true", help="serve a target of 79M parameters; some minutes a group")
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "huggingface", help="where made models are kept")
    parser.add_argument("--rounds", type=int, default=4, help="passes over the arms of a group")
    parser.add_argument("--seconds", type=float, default=150, help="time limit of a group; three passes are run anyway")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Measure, print, and write serve.json and serve.md. Returns 1 if a figure misses its bar."""
    options, console = arguments(words), Console(stderr=True)
    pair = Pair()
    if options.larger or options.vllm:
        name = "-vllm" if options.vllm else "-79M"
        pair = Pair(larger(options.files), drafters=("model", "suffix", "ngram"), name=name)
    groups = vllm_lineup.GROUPS if options.vllm else GROUPS
    file = options.out / f"serve{pair.name}.json"
    results = json.loads(file.read_text()) if file.exists() else {"runs": {}, "probes": {}, "skipped": {}}
    for name in options.only or groups:
        measured(name, groups[name], options, pair, results, console)
        table_rows = (
            vllm_lineup.rows(results["runs"], results["probes"]) if options.vllm else rows(*map(results.get, PARTS))
        )
        results["figures"] = [row.as_dict() for row in table_rows]
        file.write_text(json.dumps(results, indent=1) + "\n")
        file.with_suffix(".md").write_text(markdown(results, table_rows))
    print(file.with_suffix(".md").read_text())
    return int(any(row.verdict == "missed" for row in table_rows))


def measured(
    name: str, group: Group, options: argparse.Namespace, pair: Pair, results: dict[str, Any], console: Console
) -> None:
    """Measure one group, and put the measurements into the results."""
    config = TrafficConfig(rounds=options.rounds, seconds=options.seconds)
    neighbours = OtherProcesses()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task(f"{name}: starting servers", total=None)
        with running(group.servers(Path(folder), pair)) as (places, skipped):
            arms = running_arms(group, places, skipped)
            progress.update(task, description=name, total=count_requests(arms, config))
            result = measure_traffic(arms, config, advance=lambda: progress.advance(task)).as_dict()
            if name == "streams":
                results["probes"] = probed(places, pair)
            if name == "speed":
                results["probes"] = {drafter: measure(drafter, str(pair.target)) for drafter in vllm_lineup.LOOKUPS}
    for arm in result["data"]["arms"]:
        for part in ("first", "next", "whole"):  # times of single requests would make the file too large
            del arm["cells"][part]
    result["provenance"]["neighbours"] = neighbours.share()  # after all servers have ended
    result["provenance"]["command"] = public(command_line(["python", "-m", "benchmarks.serve", *sys.argv[1:]]))
    results["runs"][name] = result
    results["skipped"] = {k: v for k, v in results["skipped"].items() if k not in places} | skipped


def running_arms(group: Group, places: dict[str, Endpoint], skipped: dict[str, str]) -> list[TrafficArm]:
    """Return the arms of a group whose servers run, without comparisons with arms that do not run. Raises SystemExit if
    no server runs."""
    absent = {name: Endpoint(f"http://absent/{number}") for number, name in enumerate(skipped)}
    arms: dict[int, TrafficArm] = {}
    for arm in group.arms({**places, **absent}):
        if arm.endpoint not in absent.values():
            arms[id(arm)] = replace(arm, against=arms.get(id(arm.against)))
    if not arms:
        raise SystemExit(f"no server started: {skipped}")
    return list(arms.values())


def probed(places: dict[str, Endpoint], pair: Pair) -> dict[str, Any]:
    """Run `probes` and `host_work`."""
    texts = texts_of_prompts()
    known = {name: places[name].resolve() for name in ("auto", "off")}
    probed: dict[str, Any] = {"first": asyncio.run(probes.first_texts(known["auto"], texts, 12, 0))}
    for name, place in known.items():
        probed[f"gaps, {name}"] = asyncio.run(probes.gaps(place, texts, 6, 0))
    worker = Worker("host work", "benchmarks.serve.host_work")
    try:
        drafters: dict[str, tuple[str | None, int]] = {"off": (None, 0)}
        drafters |= {"model": (str(pair.draft), int(fixed("model"))), "suffix": ("suffix", int(fixed("suffix")))}
        for name, (draft, length) in drafters.items():
            worker.call("load", name=name, target=str(pair.target), draft=draft, draft_tokens=length)
        chosen = [ids[:96] for ids in texts[:16]]
        probed["host"] = {name: [] for name in drafters}
        for number in range(HOST_ROUNDS + 1):
            for name in drafters:
                one = worker.call("measure", name=name, prompts=chosen, tokens=HOST_TOKENS)
                if number:  # the first measurement warms up
                    probed["host"][name].append(one)
    finally:
        worker.close()
    return probed


if __name__ == "__main__":
    sys.exit(main())
