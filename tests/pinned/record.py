"""Record Slipstream's behaviour again: `python -m tests.pinned.record [greedy] [sampled] [commands] [names]`.

Only for intended changes. Results that depend on rounding are refused: greedy texts whose two best logits are close,
and anything that changes with the executor, the precision, the number of threads, or the other texts of a batch.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import slipstream
from slipstream import LLM, Completion, SamplingParams
from tests.pinned import cases
from tests.pinned.cases import EDITED, GREEDY, HERE, SAMPLED, Speculation, ask, course_of, set_up, text_of

MARGIN = 1e-3  # minimum gap between the two best logits
ENGINES: dict[str, dict[str, Any]] = {
    "native": {"executor": "native", "dtype": "float32", "threads": 1},
    "native, two threads": {"executor": "native", "dtype": "float32", "threads": 2},
    "native, cache in float16": {"executor": "native", "dtype": "float32", "threads": 1, "kv_dtype": "float16"},
    "torch": {"executor": "torch", "dtype": "float32", "threads": 1},
    "torch, two threads": {"executor": "torch", "dtype": "float32", "threads": 2},
    "torch, float64": {"executor": "torch", "dtype": "float64", "threads": 1},
}
SEEDS = 60  # tried for each sampled text before giving up
Wanted = Mapping[str, SamplingParams]


@cache
def engine(name: str) -> LLM:
    return LLM("embedded", **ENGINES[name])


def outcome(done: Completion) -> dict[str, Any]:
    """Return the parts of a completion that must be equal on all engines."""
    return text_of(done) | course_of(done)


def fragile(wanted: Wanted, completions: Mapping[str, Completion]) -> dict[str, str]:
    """Return the prompts whose result is different if they run alone or on another engine, and describe where."""
    runs = {"alone": ask(engine("native"), wanted, alone=True)}
    runs |= {name: ask(engine(name), wanted) for name in ENGINES if name != "native"}
    return {
        name: where
        for where, run in runs.items()
        for name, done in run.items()
        if outcome(done) != outcome(completions[name])
    }


def settle(speculation: Speculation, rule: str = "rejection") -> None:
    for name in ENGINES:
        set_up(engine(name), speculation, rule)


def plain_texts() -> dict[str, Any]:
    """Return the greedy outputs, after checking the margins of their tokens."""
    native = engine("native")
    set_up(native, Speculation(None))
    looked = ask(native, {name: replace(params, logprobs=2) for name, params in GREEDY.items()})
    for name, done in looked.items():
        margin = min(each.top[0][1] - each.top[1][1] for each in done.logprobs or ())
        if margin <= MARGIN:
            sys.exit(f"prompt {name!r} is fragile: its two best logits are {margin:.1e} apart")
    return {name: text_of(done) for name, done in looked.items()}


def greedy(scratch: Path) -> dict[str, Any]:
    """Return the greedy outputs, with and without changed logits, and the statistics of each drafter."""
    results: dict[str, Any] = {}
    for title, wanted in (("greedy", GREEDY), ("edited", EDITED)):
        results[title] = {"texts": {}, "courses": {}}
        for label, speculation in cases.speculations(scratch).items():
            settle(speculation)
            done = ask(engine("native"), wanted)
            texts = {name: text_of(each) for name, each in done.items()}
            if not results[title]["texts"]:  # the first drafter is plain decoding
                results[title]["texts"] = texts
                results[title]["logprobs"] = {
                    name: [round(each.logprob, 4) for each in d.logprobs] for name, d in done.items() if d.logprobs
                }
            if texts != results[title]["texts"]:
                sys.exit(f"{label}, {title}: the text is not that of plain decoding")
            for name, where in fragile(wanted, done).items():
                sys.exit(f"{label}, {title}, prompt {name!r} is fragile: {where}")
            results[title]["courses"][label] = {name: values(each) for name, each in done.items()}
    return results


def sampled(scratch: Path) -> dict[str, Any]:
    """Return seeded outputs of each drafter under each rule."""
    every = cases.speculations(scratch).items()
    return {label: {rule: sturdy(each, rule) for rule in cases.rules(label)} for label, each in every}


def sturdy(speculation: Speculation, rule: str) -> dict[str, Any]:
    """Return one row per prompt, with the first seed for which the result is not fragile."""
    settle(speculation, rule)
    seeds = dict.fromkeys(SAMPLED, 1)
    while True:
        wanted = {name: replace(params, seed=seeds[name]) for name, params in SAMPLED.items()}
        done = ask(engine("native"), wanted)
        bad = fragile(wanted, done)
        if not bad:
            break
        for name, where in bad.items():
            seeds[name] += 1
            if seeds[name] > SEEDS:
                sys.exit(f"{speculation}, rule {rule}, prompt {name!r} is fragile with every seed: {where}")
    if rule == "coupled":
        plain = ask(engine("native"), {name: replace(params, draft_tokens=0) for name, params in wanted.items()})
        if any(plain[name].token_ids != each.token_ids for name, each in done.items()):
            sys.exit(f"{speculation}: the text under the rule coupled is not that of plain decoding")
    return {name: {"seed": seeds[name], "ids": each.token_ids, "course": values(each)} for name, each in done.items()}


def values(done: Completion) -> list[Any]:
    return list(course_of(done).values())


def commands(scratch: Path) -> dict[str, Any]:
    """Return the result of each command line."""
    return {line: cases.kind_of(*cases.run_command(line, scratch)) for line in cases.COMMANDS}


def names(scratch: Path) -> dict[str, Any]:
    """Return all names that users refer to: exports, parameters, options, error classes."""
    llm = engine("native")
    return {
        "exports": sorted(slipstream.__all__),
        "members": {name: cases.members_of(name, llm) for name in sorted(slipstream.__all__)},
        "parameters": {path: cases.parameters_of(path) for path in cases.CALLABLES},
        "options": {name: cases.options_of(name) for name in cases.SUBCOMMANDS},
        "errors": cases.error_families(),
        "aliases": cases.ALIASES,
    }


def rows(value: Any, indent: int = 0) -> str:
    """Format a value as JSON with one line per innermost object."""
    if not isinstance(value, dict) or not any(isinstance(each, dict) for each in value.values()):
        return json.dumps(value, separators=(",", ":"))
    inner = [f"{' ' * (indent + 1)}{json.dumps(name)}: {rows(each, indent + 1)}" for name, each in value.items()]
    return "{\n" + ",\n".join(inner) + "\n" + " " * indent + "}"


def main(chosen: list[str]) -> None:
    parts = {"greedy": greedy, "sampled": sampled, "commands": commands, "names": names}
    texts = plain_texts() if "greedy" in chosen or not chosen else cases.pinned("greedy")["greedy"]["texts"]
    with tempfile.TemporaryDirectory() as folder:
        scratch = cases.make_scratch(Path(folder), cases.recording_of(texts))
        for name in chosen or parts:
            (HERE / f"{name}.json").write_text(rows(parts[name](scratch)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
