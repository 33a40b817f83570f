"""Prompts from JSON lines: `slipstream generate --file prompts.jsonl` answers each line with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import PromptError, did_you_mean

if TYPE_CHECKING:
    from slipstream.llm import LLM, Prompt

FIELDS = ("prompt", "text", "messages")
"""Fields that may hold the prompt of a line, the first that is there; "messages" is a conversation."""


def is_lines(file: Path) -> bool:
    return file.suffix in (".jsonl", ".ndjson")


def read_lines(file: Path, field: str | None) -> list[Any]:
    """The prompt of each line: text, or a list of messages. field: where it is, if not in one of `FIELDS`. Raises
    PromptError with the number of the first line that has none."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise PromptError(f"the prompts cannot be read from {file}: {fault}", fix="give UTF-8 JSON lines") from fault
    found = [
        _prompt(f"{file.name}, line {number},", line, field) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise PromptError(f"{file} holds no prompt", fix='write one JSON object a line, as {"prompt": "..."}')
    return found


def _prompt(where: str, line: str, field: str | None) -> Any:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as fault:
        raise PromptError(f"{where} is not JSON: {fault.msg} at column {fault.colno}") from fault
    if not isinstance(row, dict):
        raise PromptError(f"{where} is a {type(row).__name__}, an object is needed", fix='as in {"prompt": "..."}')
    name = field or next((each for each in FIELDS if each in row), None)
    if name is None or name not in row:
        raise PromptError(
            f"{where} has no field {name or ' or '.join(FIELDS)}; it has {', '.join(map(repr, row)) or 'none'}",
            fix=did_you_mean(name, list(row)) if name else "name it: --prompt-field NAME",
        )
    value = row[name]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(turn, dict) and "role" in turn for turn in value):
        return value
    raise PromptError(
        f"{where} field {name!r} is {value!r:.60}, must be text or a list of messages",
        fix='as in {"messages": [{"role": "user", "content": "..."}]}',
    )


def encoded(llm: LLM, prompt: Any, chat: bool) -> Prompt:
    """A prompt of `read_lines` as `LLM.sequence` takes it. chat: text is a message, too."""
    return llm.chat_prompt(prompt) if chat or not isinstance(prompt, str) else prompt
