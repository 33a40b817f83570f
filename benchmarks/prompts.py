"""The held-out prompts: JSON lines in, token ids out."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.measure.provenance import digest

SETS = ("code", "edit")
TOKENS = 128
"""Maximum new tokens of a text."""
SPARE = 3
"""Prompts of each set, taken from its end, on which draft lengths are chosen; they are never measured."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, how many tokens every contender generates, and the set that it is of."""

    ids: list[int]
    tokens: int = TOKENS
    kind: str = "code"


Prompts = dict[str, list[Prompt]]


def load(folder: Path, tokenizer: Any, count: int) -> tuple[Prompts, Prompts]:
    """At most the first `count` prompts of each set, and its last `SPARE`.

    Every line of `<set>.jsonl` has a "prompt": for code a text to continue, for edit a request, put into the chat
    template. A request may have a known "answer"; then no more tokens than the answer has are generated.
    """
    measured, spare = {}, {}
    for name in SETS:
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [encode(json.loads(line), name, tokenizer) for line in lines]
        if len(prompts) <= SPARE:
            raise SystemExit(f"{name}.jsonl holds {len(prompts)} prompts, at least {SPARE + 1} are needed")
        measured[name], spare[name] = prompts[: min(count, len(prompts) - SPARE)], prompts[-SPARE:]
    return measured, spare


def encode(entry: dict[str, str], kind: str, tokenizer: Any) -> Prompt:
    """One line of the set `kind`."""
    if kind != "edit":
        return Prompt(list(tokenizer.encode(entry["prompt"])), kind=kind)
    messages = [{"role": "user", "content": entry["prompt"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = tokenizer.encode(entry["answer"], add_special_tokens=False) if "answer" in entry else TOKENS * [0]
    # The template writes special tokens itself.
    return Prompt(list(tokenizer.encode(text, add_special_tokens=False)), min(TOKENS, len(answer)), kind)


def shortened(prompts: Prompts, tokens: int) -> Prompts:
    """The same, with at most `tokens` new tokens each."""
    return {name: [replace(p, tokens=min(tokens, p.tokens)) for p in rows] for name, rows in prompts.items()}


def choice(folder: Path) -> dict[str, Any] | None:
    """How the prompts of a folder were chosen (see `benchmarks.choose_prompts`), with the digest of that file; None if
    nothing says so.

    Raises SystemExit if the prompts differ from the chosen ones.
    """
    file = folder / "choice.json"
    if not file.exists():
        return None
    choice: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for name in SETS:
        if choice["digests"].get(name) != digest([folder / f"{name}.jsonl"]):
            raise SystemExit(f"{name}.jsonl is not the file that choice.json describes: choose the prompts again")
    return choice | {"sha256": digest([file])}
