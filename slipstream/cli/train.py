"""`slipstream train`: a command for each method of training, and their common options."""

import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import typer

from slipstream.cli import render
from slipstream.cli.loading import quieten
from slipstream.cli.option_groups import expand_groups, option
from slipstream.errors import ParameterError
from slipstream.host.interrupt import Interrupt
from slipstream.training.methods import METHODS, LoopConfig, RunConfig, TrainingMethod


@dataclass(frozen=True)
class RunOptions(RunConfig):
    """Options that all methods share: the configuration of a run whose method is not known yet."""

    kind: str = field(default="", init=False)
    options: Any = field(default=None, init=False)
    dry_run: bool = option(False, "Print the estimated disk space, memory and time, and exit.", panel=LoopConfig.PANEL)

    def __post_init__(self) -> None:
        """Skip the checks of `RunConfig` here: they run in `of`, once the method is known."""

    def of(self, method: TrainingMethod, options: object) -> RunConfig:
        """Make the run's configuration. options: options of the method. Raises ParameterError."""
        if not self.data and not self.self_tokens:
            fix = "give --data FILE or --data FOLDER; or, for a chat model, --self TOKENS"
            raise ParameterError("no training data was given", fix=fix)
        given = {f.name: getattr(self, f.name) for f in fields(RunConfig)}
        command = shlex.join(["slipstream", *sys.argv[1:]])
        return RunConfig(**given | {"kind": method.name, "options": options, "command": command})


def start(config: RunConfig, dry_run: bool) -> None:
    """Prepare, print the estimate, and train unless it is a dry run."""
    quieten()
    from slipstream.training.run import prepare
    from slipstream.training.run_report import LIMIT, estimate

    try:
        with Interrupt((signal.SIGINT, signal.SIGTERM), at_once=True):
            run = prepare(config)
            print(f"measuring one step, for at most {LIMIT:.0f} s", flush=True)
            print("\n".join(estimate(run.loop)), flush=True)
            if not dry_run:
                run.train()
    except KeyboardInterrupt as stop:
        render.message("note", *_how_to_continue(config))
        raise typer.Exit(128 + int(stop.args[0])) from None


def _how_to_continue(config: RunConfig) -> tuple[str, str]:
    """Return two texts: what a stopped run has saved, and how to continue it."""
    if not config.checkpoint.exists():
        return ("stopped; no step was saved", f"Begin again by the same command; the data in {config.out} is reused.")
    from slipstream.training.resume_state import read_state

    step = read_state(config.checkpoint)["progress"]["step"]
    resume = "" if config.resume else " --resume"
    return f"stopped; step {step:,} is saved", f"Continue with: {config.command}{resume}"


app = typer.Typer(help="Train draft heads and draft models.", no_args_is_help=True)


def _command(method: TrainingMethod) -> Callable[..., None]:
    def command(run: RunOptions, options: object) -> None:
        start(run.of(method, options), run.dry_run)

    command.__annotations__["options"] = method.options
    command.__doc__ = f"{method.help}\n\nCtrl-C saves a checkpoint and stops; --resume continues."
    return expand_groups(command)


for each in METHODS.values():
    example = f"Example: slipstream train {each.name} --target Qwen/Qwen3-0.6B --data my-texts --out runs/{each.name}"
    app.command(each.name, epilog=example)(_command(each))
