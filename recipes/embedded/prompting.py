"""Cut the embedded prompts from held-out files: `python -m recipes.embedded.prompting DATA`.

DATA is the token cache of a run (`OUT/data`); it names the tokenizer and, through the corpus, the split.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from recipes.embedded.corpus import SourceFile, build_corpus
from recipes.embedded.request_pairs import edit_pair, functions
from slipstream.zoo import HERE


def code_prompt(file: SourceFile, tokenizer: Tokenizer, low: int = 60, high: int = 200) -> str | None:
    """The beginning of a file up to the end of a line inside a function, `low` to `high` tokens long, or None."""
    rows = file.text.split("\n")
    nodes = [n for n in ast.walk(ast.parse(file.text)) if isinstance(n, ast.FunctionDef) and len(n.body) > 2]
    for node in sorted(nodes, key=lambda n: n.lineno):
        for statement in node.body[1:3]:
            # No line break at the end: with the indentation after it, it is one token, which the model must choose.
            text = "\n".join(rows[: statement.lineno - 1]).rstrip()
            if low <= len(tokenizer.encode(text).ids) <= high:
                return text
    return None


def choose(prompts: list[tuple[SourceFile, dict[str, Any]]], count: int, per_package: int) -> list[dict[str, Any]]:
    """At most `count` of the prompts, at most `per_package` of one package, with their origins."""
    used: Counter[str] = Counter()
    chosen: list[dict[str, Any]] = []
    for file, entry in prompts:
        if used[file.package] < per_package and len(chosen) < count:
            used[file.package] += 1
            chosen.append({**entry, "package": file.package, "version": file.version, "file": file.path})
    return chosen


def code_prompts(heldout: list[SourceFile], tokenizer: Tokenizer, count: int = 24) -> list[dict[str, Any]]:
    """Beginnings of held-out files."""
    prompts = [(f, {"prompt": text}) for f in heldout if (text := code_prompt(f, tokenizer))]
    return choose(prompts, count, per_package=3)


def edit_prompts(heldout: list[SourceFile], tokenizer: Tokenizer, count: int = 16) -> list[dict[str, Any]]:
    """Requests to edit a function of a held-out file whose answer takes 90 to 200 tokens; kinds take turns."""
    rng = random.Random(5)
    prompts, kinds = [], Counter[str]()
    for file in heldout:
        for source, node in functions(file.text):
            if not 90 <= len(tokenizer.encode(source).ids) <= 200:
                continue
            pairs = [p for _ in range(12) if (p := edit_pair(rng, source, node))]
            if pairs:
                pair = min(pairs, key=lambda p: kinds[p.kind])
                kinds[pair.kind] += 1
                prompts.append((file, {"kind": pair.kind, "prompt": pair.user, "answer": pair.assistant}))
                break
    return choose(prompts, count, per_package=2)


def main(data: Path) -> None:
    """Write `code.jsonl` and `edit.jsonl` into `slipstream/zoo/prompts`."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    names = set(json.loads((data / "data.json").read_text())["heldout_files"])
    heldout = [f for f in build_corpus() if f"{f.package}/{f.path}" in names and f.split == "heldout"]
    # By hash they come package by package: mix them, so that the choice spans packages.
    random.Random(3).shuffle(heldout)
    (HERE / "prompts").mkdir(exist_ok=True)
    for name, entries in (("code", code_prompts(heldout, tokenizer)), ("edit", edit_prompts(heldout, tokenizer))):
        text = "".join(json.dumps(e) + "\n" for e in entries)
        (HERE / "prompts" / f"{name}.jsonl").write_text(text)
        print(f"{name}: {len(entries)} prompts, {len(text)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
