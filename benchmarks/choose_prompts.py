"""`python -m benchmarks.choose_prompts` chooses prompts whose outputs do not loop, before any speed is measured.

The target decodes each candidate plainly and greedily. A prompt qualifies if the end of its output does not repeat
exactly with some period (see `slipstream.measure.loops`), because a loop is easy to draft and says little about other
text. Candidates are the embedded held-out prompts and, for code, other files of JSON lines with a "prompt". Chosen
prompts from other files are written only to the output folder, which must not be tracked by git.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.prompts import SPARE, TOKENS, Prompt, encode
from benchmarks.protocol import ROOT, THREADS
from slipstream import LLM, SamplingParams, zoo
from slipstream.measure.loops import PERIODS, SHORTEST, TURNS, measure_periodic_tail
from slipstream.measure.provenance import commit, digest, model, now, public

EMBEDDED = ROOT / "slipstream" / "zoo" / "prompts"
CONTEXT = 1024
"""Prompt and output must fit into this many tokens, which is the context of some contenders."""

CRITERION = (
    "the target's greedy output of {} tokens (edits: at most as many as the known answer has) has no exactly periodic "
    f"tail: at its end no period of up to {PERIODS} tokens occurs {TURNS} times over at least {SHORTEST} tokens"
)

Entry = dict[str, Any]
Decode = Callable[[Prompt], Seq[int]]


@dataclass
class Candidates:
    """The candidates of one file: the prompts that qualify, in the order of the file, and how many do not qualify."""

    file: Path
    kept: list[Entry] = field(default_factory=list)
    loops: int = 0
    long: int = 0

    def as_dict(self) -> dict[str, Any]:
        examined = len(self.kept) + self.loops + self.long
        counts = {"examined": examined, "kept": len(self.kept), "loops": self.loops, "too_long": self.long}
        return {**counts, "sha256": digest([self.file])}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choose_prompts", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for code.jsonl, edit.jsonl and choice.json")
    parser.add_argument(
        "--outside", type=Path, nargs="+", default=[], metavar="FILE", help="JSON lines with code prompts to continue"
    )
    parser.add_argument("--count", type=int, default=24, help="prompts to measure, code and edits together")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="new tokens, as many as will be measured")
    parser.add_argument("--target", help="checkpoint folder; the embedded model by default")
    return parser.parse_args(words)


def untracked(folder: Path) -> bool:
    """Return whether git would not track files of this folder, which need not exist."""
    folder = folder.resolve()
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    git = lambda *a: subprocess.run(["git", "-C", str(there), *a], capture_output=True)  # noqa: E731
    try:
        inside = not git("rev-parse", "--is-inside-work-tree").returncode
        return not inside or not git("check-ignore", "--quiet", str(folder / "code.jsonl")).returncode
    except OSError:  # no git
        return not folder.is_relative_to(ROOT)


def examine(file: Path, kind: str, tokens: int, tokenizer: Any, decode: Decode) -> Candidates:
    """Decode every prompt of a file, and return the candidates."""
    candidates = Candidates(file)
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        entry = json.loads(line)
        prompt = encode(entry, kind, tokenizer)
        prompt = Prompt(prompt.ids, min(tokens, prompt.tokens), kind)
        if len(prompt.ids) + prompt.tokens > CONTEXT:
            candidates.long += 1
        elif measure_periodic_tail(decode(prompt)):
            candidates.loops += 1
        else:
            known = {key: entry[key] for key in ("prompt", "answer") if key in entry}
            candidates.kept.append(known | {"source": file.name, "line": number})
    return candidates


def alternating(*lists: Seq[Entry]) -> list[Entry]:
    return [entry for row in zip_longest(*lists) for entry in row if entry is not None]


def choose(embedded: Seq[Entry], outside: Seq[Entry], edits: Seq[Entry], count: int) -> tuple[list[Entry], list[Entry]]:
    """Return the lines of code.jsonl and of edit.jsonl: the prompts to measure, then `SPARE` more prompts, on which
    draft lengths are chosen.

    Half of the measured prompts are edits and half are code, and half of the code prompts are from other files. If
    there are too few prompts of a kind, there are more of the other kind. The first prompts of each file are taken.
    """
    edit_count = min(count // 2, len(edits) - SPARE)
    most = min(count - edit_count, len(embedded) + len(outside) - SPARE)
    if edit_count < 1 or most < 1:
        raise SystemExit(f"{len(embedded) + len(outside)} code and {len(edits)} edit prompts qualify: too few")
    inside = min(len(embedded), max(most // 2, most - len(outside)))
    other = most - inside
    rest = [*outside[other:], *embedded[inside:]][:SPARE]
    return [*alternating(outside[:other], embedded[:inside]), *rest], list(edits[: edit_count + SPARE])


def main(words: list[str] | None = None) -> int:
    """Choose prompts, write them, and print how many were chosen. Returns 1 if fewer prompts qualify than requested."""
    options = arguments(words)
    if not untracked(options.out):
        raise SystemExit(
            f"{options.out} would be tracked by git: name a folder outside of the repository, or an ignored one"
        )
    missing = [str(file) for file in options.outside if not file.is_file()]
    if missing:
        raise SystemExit(f"no such file: {', '.join(missing)}")
    target = options.target or str(zoo.target_dir())
    llm = LLM(target, dtype="float32", threads=THREADS)

    def decode(prompt: Prompt) -> Seq[int]:
        params = SamplingParams(max_tokens=prompt.tokens, ignore_eos=True)
        return list(llm.generate([prompt.ids], params)[0].token_ids)

    look = lambda file, kind: examine(file, kind, options.tokens, llm.tokenizer, decode)  # noqa: E731
    code, edits = look(EMBEDDED / "code.jsonl", "code"), look(EMBEDDED / "edit.jsonl", "edit")
    outside_files = [look(file, "code") for file in options.outside]
    outside = alternating(*(each.kept for each in outside_files))
    chosen = dict(zip(("code", "edit"), choose(code.kept, outside, edits.kept, options.count), strict=True))

    options.out.mkdir(parents=True, exist_ok=True)
    files = {name: options.out / f"{name}.jsonl" for name in chosen}
    for name, entries in chosen.items():
        files[name].write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    measured = {name: entries[:-SPARE] for name, entries in chosen.items()}
    names = {"embedded code": code, "embedded edits": edits, **{each.file.name: each for each in outside_files}}
    choice = {
        "criterion": CRITERION.format(options.tokens),
        "tokens": options.tokens,
        "examined": {name: each.as_dict() for name, each in names.items()},
        "measured": {name: {n: sum(e["source"] == n for e in es) for n in dict.fromkeys(e["source"] for e in es)}
                     for name, es in measured.items()},
        "spare": SPARE,
        "digests": {name: digest([file]) for name, file in files.items()},
        "target": model(target),
        "commit": commit(),
        "date": now(),
        "command": public(
            " ".join(["python", "-m", "benchmarks.choose_prompts", *(sys.argv[1:] if words is None else words)])
        ),
    }  # fmt: skip
    (options.out / "choice.json").write_text(json.dumps(choice, indent=1) + "\n")
    for name, each in names.items():
        counts = each.as_dict()
        print(f"{name}: {counts['kept']} of {counts['examined']} qualify, {each.loops} loop, {each.long} are too long")
    total = sum(map(len, measured.values()))
    parts = ", ".join(f"{len(entries)} {name}" for name, entries in measured.items())
    print(
        f"{total} of {options.count} to measure ({parts}), and {SPARE} of each to choose draft lengths: {options.out}"
    )
    return 0 if total >= options.count else 1


if __name__ == "__main__":
    sys.exit(main())
