"""Terminal output: text coloured by origin, statistics, errors.

Generated text goes to standard output and everything else to standard error, so that output can be piped. Colours are
used only on a terminal, and not if NO_COLOR is set.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from rich.color import ColorSystem
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from slipstream.core.stats import SpecStats
from slipstream.errors import SlipstreamError, sentence
from slipstream.measure.tables import count as count, percent as percent, size as size, spell as spell

if TYPE_CHECKING:
    from slipstream.targets.described import MemoryPlan

# Basic terminal colours only: they are readable in light and dark themes, and green and magenta can be told apart with
# red-green colour blindness.
DRAFTED, BY_TARGET = Style(color="green"), Style(color="magenta", bold=True)
BAD = "bold red"
LEVELS = {"error": BAD, "warning": "bold yellow", "note": "bold cyan"}
_CONTROL = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


def out() -> Console:
    return Console(highlight=False, emoji=False, markup=False)


def err() -> Console:
    return Console(stderr=True, highlight=False, emoji=False, markup=False)


def has_colour(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


class TextWriter:
    """Streams text to standard output: accepted draft tokens in one colour, the target's own tokens in another. Log
    messages wait until the text ends, so that they never cut a line of it.

    On a terminal, control characters are replaced, because they could move the cursor or change settings. Elsewhere the
    text is written unchanged.
    """

    def __init__(self, colours: bool = True):
        console = out()
        self._terminal = console.is_terminal
        self.colours = colours and has_colour(console)
        self.written = ""

    def write(self, text: str, drafted: bool = False) -> None:
        if not text:
            return
        self.written += text
        LogHandler.held = [] if LogHandler.held is None else LogHandler.held
        if self._terminal:
            text = printable(text)
        if self.colours:
            text = (DRAFTED if drafted else BY_TARGET).render(text, color_system=ColorSystem.STANDARD)
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line if something may follow on it: on a terminal, or where standard error goes to the same place.
        Print the log messages that were held back."""
        if (self._terminal or _one_stream()) and not self.written.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        held, LogHandler.held = LogHandler.held or [], None
        for level, what in held:
            message(level, what)


def _one_stream() -> bool:
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # the streams were replaced by objects that are not files
        return False


def printable(text: str) -> str:
    return text.translate(_CONTROL)


def line(text: str) -> None:
    console = err()
    console.print(Text(text, style="dim"), soft_wrap=not console.is_terminal)


def legend() -> Text:
    return Text.assemble(
        "Colours: ", ("accepted draft token", DRAFTED), ", ", ("token chosen by the target", BY_TARGET)
    )


def message(level: str, what: str, *details: str) -> None:
    """Print a message on standard error: `level: what`, then one line per detail."""
    console = err()
    text = Text.assemble((f"{level}: ", LEVELS[level]), sentence(what))
    for detail in details:
        if detail:
            text.append(f"\n  {detail}")
    console.print(text, soft_wrap=not console.is_terminal)


def error(fault: SlipstreamError) -> None:
    """Print what failed, why it matters, and the fix."""
    lines = [fault.why, f"Fix: {fault.fix}" if fault.fix else ""]
    message("error", fault.what, *(sentence(line) for line in lines if line))


class LogHandler(logging.Handler):
    """Prints log records. held: (level, text) of records that wait for a `TextWriter`; None if no text is written."""

    held: ClassVar[list[tuple[str, str]] | None] = None

    def emit(self, record: logging.LogRecord) -> None:
        level = "warning" if record.levelno >= logging.WARNING else "note"
        if LogHandler.held is None:
            message(level, record.getMessage())
        else:
            LogHandler.held.append((level, record.getMessage()))


@contextmanager
def show_log() -> Iterator[None]:
    """Print the library's log records through `message`, and nowhere else, while a command runs."""
    log, handler = logging.getLogger("slipstream"), LogHandler()
    propagated, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagated


def hide_warnings(quiet: bool) -> None:
    """Print log records of errors only, if `quiet`."""
    for handler in logging.getLogger("slipstream").handlers:
        if isinstance(handler, LogHandler):
            handler.setLevel(logging.ERROR if quiet else logging.NOTSET)


def restore_terminal() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write("\x1b[0m\x1b[?25h")
            stream.flush()


def progress_bar(count: ProgressColumn, quiet: bool = False) -> Progress:
    """Make a progress bar on standard error, removed when done. count: column that shows how much is done."""
    console, columns = err(), (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error, removed when done; yields the function that advances the bar by one."""
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def status(what: str) -> Status:
    """Make a spinner on standard error, removed when done; it is invisible if standard error is not a terminal."""
    return err().status(what)


def summary(stats: SpecStats, rule: str, finish: str = "") -> str:
    """Return one line with number of tokens, speed, acceptance, rule and finish reason."""
    parts = [spell(stats.tokens, "token")]
    if stats.tokens_per_second:
        parts.append(f"{stats.tokens_per_second:.0f} tokens/s")
    if stats.proposed:
        parts.append(f"acceptance rate {percent(stats.acceptance_rate)}")
    parts.append(f"mean acceptance length {stats.mean_acceptance_length or 0:.2f}")
    parts.append(f"{rule} rule")
    if finish:
        parts.append(f"finish reason {finish}")
    if stats.drafter_faults:
        parts.append(f"drafter errors {stats.drafter_faults}")
    return ", ".join(parts)


def facts_table(rows: Seq[tuple[str, str]]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def _states(plan: MemoryPlan) -> str:
    kept = f"at most {size(plan.snapshots)} for later texts with the same beginning"
    return f"{size(plan.states)} for {spell(plan.sequences, 'request')} at once; {kept}"


def memory(plan: MemoryPlan) -> list[tuple[str, str]]:
    """List the memory of models and KV cache, and the memory that is left, for `facts_table`."""
    left = "free after that" if plan.headroom >= 0 else "lacking"
    return [
        ("target", size(plan.weights)),
        *([("draft", size(plan.draft))] if plan.draft else []),
        ("KV cache", f"{size(plan.kv)} for {spell(plan.kv_tokens, 'token')} of all requests"),
        *([("states", _states(plan))] if plan.per_sequence else []),
        (left, f"{size(abs(plan.headroom))} of {size(plan.available)}"),
    ]
