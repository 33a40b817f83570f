"""`python -m benchmarks.drafters` measures every drafter on the embedded target, interleaved with plain decoding.

There are three runs: code and edit prompts (greedy and sampled), random tokens (each drafter with chosen draft
lengths), and HumanEval if its file is given. With `--runs` only the named runs are repeated; the results of other runs
are kept.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.markdown import beside, bound
from benchmarks.protocol import ROOT, THREADS
from slipstream import zoo
from slipstream.core.target import Target
from slipstream.drafters.registry import DRAFTERS
from slipstream.llm import LLM
from slipstream.measure.benchmark import BenchConfig, Contender, bench
from slipstream.measure.prompts import Prompt, PromptSet, choose_prompts
from slipstream.measure.results import Result
from slipstream.measure.tables import Estimate, ends
from slipstream.settings import EXECUTORS
from slipstream.targets.describe import as_target

Arm = dict[str, Any]

LOOKUPS = tuple(name for name, spec in DRAFTERS.items() if spec.lookup)
SINGLES = (
    *LOOKUPS, "lookahead", "model", "model int8",
    "medusa", "eagle3", "eagle3 int8", "eagle3 tree", "layerskip",
)  # fmt: skip
"""Labels of the drafters with which the hybrid is compared."""
HYBRID = "suffix+model"
"""The hybrid that is compared with the single drafters at both temperatures: suffix lookup, then the draft model."""
RUNS = {"mix": "Code and edits", "random": "Random tokens, with chosen draft lengths", "humaneval": "HumanEval"}
SURE = {"suffix": 6, "ngram": 4}
"""For each lookup of a hybrid, the shortest match that is preferred to the draft model."""


@functools.cache
def draft(quantize: str | None) -> Target:
    """Load the embedded draft model. In int8 it is faster and its draft tokens are as good. The number of threads is
    not fixed, because for such a small model one thread may be faster than several."""
    return as_target(zoo.draft_dir(), threads=None if quantize else THREADS, quantize=quantize)


def contenders(only: Seq[str] = ()) -> list[Contender]:
    """Return the drafters, with good settings for the embedded target on a CPU. Drafters whose head is not shipped are
    left out. only: labels of the drafters to return; empty: all."""
    int8 = ("model", {"model": draft("int8")})
    drafters = [
        *(Contender(name, name, 16) for name in LOOKUPS),
        Contender("lookahead", "lookahead", 8),
        Contender("model", "model", 5, {"model": draft(None)}),
        Contender("model int8", "model", 6, {"model": draft("int8")}),
        Contender("layerskip", "layerskip", 2, {"exit": 5}),
    ]
    if shipped("medusa"):
        drafters.append(Contender("medusa", "medusa", 5))
    if shipped("eagle3"):
        small = {"quantize": "int8"}
        drafters.append(Contender("eagle3", "eagle3", 5))
        drafters.append(Contender("eagle3 int8", "eagle3", 5, small))
        drafters.append(Contender("eagle3 tree", "eagle3", 5, small | {"shape": "tree", "nodes": 12}))
        drafters.append(Contender("suffix+eagle3", "hybrid", 16, {"members": ["suffix", ("eagle3", small)]}))
    drafters += [
        Contender(f"{name}+model", "hybrid", 16, {"members": [name, int8], "min_match": SURE[name]})
        for name in ("ngram", "suffix")
    ]
    return [each for each in drafters if not only or each.label in only]


def controlled(only: Seq[str] = ()) -> list[Contender]:
    """Return each single drafter with draft lengths that are chosen in each step and may be zero."""
    return [replace(c, adaptive=True) for c in contenders(only) if c.label in SINGLES]


def shipped(kind: str) -> bool:
    return (zoo.HERE / "models" / kind).is_dir()


def random_prompts(llm: LLM, count: int, length: int = 96) -> PromptSet:
    """Make prompts of uniformly random tokens, which do not repeat and which no drafter has learnt."""
    rng = np.random.default_rng(0)
    rows = rng.integers(8, llm.target.vocab_size, (count, length)).tolist()
    return PromptSet("random tokens", [Prompt(row, "random", f"random {i}") for i, row in enumerate(rows)], "seed 0")


def measure(options: argparse.Namespace) -> dict[str, Result]:
    llm = LLM("embedded", threads=THREADS, executor=options.executor)
    console = Console(stderr=True)

    def run(name: str, arms: list[Contender], prompts: PromptSet, config: BenchConfig) -> Result:
        with console.status(f"{name}: {len(arms) + 1} ways to decode {len(prompts.prompts)} prompts"):
            return kept(bench(llm, arms, prompts, config).as_dict())

    common: dict[str, Any] = {"rounds": options.rounds, "seconds": 60 * options.minutes}
    longest: dict[str, Any] = {"tokens": 96, "sampling": {"ignore_eos": True}}
    runs: dict[str, Callable[[], Result]] = {
        "mix": lambda: run(
            "code and edits",
            contenders(options.only),
            choose_prompts(llm, "code,edit", options.prompts),
            BenchConfig(**longest, **common, temperatures=(0.0, 0.8)),
        ),
        "random": lambda: run(
            "random tokens",
            controlled(options.only),
            random_prompts(llm, 12),
            BenchConfig(  # twice the rounds, because the differences are a few per cent
                **longest | {"tokens": 64},
                **common | {"rounds": 2 * options.rounds, "seconds": 120 * options.minutes},
                temperatures=(1.0,),
            ),
        ),
        "humaneval": lambda: run(
            "HumanEval",
            contenders(options.only),
            choose_prompts(llm, str(options.humaneval), 8),
            BenchConfig(**longest, **common),
        ),
    }
    return {name: runs[name]() for name in RUNS if name in options.runs}


def kept(run: dict[str, Any]) -> Result:
    """Convert a run of earlier results."""
    return Result(**{name: run[name] for name in ("kind", "settings", "provenance", "data", "warnings", "complete")})


def arms_of(result: Result, temperature: float) -> dict[str, Arm]:
    return {arm["label"]: arm for arm in result.data["arms"] if arm["temperature"] == temperature}


def speed(arm: Arm, category: str | None = None) -> float:
    """Speed-up over plain decoding."""
    f = arm["overall"] if category is None else arm["categories"][category]
    return float(f["speedup"]["value"])


def figures(results: dict[str, Result]) -> list[dict[str, Any]]:
    """Return the figures with the values to reach and the measured values."""
    greedy = arms_of(results["mix"], 0.0)
    rows = []

    def row(text: str, least: float, value: float, who: str = "") -> None:
        verdict = "reached" if value >= least else "missed"
        rows.append({"figure": text, "least": least, "measured": value, "by": who, "verdict": verdict})

    best = max((name for name, arm in greedy.items() if not arm["plain"]), key=lambda name: speed(greedy[name], "code"))
    row("best drafter against plain decoding, greedy, code", 2.5, speed(greedy[best], "code"), best)
    chains = [name for name in greedy if name.startswith("eagle3")]
    if chains:
        lengths = {n: greedy[n]["categories"]["code"]["mean_acceptance_length"] for n in chains}
        who = max(lengths, key=lambda n: lengths[n])
        row("EAGLE-3's mean acceptance length, greedy, code", 3.5, lengths[who], who)
    for temperature in dict.fromkeys(arm["temperature"] for arm in results["mix"].data["arms"]):
        sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        arms = arms_of(results["mix"], temperature)
        rivals = [name for name in arms if name in SINGLES]
        if HYBRID not in arms or not rivals:
            continue
        for kind, least in ((None, 1.1), *((kind, 1.0) for kind in arms[HYBRID]["categories"])):
            rival = max(rivals, key=lambda name, kind=kind, arms=arms: speed(arms[name], kind))  # type: ignore[misc]
            row(
                f"hybrid ({HYBRID}) against the best single drafter ({rival}), {kind or 'the mix'}, {sampling}",
                least,
                speed(arms[HYBRID], kind) / speed(arms[rival], kind),
            )
    random = arms_of(results["random"], 1.0) if "random" in results else {}
    wild = {name: arm for name, arm in random.items() if not arm["plain"]}
    if wild:
        worst = min(wild, key=lambda name: speed(wild[name]))
        row(
            "any drafter with chosen draft lengths against plain decoding, random tokens",
            0.95,
            speed(wild[worst]),
            worst,
        )
    return rows


def markdown(results: dict[str, Result]) -> str:
    lines = [
        "| figure | must reach | measured | by | |",
        "|---|---|---|---|---|",
        *(
            f"| {r['figure']} | {bound(r['least'])} | {beside(r['measured'], r['least'])} | {r['by']} | "
            f"{'reached' if r['verdict'] == 'reached' else '**missed**'} |"
            for r in figures(results)
        ),
    ]
    for key, result in results.items():
        for temperature in dict.fromkeys(arm["temperature"] for arm in result.data["arms"]):
            arms = list(arms_of(result, temperature).values())
            kinds = list(arms[0]["categories"])
            sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            lines += ["", f"### {RUNS[key]}, {sampling}", "", *table(arms, kinds)]
    machine = results["mix"].provenance["machine"]
    lines += [
        "",
        "Speed-ups are over plain decoding of the same run, with 95 % intervals over prompts and rounds. tau counts "
        "the bonus token. Shares: draft, target, verify, host.",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {THREADS} threads.",
        "",
        *(
            f"- {RUNS[key]}: {r.provenance['date']}, commit {r.provenance['commit']}; "
            f"`python -m benchmarks.{r.provenance['command']}`"
            for key, r in results.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def table(arms: Seq[Arm], kinds: Seq[str]) -> list[str]:
    split = kinds if len(kinds) > 1 else []
    head = ["drafter", "K", "tokens/s", "speed-up (95 %)", *(f"on {k}" for k in split), "accepted", "tau", "time split"]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for arm in arms:
        f = arm["overall"]
        gain, shares = f["speedup"], f["shares"]
        rate = f["acceptance_rate"]
        cells = [
            arm["label"],
            "-" if arm["plain"] else str(arm["draft_tokens"]),
            f"{f['tokens_per_second']['value']:.0f}",
            "1"
            if arm["plain"]
            else f"{beside(gain['value'], 1)}x ({ends(Estimate(**gain), functools.partial(beside, bar=1), ' to ')})",
            *("1" if arm["plain"] else f"{beside(speed(arm, k), 1)}x" for k in split),
            "-" if rate is None else f"{100 * rate:.0f} %",
            f"{f['mean_acceptance_length']:.2f}",
            " / ".join(
                f"{100 * share:.0f}"
                for share in (shares["draft"], shares["target"], shares["verify"], shares["host"] + shares["outside"])
            ),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafters", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="timed passes over the prompts by each drafter")
    parser.add_argument("--minutes", type=float, default=3, help="time limit of each run: no pass begins after it")
    parser.add_argument("--prompts", type=int, default=32, help="code and edit prompts together")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl")
    parser.add_argument("--only", nargs="+", default=(), help="labels of drafters")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="which of the three; all")
    parser.add_argument("--executor", choices=EXECUTORS, default="auto", help="what runs the target")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if options.humaneval is None:
        options.runs = [name for name in options.runs if name != "humaneval"]
    name = "drafters" if options.executor == "auto" else f"drafters-{options.executor}"
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{name}.json"
    before = json.loads(file.read_text())["runs"] if file.exists() else {}
    if "mix" not in options.runs and "mix" not in before:
        parser.error(f"the figures need the run 'mix', and there is none in {file}: name it in --runs, too")
    fresh = measure(options)
    results = {run: fresh[run] if run in fresh else kept(before[run]) for run in RUNS if run in fresh or run in before}
    rows = figures(results)
    report = {"figures": rows, "runs": {name: result.as_dict() for name, result in results.items()}}
    file.write_text(json.dumps(report, indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))
    return 1 if any(r["verdict"] == "missed" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
