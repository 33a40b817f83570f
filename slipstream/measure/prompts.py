"""Loads prompts for measurements, built-in prompts or files. Formats of files:

    Spec-Bench   JSON lines with question_id, category, turns (a question, and follow-ups); 2401.07851
    HumanEval    JSON lines with task_id, prompt: code to continue; 2107.03374
    JSON lines   {"prompt": ...} or {"text": ...}, and optionally "category"
    text         one prompt per line

The speed-up of a drafter depends mostly on the text, so repeated prompts are dropped, and results have categories.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream import zoo
from slipstream.core.params import SamplingParams
from slipstream.core.strict import JsonObject, parse_json
from slipstream.errors import ParameterError, PromptError, did_you_mean
from slipstream.measure.provenance import text_digest
from slipstream.measure.tables import spell

if TYPE_CHECKING:
    from slipstream.llm import LLM

TEMPLATES = ("auto", "chat", "raw")


@dataclass(frozen=True)
class Entry:
    """One prompt as text. request: True for a question to answer, False for text to continue. later: further turns of
    the conversation; each is asked after the answer to the previous turn."""

    text: str
    category: str
    name: str
    request: bool = False
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids."""

    ids: list[int]
    category: str
    name: str


@dataclass
class PromptSet:
    """Chosen prompts. origin: file name or built-in kinds. digest: hash of the texts. warnings: for the report."""

    origin: str
    prompts: list[Prompt]
    digest: str
    warnings: list[str] = field(default_factory=list)

    @property
    def size(self) -> str:
        """ "6 prompts" """
        return spell(len(self.prompts), "prompt")

    @property
    def ids(self) -> list[list[int]]:
        return [prompt.ids for prompt in self.prompts]

    def in_context(self, tokens: int, most: int) -> list[list[int]]:
        """Return the token ids of each prompt after earlier text, `tokens` in all. The earlier text is the other
        prompts, repeated if needed. A longer prompt keeps its end. Raises ParameterError for `tokens` above `most`."""
        if tokens > most:
            raise ParameterError(
                f"--context is {tokens}, but the target has room for {most} tokens before the answer",
                fix=f"give --context of at most {most}, or a smaller --max-new-tokens",
            )
        rows = []
        for i, prompt in enumerate(self.ids):
            neighbours = [ids for k in range(1, len(self.ids)) for ids in [self.ids[i - k]]] or [prompt]
            row = list(prompt)
            for earlier in cycle(neighbours):
                if len(row) >= tokens:
                    break
                row = [*earlier, *row]
            rows.append(row[-tokens:])
        return rows

    @property
    def categories(self) -> list[str]:
        return [prompt.category for prompt in self.prompts]

    def as_dict(self) -> JsonObject:
        counts = {kind: self.categories.count(kind) for kind in dict.fromkeys(self.categories)}
        lengths = [len(prompt.ids) for prompt in self.prompts]
        return {
            "source": self.origin,
            "digest": self.digest,
            "categories": counts,
            "names": [prompt.name for prompt in self.prompts],
            "lengths": lengths,
        }


