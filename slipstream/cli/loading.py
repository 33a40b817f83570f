"""From options to a loaded `LLM`, with a progress bar where loading takes long, and the line that says what runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream.cli import render
from slipstream.cli.options import ModelOptions, parse_options
from slipstream.zoo import checkpoint_of

if TYPE_CHECKING:
    from slipstream.core.target import Target
    from slipstream.llm import LLM


def load(models: ModelOptions, quiet: bool = False, silent: bool = False) -> LLM:
    """Load target and drafter, `quiet`: without a progress bar, `silent`: without warnings. Raises the errors of
    `LLM`."""
    quieten(silent)
    console = render.err()
    options = parse_options(models.drafter_option or ())
    drafter, own = models.speculation
    with loading(console, quiet) as progress:
        from slipstream.llm import LLM

        return LLM(
            models.target,
            drafter,
            draft_tokens=models.length,
            rule=models.rule,
            executor=models.executor,
            dtype=models.dtype,
            device=models.device,
            quantize=models.quantize,
            draft_quantize=models.draft_quantize,
            kv_dtype=models.kv_dtype,
            threads=models.threads,
            draft_options=options | own,
            progress=progress,
        )


def quieten(silent: bool = False) -> None:
    """One voice on standard error: ours. Libraries keep their progress bars and advice to themselves."""
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
    ):
        os.environ.setdefault(name, value)
    render.show_warnings(silent)


@contextmanager
def loading(console: Console, quiet: bool = False) -> Iterator[Any]:
    """A bar over the bytes of the weights; it goes away when loading is done. Yields the callback for `LLM`."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    with bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def checkpoint(name: str, role: str) -> str:
    """Folder or hub id that a name on the command line stands for; role: "target" or "draft"."""
    return str(checkpoint_of(name, role))


def banner(llm: LLM, models: ModelOptions) -> str:
    """One line: whether speculation is on, by which method, how far, under which rule, on what."""
    runs = on(llm.target)
    if llm.drafter.name == "none" or llm.draft_tokens == 0:
        return f"SD OFF (plain decoding), target={models.target}, {runs}"
    draft = f", draft={models.draft_model}" if llm.drafter.name == "model" else ""
    kind = "lossless" if llm.rule.lossless else "NOT lossless"
    return (
        f"SD ACTIVE method={llm.drafter.name}, K={llm.draft_tokens}, rule={llm.rule.name} ({kind}), "
        f"target={models.target}{draft}, {runs}"
    )


def on(target: Target) -> str:
    """What a target runs on, e.g. "native on cpu"."""
    runtime = target.capabilities.runtime
    return f"{runtime.backend} on {target.device}" if runtime else str(target.device)
