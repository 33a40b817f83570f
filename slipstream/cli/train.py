"""`slipstream train`: a command for each method of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from slipstream.cli.option_groups import grouped
from slipstream.cli.training import DataOptions, LoopOptions, TextOptions, start
from slipstream.training.methods import METHODS, TrainingMethod

app = typer.Typer(help="Train draft heads and draft models.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train draft heads and draft models."""


def _command(method: TrainingMethod) -> Callable[..., None]:
    """The command of a method: its own options after those that all methods have."""

    def command(data: DataOptions, loop: LoopOptions, texts: TextOptions, options: Any) -> None:
        start(method.name, data, loop, texts, options)

    command.__annotations__["options"] = method.options
    command.__doc__ = (
        f"{method.help}\n\nCtrl-C saves a checkpoint and stops; --resume continues. Create OUT/decay-now to start the "
        "final decay at once."
    )
    return grouped(command)


for each in METHODS.values():
    app.command(each.name)(_command(each))

if __name__ == "__main__":
    app()
