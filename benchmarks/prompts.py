"""The held-out prompts: JSON lines in, token ids out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETS = ("code", "edit")
TOKENS = 128
"""Maximum new tokens of a text."""
SPARE = 3
"""Prompts of each set, taken from its end, on which draft lengths are chosen; they are never measured."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and how many tokens every contender generates."""

    ids: list[int]
    tokens: int = TOKENS


Prompts = dict[str, list[Prompt]]


def load(folder: Path, tokenizer: Any, count: int) -> tuple[Prompts, Prompts]:
    """At most the first `count` prompts of each set, and its last `SPARE`.

    Every line of `<set>.jsonl` has a "prompt": for code a text to continue, for edit a request, put into the chat
    template. A request may have a known "answer"; then no more tokens than the answer has are generated.
    """
    measured, spare = {}, {}
    for name in SETS:
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [_prompt(json.loads(line), name == "edit", tokenizer) for line in lines]
        if len(prompts) <= SPARE:
            raise SystemExit(f"{name}.jsonl holds {len(prompts)} prompts, at least {SPARE + 1} are needed")
        measured[name], spare[name] = prompts[: min(count, len(prompts) - SPARE)], prompts[-SPARE:]
    return measured, spare


def _prompt(entry: dict[str, str], request: bool, tokenizer: Any) -> Prompt:
    if not request:
        return Prompt(list(tokenizer.encode(entry["prompt"])))
    messages = [{"role": "user", "content": entry["prompt"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = tokenizer.encode(entry["answer"], add_special_tokens=False) if "answer" in entry else TOKENS * [0]
    # The template writes special tokens itself.
    return Prompt(list(tokenizer.encode(text, add_special_tokens=False)), min(TOKENS, len(answer)))
