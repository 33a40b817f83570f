"""Shared code of the commands that measure: options of drafters, prompts and output files, Ctrl-C, printing of results.

--drafter suffix --drafter eagle3:draft_tokens=5,shape=tree      drafters with options after a colon
--drafter suffix+model                                           a stack, as in `generate --drafter suffix,model`
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from slipstream.cli import render
from slipstream.cli.option_groups import argument, option
from slipstream.cli.options import ModelOptions, number, parse_options
from slipstream.cli.report import make_section
from slipstream.cli.table_forms import print_section
from slipstream.core.strict import JsonObject
from slipstream.drafters.draft_plan import WITHOUT_DRAFT
from slipstream.drafters.registry import limit_chosen
from slipstream.errors import ParameterError, ServedError
from slipstream.measure.configs import Contender
from slipstream.measure.prompts import Entry, PromptSet, choose_prompts as load_prompts, select_entries
from slipstream.measure.results import INTERRUPTED, Result, check_writable
from slipstream.settings import AUTO

if TYPE_CHECKING:
    from slipstream.llm import LLM


@dataclass(frozen=True)
class PromptOptions:
    """The prompts of a measurement. Commands with other defaults have a subclass."""

    prompts: str = argument(
        "Prompts: a file (Spec-Bench, HumanEval, JSON lines, text), or built-in kinds: code, edit, proofread, "
        "summary, chat, varied.",
        default="code,edit",
    )
    count: int = option(6, "Maximum number of prompts, spread evenly over the categories.", "--prompts", min=1)
    category: list[str] | None = option(None, "Use only prompts of this category; repeatable.")
    template: str = option("auto", "Prompt format: chat, raw, or auto (chat for instructions).")
    turns: int = option(2, "Maximum number of turns of a conversation; the target answers earlier turns.", min=1)

    def check(self) -> list[Entry]:
        """Return the chosen prompts as text, without a model. Raises the errors of `load`."""
        return select_entries(self.prompts, self.count, self.category or (), self.template)[0]

    def load(self, llm: LLM, tokens: int) -> PromptSet:
        """Return the chosen prompts as token ids. tokens: maximum length of an answer between two turns."""
        return load_prompts(llm, self.prompts, self.count, self.category or (), self.template, self.turns, tokens)


@dataclass(frozen=True)
class OutputOptions:
    out: Path | None = option(None, "Write the result and its provenance to this JSON file.")
    as_json: bool = option(False, "Print the result as JSON.", "--json")

    def check(self) -> None:
        """Raise ResultError unless the output file can be written. Called before the measurement."""
        if self.out is not None:
            check_writable(self.out)


def keep_unfinished(measure: Callable[[], Result]) -> tuple[Result, int]:
    """Measure, and return the result with exit code 0. After Ctrl-C, or when a server fails, return the unfinished
    result with 130 or 2; raise again if nothing was measured yet. Other errors are passed on."""
    try:
        return measure(), 0
    except (KeyboardInterrupt, ServedError) as stop:
        result: Result | None = getattr(stop, "result", None)
        if result is None:
            if isinstance(stop, KeyboardInterrupt):
                render.message("note", "nothing was measured yet: the first pass over the prompts had not ended")
            raise
        if isinstance(stop, KeyboardInterrupt):
            return result, 130
        render.message("error", str(stop))
        return result, 2


def show_section(result: Result) -> None:
    print_section(make_section(result))


def finish(result: Result, files: OutputOptions, show: Callable[[Result], None] = show_section) -> None:
    """Print the result (as JSON if requested), its warnings and the file it was written to. show: prints it as text."""
    if files.as_json:
        print(json.dumps(result.as_dict(), ensure_ascii=False))
    else:
        show(result)
    for warning in result.warnings:
        render.message("warning", warning)
    if not result.complete:
        render.message("warning", INTERRUPTED)
    if files.out is not None:
        render.line(f"wrote {files.out}; `slipstream report {files.out}` turns it into a page")


def run(
    files: OutputOptions, what: str, total: int, measure: Callable[[Callable[[], None]], Result]
) -> tuple[Result, int]:
    """Measure while a progress bar of `total` steps is shown, and print the result. Returns the result and the exit
    code. measure: is called with a function that advances the bar."""
    with render.progress(what, total) as advance:
        result, code = keep_unfinished(lambda: measure(advance))
    finish(result, files)
    return result, code


T = TypeVar("T")


@dataclass(frozen=True)
class LabModels(ModelOptions):
    """`ModelOptions` with any number of drafters."""

    PANEL: ClassVar[str] = "Speculation"
    drafter: list[str] | None = option(
        None,
        "Drafter to measure, with its options after a colon, as in eagle3:draft_tokens=5; repeatable.",
        shown="suffix, and model if there is a draft model, or suffix,mtp if the target has MTP layers",
    )  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.contenders(adaptive=True)

    def contenders(self, adaptive: bool = False) -> list[Contender]:
        """Return the drafters to compare with plain decoding. adaptive: choose draft lengths in each step unless a
        number is given. Raises ParameterError for invalid drafters before anything is loaded."""
        return [make_contender(self, spec, adaptive) for spec in self.specs()]

    def specs(self) -> list[str]:
        named = self.drafter or list(dict.fromkeys((self.usual, WITHOUT_DRAFT)))
        chosen = [spec.strip() for spec in named if spec.strip() != "none"]  # plain decoding is always measured
        if len(set(chosen)) < len(chosen):
            raise ParameterError(
                f"--drafter names the same drafter twice: {', '.join(chosen)}",
                fix="remove one, or give each other options: --drafter ngram:max_ngram=3",
            )
        if self.drafter_option and len(chosen) > 1:
            raise ParameterError(
                f"--drafter-option was given with {len(chosen)} drafters",
                why="it is unknown which of them the option is for",
                fix="write options after the name of their drafter: --drafter ngram:max_ngram=3",
            )
        return chosen

    def one(self, spec: str | None = None, **changes: object) -> ModelOptions:
        """Return these options with one drafter, or with the default drafter if `spec` is None."""
        values = {f.name: getattr(self, f.name) for f in fields(ModelOptions)}
        return ModelOptions(**values | {"drafter": spec, "drafter_option": None} | changes)


def make_contender(models: LabModels, spec: str, adaptive: bool = False, **changes: object) -> Contender:
    """Make a contender from a drafter as given on the command line. changes: fields of `ModelOptions` to set. Raises
    ParameterError for `draft_tokens=auto` unless `adaptive`."""
    one, options = parse_drafter(models, spec, **changes)
    shown = [spec.partition(":")[0], *(f"{key}={value}" for key, value in options.items())]
    drafter, drafter_options = one.speculation
    label, options = " ".join(shown), options | drafter_options
    if adaptive and one.length == AUTO:
        return Contender(label, drafter, limit_chosen(one.method), options, adaptive=True)
    return Contender(label, drafter, one.fixed_length, options)


def parse_drafter(models: LabModels, spec: str, **changes: object) -> tuple[ModelOptions, JsonObject]:
    """Return the model options with one drafter, as given on the command line, and the drafter's options."""
    name, _, listed = spec.partition(":")
    options = parse_options([*(pair for pair in listed.split(",") if pair), *(models.drafter_option or ())])
    given = {key: options.pop(key) for key in ("draft", "draft_tokens") if key in options}
    return models.one(name.replace("+", ","), **changes | given), options


def parse_values(name: str, text: str, kind: Callable[[str], T] = number) -> tuple[T, ...]:  # type: ignore[assignment]
    """Parse values: "2:8" -> 2, 3, ..., 8; "2:8:3" -> 2, 5, 8; "1,4,8" -> 1, 4, 8. Raises ParameterError."""
    words: list[str] = []
    for part in map(str.strip, text.split(",")):
        if ends := re.fullmatch(r"(-?\d+):(-?\d+)(?::([1-9]\d*))?", part):
            words += [str(n) for n in range(int(ends[1]), int(ends[2]) + 1, int(ends[3] or 1))] or [part]
        else:
            words.append(part)
    try:
        if any(not word or ":" in word for word in words):
            raise ValueError
        return tuple(dict.fromkeys(map(kind, words)))
    except ValueError:
        fix = "give values as in 1,4,8, or a range of integers as in 2:8"
        raise ParameterError(f"{name} is {text!r}, which is not a list of values", fix=fix) from None
