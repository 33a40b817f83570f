"""`slipstream chat`: a prompt loop."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli import render
from slipstream.cli.loading import banner, load
from slipstream.cli.option_groups import grouped, option
from slipstream.cli.options import SamplingOptions, UsualModels
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.cli.session import Session

PROMPT, FENCE = ">>> ", '"""'


@grouped
def chat(
    models: UsualModels,
    sampling: SamplingOptions,
    system: str | None = option(None, "System message.", shown=False),
    raw: bool = option(False, "Complete each prompt without a chat template."),
) -> None:
    """Chat with a model. /reset starts a new conversation, /help lists all commands."""
    llm = load(models, asked=[sampling.params()])
    params = sampling.params(llm.defaults.sampling)
    from slipstream.cli.session import Session

    session = Session(llm, params, raw=raw, system=system)
    render.line(banner(llm, models))
    how = (
        "without a chat template: prompts are completed as given" if session.raw else "using the model's chat template"
    )
    render.line(f"{how}; {FENCE} starts and ends a prompt of several lines, /help lists commands, Ctrl-D leaves")
    if llm.defaults.sampling:
        from slipstream.models.generation_defaults import shown

        render.line(shown(llm.defaults.sampling))
    remember_history()
    loop(session)


def loop(session: Session) -> None:
    """Read and answer prompts until Ctrl-D or /quit. An error is printed and the session continues."""
    while True:
        try:
            line = read()
        except EOFError:
            break
        except KeyboardInterrupt:  # Ctrl-C while typing discards the line
            print(file=sys.stderr)
            continue
        if not line.strip():
            continue
        try:
            if not session.handle(line):
                return
        except SlipstreamError as fault:
            render.error(fault)
        except KeyboardInterrupt:
            render.restore_terminal()
    if sys.stdin.isatty():
        print()


def read() -> str:
    """One line, or several between fences. Raises EOFError at the end of the input."""
    interactive = sys.stdin.isatty()
    line = input(PROMPT if interactive else "")
    if not line.startswith(FENCE):
        return line
    lines = [line[len(FENCE) :]]
    while not lines[-1].endswith(FENCE):
        lines.append(input("... " if interactive else ""))
    lines[-1] = lines[-1][: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def remember_history() -> None:
    """Enable line editing and a history file, if there is a terminal and readline."""
    if not sys.stdin.isatty():
        return
    try:
        import readline
    except ImportError:  # Windows: the console edits lines itself
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "slipstream"
    file = state / "chat_history"
    try:
        state.mkdir(parents=True, exist_ok=True)
        if file.exists():
            readline.read_history_file(file)
    except OSError:  # without a writable home there is no history
        return
    readline.set_history_length(1000)

    def save() -> None:
        with suppress(OSError):
            readline.write_history_file(file)

    atexit.register(save)
