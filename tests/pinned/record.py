"""Record Slipstream's behaviour again: `python -m tests.pinned.record [greedy] [sampled] [commands] [names]`.

Only for intended changes. Results that depend on rounding are refused: greedy texts whose two best logits are close,
and anything that changes with the executor, the precision, the number of threads, or a little noise on the logits.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from slipstream import LLM, Completion, SamplingParams
from tests.pinned import cases
from tests.pinned.cases import EDITED, GREEDY, HERE, SAMPLED, Speculation, ask, course_of, set_up, text_of

MARGIN = 1e-3  # minimum gap between the two best logits; the noise has the same size
ENGINES: dict[str, dict[str, Any]] = {
    "native": {"executor": "native", "dtype": "float32", "threads": 1},
    "native, two threads": {"executor": "native", "dtype": "float32", "threads": 2},
    "native, cache in float16": {"executor": "native", "dtype": "float32", "threads": 1, "kv_dtype": "float16"},
    "torch": {"executor": "torch", "dtype": "float32", "threads": 1},
    "torch, two threads": {"executor": "torch", "dtype": "float32", "threads": 2},
    "torch, float64": {"executor": "torch", "dtype": "float64", "threads": 1},
}
LIKELY = 32  # number of tokens per step that get noise
SEEDS = 60  # tried for each sampled text before giving up
Wanted = Mapping[str, SamplingParams]


@cache
def engine(name: str) -> LLM:
    return LLM("embedded", **ENGINES[name])


def noisy(wanted: Wanted, seed: int) -> Wanted:
    """The same requests, with a little noise on the logits of all tokens that are likely anywhere in their texts."""
    rng, out = random.Random(seed), {}
    looked = ask(engine("native"), {name: replace(params, logprobs=LIKELY) for name, params in wanted.items()})
    for name, done in looked.items():
        likely = sorted({token for each in done.logprobs or () for token, _ in each.top})
        noise = {token: rng.uniform(-MARGIN, MARGIN) for token in likely}
        out[name] = replace(wanted[name], logit_bias={**noise, **(wanted[name].logit_bias or {})})
    return out


def outcome(done: Completion) -> dict[str, Any]:
    """What must be equal on all engines."""
    return text_of(done) | course_of(done)


def fragile(wanted: Wanted, completions: Mapping[str, Completion]) -> dict[str, str]:
    """Prompts whose result differs on another engine, and on which."""
    out: dict[str, str] = {}
    native = engine("native")
    others: dict[str, Callable[[], dict[str, Completion]]] = {
        "alone": lambda: ask(native, wanted, alone=True),
        "noise 1": lambda: ask(native, noisy(wanted, 1)),
        "noise 2": lambda: ask(native, noisy(wanted, 2)),
        **{name: lambda name=name: ask(engine(name), wanted) for name in ENGINES if name != "native"},  # type: ignore
    }
    for where, other in others.items():
        for name, done in other().items():
            if outcome(done) != outcome(completions[name]):
                out.setdefault(name, where)
        if len(out) == len(wanted):
            break
    return out


def settle(speculation: Speculation) -> None:
    for name in ENGINES:
        set_up(engine(name), speculation)


def plain_texts() -> dict[str, Any]:
    """The greedy texts; checks their margins."""
    native = engine("native")
    set_up(native, Speculation(None))
    looked = ask(native, {name: replace(params, logprobs=2) for name, params in GREEDY.items()})
    for name, done in looked.items():
        margin = min(each.top[0][1] - each.top[1][1] for each in done.logprobs or ())
        if margin <= MARGIN:
            sys.exit(f"prompt {name!r} is fragile: its two best logits are {margin:.1e} apart")
    return {name: text_of(done) for name, done in looked.items()}


def greedy(scratch: Path) -> dict[str, Any]:
    """The greedy texts, with and without edited logits, and the statistics of each drafter."""
    results: dict[str, Any] = {}
    for title, wanted in (("greedy", GREEDY), ("edited", EDITED)):
        results[title] = {"texts": {}, "courses": {}}
        for label, speculation in cases.speculations(scratch).items():
            settle(speculation)
            done = ask(engine("native"), wanted)
            texts = {name: text_of(each) for name, each in done.items()}
            if not results[title]["texts"]:  # of the first one, which is plain decoding
                results[title]["texts"] = texts
                logprobs = {name: [each.logprob for each in d.logprobs] for name, d in done.items() if d.logprobs}
                results[title]["logprobs"] = {name: [round(x, 4) for x in values] for name, values in logprobs.items()}
            if texts != results[title]["texts"]:
                sys.exit(f"{label}, {title}: the text is not that of plain decoding")
            for name, where in fragile(wanted, done).items():
                sys.exit(f"{label}, {title}, prompt {name!r} is fragile: {where}")
            results[title]["courses"][label] = {name: values(each) for name, each in done.items()}
    return results


def sampled(scratch: Path) -> dict[str, Any]:
    """Seeded texts of each drafter under each rule, with the first seeds that are not fragile."""
    results: dict[str, Any] = {}
    for label, speculation in cases.speculations(scratch).items():
        results[label] = {}
        settle(speculation)
        for rule in cases.rules(label):
            results[label][rule] = sturdy(speculation, rule)
            print(label, rule, {name: row["seed"] for name, row in results[label][rule].items()}, file=sys.stderr)
    return results


def sturdy(speculation: Speculation, rule: str) -> dict[str, Any]:
    """One row per prompt."""
    for name in ENGINES:
        engine(name).rule = rule
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
    """The result of each command line."""
    results = {}
    for line in cases.COMMANDS:
        code, out, err = cases.run_command(line, scratch)
        if "Traceback" in out + err:
            sys.exit(f"slipstream {line}: a traceback")
        results[line] = cases.kind_of(code, out, err)
    return results


def names(scratch: Path) -> dict[str, Any]:
    """Everything that users refer to: names, parameters, options, error classes."""
    llm = engine("native")
    return {
        "exports": cases.exports(),
        "members": {name: cases.members_of(name, llm) for name in cases.exports()},
        "parameters": {path: cases.parameters_of(path) for path in cases.CALLABLES},
        "options": {name: cases.options_of(name) for name in cases.SUBCOMMANDS},
        "drafters": sorted(json.loads(cases.run_command("drafters --json", scratch)[1])),
        "errors": {name: cases.error_of(mistake, llm, scratch) for name, mistake in cases.MISTAKES.items()},
    }


def rows(value: Any, indent: int = 0) -> str:
    """JSON with one line per innermost object."""
    if not isinstance(value, dict) or not any(isinstance(each, dict) for each in value.values()):
        return json.dumps(value, separators=(",", ":"))
    inner = [f"{' ' * (indent + 1)}{json.dumps(name)}: {rows(each, indent + 1)}" for name, each in value.items()]
    return "{\n" + ",\n".join(inner) + "\n" + " " * indent + "}"


def main(chosen: list[str]) -> None:
    parts = {"greedy": greedy, "sampled": sampled, "commands": commands, "names": names}
    for name in chosen:
        if name not in parts:
            sys.exit(f"{name!r} is not one of {', '.join(parts)}")
    texts = plain_texts() if "greedy" in chosen or not chosen else cases.pinned("greedy")["greedy"]["texts"]
    with tempfile.TemporaryDirectory() as folder:
        scratch = cases.make_scratch(Path(folder), cases.recording_of(texts))
        for name in chosen or parts:
            (HERE / f"{name}.json").write_text(rows(parts[name](scratch)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
