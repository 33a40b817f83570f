"""Shared by the commands that measure: options of prompts and of output files, Ctrl-C, and how a result is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.bench.prompts import Entry, select
from slipstream.cli import render
from slipstream.cli.option_groups import argument, option
from slipstream.errors import ServedError

if TYPE_CHECKING:
    from slipstream.bench.prompts import PromptSet
    from slipstream.bench.results import Result
    from slipstream.llm import LLM


@dataclass(frozen=True)
class PromptOptions:
    """The prompts of a measurement. Commands with other defaults have a subclass."""

    prompts: str = argument(
        "Prompt file (Spec-Bench, HumanEval, JSON lines, text), or built-in kinds: code, edit, proofread, summary, "
        "chat, varied.",
        default="code,edit",
    )
    count: int = option(6, "Maximum number of prompts, spread over the categories.", "--prompts", min=1)
    category: list[str] | None = option(None, "Use only this category; repeatable.")
    template: str = option("auto", "Prompt format: chat, raw, or auto (chat for instructions).")
    turns: int = option(2, "Turns of a conversation; a later one follows the target's own answers.", min=1)

    def check(self) -> list[Entry]:
        """The chosen prompts as text. Raises what `load` raises, without a model."""
        return select(self.prompts, self.count, self.category or (), self.template)[0]

    def load(self, llm: LLM, tokens: int) -> PromptSet:
        """The chosen prompts as token ids. tokens: largest number of new tokens of an answer between two turns."""
        from slipstream.bench import prompts

        return prompts.load(llm, self.prompts, self.count, self.category or (), self.template, self.turns, tokens)


@dataclass(frozen=True)
class OutputOptions:
    out: Path | None = option(None, "Write the result and its provenance to this JSON file.")
    as_json: bool = option(False, "Print the result as JSON.", "--json")

    def check(self) -> None:
        """Raise ResultError unless the output file can be written. Called before the measurement."""
        writable(out=self.out)


def writable(**files: Path | None) -> None:
    """Raise ResultError unless all of these files, each named by its option, can be written."""
    from slipstream.bench.results import check_writable

    for name, path in files.items():
        if path is not None:
            check_writable(path, f"--{name}")


def unfinished(measure: Callable[[], Result]) -> tuple[Result, int]:
    """The result and exit code 0; what was measured until Ctrl-C, or until a server failed, and 130, or 2. Other errors
    are passed on, and these if nothing was measured."""
    try:
        return measure(), 0
    except (KeyboardInterrupt, ServedError) as stop:
        result: Result | None = getattr(stop, "result", None)
        if result is None:
            raise
        if isinstance(stop, KeyboardInterrupt):
            return result, 130
        render.message("error", str(stop))
        return result, 2


def show_section(result: Result) -> None:
    """Print the tables and the finding."""
    from slipstream.cli.report import section

    render.section(section(result))


def finish(result: Result, files: OutputOptions, show: Callable[[Result], None] = show_section) -> None:
    """Print the result and its warnings, and name the file it was written to. show: prints it for people."""
    from slipstream.bench.results import INTERRUPTED

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
