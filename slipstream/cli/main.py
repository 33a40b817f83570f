"""The `slipstream` command: an error is one message and an exit code; tracebacks are only shown with --debug.

Exit codes: 0 success, 1 a check failed or an unexpected error, 2 bad input, 130 Ctrl-C, 143 SIGTERM (`train`).
"""

import functools
import io
import os
import sys
import traceback
from collections.abc import Sequence as Seq
from typing import Annotated

import typer

from slipstream import __version__
from slipstream.cli import render
from slipstream.cli.bench import bench
from slipstream.cli.chat import chat
from slipstream.cli.convert import convert
from slipstream.cli.demo import demo
from slipstream.cli.drafters import drafters
from slipstream.cli.generate import generate
from slipstream.cli.info import info
from slipstream.cli.option_groups import unwrap
from slipstream.cli.options import ALIASES
from slipstream.cli.report import report
from slipstream.cli.serve import serve
from slipstream.cli.simulate import simulate
from slipstream.cli.trace import trace
from slipstream.cli.train import app as train
from slipstream.cli.tune import tune
from slipstream.cli.verify import verify
from slipstream.errors import SlipstreamError

app = typer.Typer(
    name="slipstream",
    help="Speculative decoding of causal language models: faster, with provably unchanged output.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)
TRAINING = "Convert and train"
EXAMPLES = {
    "Use a model": {
        demo: "--prompts 1",
        generate: "-m smollm2 --chat 'Correct this: She go to school.'",
        chat: "-m Qwen/Qwen3-0.6B --temperature 0.6",
        serve: "-m Qwen/Qwen3-4B -md Qwen/Qwen3-0.6B --port 8000",
    },
    "Choose": {
        info: "Qwen/Qwen3-4B Qwen/Qwen3-0.6B",
        drafters: "suffix",
        tune: "my-prompts.jsonl -m Qwen/Qwen3-4B -md Qwen/Qwen3-0.6B --write choice.json",
        simulate: "--hardware h100 -m Llama-3.1-70B -md Llama-3.1-8B",
    },
    "Measure and verify": {
        bench: "edit,chat --drafter suffix --drafter model:draft_tokens=4 --out result.json",
        verify: "--drafter suffix -k 4",
        trace: "'def fibonacci(n):' --out trace.json",
        report: "trace.json --out page.html",
    },
    TRAINING: {convert: "my-head --to speculators --out converted"},
}
"""Panel of `--help` -> its commands, each with arguments for an example."""
for panel, commands in EXAMPLES.items():
    for command, words in commands.items():
        name = command.__name__
        epilog = f"Example: slipstream {name} {words}"
        app.command(name, help=unwrap(command.__doc__), epilog=epilog, rich_help_panel=panel)(command)
app.add_typer(train, name="train", rich_help_panel=TRAINING)

_UsageError = typer.BadParameter.__base__  # typer does not export it
_UNKNOWN_FAULT = "This is a bug in Slipstream. Run again with --debug for the traceback, then report it."


def _version(wanted: bool) -> None:
    if wanted:
        print(f"slipstream {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")] = False,
) -> None:
    pass


parser = functools.cache(lambda: typer.main.get_command(app))
"""All commands with their options; building them takes 30 ms."""


def main(arguments: Seq[str] | None = None) -> None:
    """Entry point of the console script; raises `SystemExit`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        check_streams()
        with render.show_log():
            code = parser()(args=canonical(arguments), prog_name="slipstream", standalone_mode=False)
    except SlipstreamError as error:
        code = _report_failure(error, debug, 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        misused = isinstance(error, _UsageError)  # type: ignore[arg-type]
        code = _report_misuse(error) if misused else _report_failure(error, debug, 1)
    if code == 130:
        render.restore_terminal()
    try:
        sys.stdout.flush()
    except OSError as fault:  # the rest of the output cannot be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or _report_failure(fault, debug, 1)
    raise SystemExit(code if isinstance(code, int) else 0)


def check_streams() -> None:
    """Make the standard streams usable: replace closed streams by empty ones, keep input bytes that are not UTF-8 for
    `check_text`, which refuses them, and replace characters that cannot be written."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape" if name == "stdin" else "backslashreplace")


def canonical(arguments: Seq[str]) -> list[str]:
    """Replace aliases of options by our names; arguments after `--` are unchanged."""
    out = list(arguments)
    for i, argument in enumerate(out):
        if argument == "--":
            break
        name, equals, value = argument.partition("=")
        out[i] = ALIASES.get(name, name) + equals + value
    return out


def _report_failure(error: Exception, debug: bool, code: int) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):  # the reader of the output has stopped reading, as `head` does
        return code
    if isinstance(error, SlipstreamError):
        render.error(error)
    elif isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f": {error.filename}"
        render.message("error", f"{error.strerror}{where}", "The operating system refused this.")
    else:
        render.message("error", f"{type(error).__name__}: {error}", _UNKNOWN_FAULT)
    return code


def _report_misuse(error: Exception) -> int:
    what = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    if what:  # empty if there were no arguments: typer has shown the help
        context = getattr(error, "ctx", None)
        render.message(
            "error", what, f"`{context.command_path if context else 'slipstream'} --help` lists the options."
        )
    return 2


if __name__ == "__main__":
    main()