def choose_prompts(
    llm: LLM,
    origin: str = "code,edit",
    count: int | None = None,
    categories: Seq[str] = (),
    template: str = "auto",
    turns: int = 1,
    tokens: int = 64,
) -> PromptSet:
    """Choose and encode prompts.

    origin      a file, or built-in kinds, as in "code" or "code,edit".
    count       largest number of prompts, taken from all categories in turn; None: all. A conversation counts as one.
    categories  use only these categories.
    template    "chat" applies the chat template to each prompt, "raw" to no prompt, "auto" to questions.
    turns       turns of a conversation to use, each as a prompt: see `ask_later_turns`. 1: only the first.
    tokens      largest number of new tokens of an answer between two turns.

    Raises PromptError for files that cannot be read or have no prompts, ParameterError for unknown names.
    """
    chosen, warnings = select_entries(origin, count, categories, template)
    prompts, long = [], 0
    for entry in chosen:
        ids = encode(llm, entry, template)
        if len(ids) > llm.checks.longest:
            if not is_built_in(origin):
                long += 1
                continue
            ids = ids[-max(1, (llm.checks.longest + 1) // 2) :]
        prompts.append(Prompt(ids, entry.category, entry.name))
        if entry.later and turns > 1:
            follow = ask_later_turns(llm, entry, template, turns, tokens)
            long += min(len(entry.later), turns - 1) - len(follow)
            prompts += follow
    if long:
        context = spell(llm.checks.longest + 1, "token")
        warnings.append(f"{spell(long, 'prompt')} left out: too long for the context of {context}")
    if not prompts:
        raise PromptError(
            f"no prompt of {origin} fits into the target's context of {llm.checks.longest + 1} tokens",
            fix="give shorter prompts, or another target",
        )
    name = origin if is_built_in(origin) else Path(origin).name
    digest = text_digest(*(text for entry in chosen for text in (entry.text, *entry.later[: turns - 1])))
    return PromptSet(name, prompts, digest, warnings)


def select_entries(
    origin: str = "code,edit", count: int | None = None, categories: Seq[str] = (), template: str = "auto"
) -> tuple[list[Entry], list[str]]:
    """Choose prompts like `choose_prompts`, but return their texts, and warnings. Raises the errors of `choose_prompts`
    that need no tokenizer. Does not import torch, so that a command can call this before it loads a model."""
    if template not in TEMPLATES:
        raise ParameterError(f"there is no prompt format {template!r}", fix=did_you_mean(template, TEMPLATES))
    if count is not None and count < 1:
        raise ParameterError(f"the number of prompts is {count}, but must be at least 1", fix="give a number >= 1")
    chosen = read_entries(origin)
    known = list(dict.fromkeys(entry.category for entry in chosen))
    for name in categories:
        if name not in known:
            raise ParameterError(f"{origin} has no category {name!r}", fix=did_you_mean(name, known))
    if categories:
        chosen = [entry for entry in chosen if entry.category in categories]
    warnings: list[str] = []
    unique = list({entry.text: entry for entry in reversed(chosen)}.values())[::-1]
    if len(unique) < len(chosen):
        gone = len(chosen) - len(unique)
        warnings.append(
            f"{gone} of {spell(len(chosen), 'prompt')} left out as duplicates: a drafter that learns could repeat "
            "its earlier answer"
        )
    return take_in_turns(unique, count), warnings


def is_built_in(origin: str) -> bool:
    return all(kind in zoo.PROMPT_KINDS for kind in origin.split(","))


def read_entries(origin: str) -> list[Entry]:
    """Read all prompts of a file, or of built-in kinds."""
    if is_built_in(origin):
        return [
            Entry(entry["prompt"], kind, _name(entry), request=kind in zoo.REQUESTS)
            for kind in origin.split(",")
            for entry in zoo.prompts(kind)
        ]
    path = Path(origin).expanduser()
    if not path.is_file():
        raise PromptError(
            f"there is no prompt file {origin!r}, and no built-in kind of that name",
            fix=f"give a file, or built-in kinds: {', '.join(zoo.PROMPT_KINDS)}",
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise PromptError(f"{origin} cannot be read: {fault}", fix="give UTF-8 text or JSON lines") from fault
    lines = path.suffix in (".jsonl", ".json", ".ndjson") or text.lstrip().startswith("{")
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    rows = [
        _json_line(path, number, line) if lines else Entry(line, path.stem, str(number)) for number, line in numbered
    ]
    if not rows:
        raise PromptError(f"{origin} contains no prompt", fix="write one JSON object per line, or one prompt per line")
    return rows


def _name(entry: JsonObject) -> str:
    return str(entry.get("name") or f"{entry['package']}/{entry['file']}")


def take_in_turns(entries: Seq[Entry], count: int | None) -> list[Entry]:
    """Return at most `count` entries, chosen from all categories in turn, and sorted by category."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.category, []).append(entry)
    taken = dict.fromkeys(groups, 0)
    left = len(entries) if count is None else min(count, len(entries))
    while left:
        for kind, group in groups.items():
            if left and taken[kind] < len(group):
                taken[kind] += 1
                left -= 1
    return [entry for kind, group in groups.items() for entry in group[: taken[kind]]]


def encode(llm: LLM, entry: Entry, template: str, later: Seq[str] = ()) -> list[int]:
    """Encode a prompt, with the chat template if `template` says so. later: further messages, by the assistant and the
    user in turn; without a chat template they become paragraphs."""
    has = bool(getattr(llm.tokenizer, "chat_template", None))
    if template == "chat" or (template == "auto" and entry.request and has):
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate([entry.text, *later])]
        return llm.chat_prompt(said)  # raises if there is no template
    if llm.tokenizer is None:
        raise PromptError("the prompts are text, but the target has no tokenizer", fix="use a target with a tokenizer")
    return list(llm.tokenizer.encode("\n\n".join([entry.text, *later])))


def ask_later_turns(llm: LLM, entry: Entry, template: str, turns: int, tokens: int) -> list[Prompt]:
    """Make prompts of turn 2 and later of a conversation. Each holds the earlier turns and the target's own answers,
    decoded plainly and greedily, with at most `tokens` tokens each. Turns that exceed the context are left out."""
    drafter, said, prompt_turns = llm.drafter, list[str](), list[Prompt]()
    try:
        llm.use(None)
        for turn, question in enumerate(entry.later[: turns - 1], start=2):
            before = llm.generate([encode(llm, entry, template, said)], SamplingParams(max_tokens=tokens))[0]
            said += [before.text, question]
            ids = encode(llm, entry, template, said)
            if len(ids) > llm.checks.longest:
                break
            prompt_turns.append(Prompt(ids, entry.category, f"{entry.name}, turn {turn}"))
    finally:
        llm.use(drafter)
    return prompt_turns


def _json_line(path: Path, number: int, line: str) -> Entry:
    try:
        value = parse_json(line)
    except json.JSONDecodeError as fault:
        raise PromptError(
            f"{path.name}, line {number}, is not JSON: {fault.msg} at column {fault.colno}",
            fix="write one JSON object per line, without line breaks inside",
        ) from fault
    where = f"{path.name}, line {number},"
    if not isinstance(value, dict):
        raise PromptError(f"{where} is a {type(value).__name__}, but must be an object", fix='as in {"prompt": "..."}')
    category = str(value.get("category") or ("HumanEval" if "task_id" in value else path.stem))
    name = str(value.get("question_id", value.get("task_id", number)))
    turns = value.get("turns")
    later: tuple[str, ...] = ()
    if isinstance(turns, list) and turns:
        text, request, later = turns[0], True, tuple(turns[1:])
    else:
        text, request = value.get("prompt", value.get("text")), False
    if not isinstance(text, str) or not text.strip():
        has = ", ".join(map(repr, value)) or "nothing"
        raise PromptError(f"{where} contains no prompt; it has {has}", fix="write it under turns, prompt or text")
    if not all(isinstance(turn, str) and turn.strip() for turn in later):
        raise PromptError(f"{where} contains a turn that is not text", fix="write each turn as a non-empty string")
    return Entry(text, category, name, request, later)
