"""Reads the held-out prompts from JSON lines as token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.measure.provenance import digest

SETS = ("code", "edit")
TOKENS = 128
"""Maximum number of new tokens for a prompt."""
SPARE = 3
"""Number of prompts at the end of each set on which draft lengths are chosen. They are never measured."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: token ids, the number of tokens that every contender generates, and the set of the prompt."""

    ids: list[int]
    tokens: int = TOKENS
    kind: str = "code"


Prompts = dict[str, list[Prompt]]


def load(folder: Path, tokenizer: Any, count: int) -> tuple[Prompts, Prompts]:
    """Return at most the first `count` prompts of each set, and the last `SPARE` prompts of each set.

    Every line of `<set>.jsonl` has a "prompt": a text to continue in the set code, and a message in the set edit, to
    which the chat template is applied. A line may have the known "answer"; then at most as many tokens as in the answer
    are generated.
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
    """Make a prompt from one line of the set `kind`."""
    if kind != "edit":
        return Prompt(list(tokenizer.encode(entry["prompt"])), kind=kind)
    messages = [{"role": "user", "content": entry["prompt"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = tokenizer.encode(entry["answer"], add_special_tokens=False) if "answer" in entry else TOKENS * [0]
    # The chat template contains the special tokens.
    return Prompt(list(tokenizer.encode(text, add_special_tokens=False)), min(TOKENS, len(answer)), kind)


def shortened(prompts: Prompts, tokens: int) -> Prompts:
    """Return the same prompts with at most `tokens` new tokens each."""
    return {name: [replace(p, tokens=min(tokens, p.tokens)) for p in rows] for name, rows in prompts.items()}


def choice(folder: Path) -> dict[str, Any] | None:
    """Return how the prompts of a folder were chosen (its choice.json, see `benchmarks.choose_prompts`), with the
    digest of this file; None if the folder has no choice.json.

    Raises SystemExit if the prompts in the folder are not the chosen prompts.
    """
    file = folder / "choice.json"
    if not file.exists():
        return None
    choice: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for name in SETS:
        if choice["digests"].get(name) != digest([folder / f"{name}.jsonl"]):
            raise SystemExit(f"{name}.jsonl is not the file that choice.json describes: choose the prompts again")
    return choice | {"sha256": digest([file])}
