"""`slipstream train`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train the embedded models and draft heads.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train models."""


@app.command()
def base(
    out: Annotated[Path, typer.Option(help="Folder of the run: token cache, checkpoint, log.")],
    role: Annotated[str, typer.Option(help="'target' (LayerSkip) or 'draft' (distilled).")] = "target",
    budget_minutes: Annotated[float | None, typer.Option(help="Wall-clock budget of the whole run.")] = None,
    budget_tokens: Annotated[int | None, typer.Option(help="Token budget, instead of minutes.")] = None,
    decay_share: Annotated[float, typer.Option(help="Last share of the budget with a falling learning rate.")] = 0.3,
    teacher: Annotated[Path | None, typer.Option(help="Run folder of the target that a draft learns from.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the checkpoint in OUT, exactly.")] = False,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    edit_share: Annotated[float, typer.Option(help="Share of edit requests in a batch; they teach copying.")] = 0.25,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and layer dropout.")] = 0,
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    compile: Annotated[bool, typer.Option(help="Compile the layers (needs a C++ compiler on a CPU).")] = True,
    step_tokens: Annotated[int, typer.Option(help="Tokens of one optimiser step.")] = 8192,
) -> None:
    """Train an embedded model from scratch on the Python source that this environment contains.

    Touch OUT/decay-now to start the final decay at once; Ctrl-C saves and stops, --resume goes on.
    """
    from slipstream.training.base import DRAFT, TARGET, BaseConfig, train_base
    from slipstream.training.packing import Mix

    train_base(
        BaseConfig(
            out=out, role=role, shape=TARGET if role == "target" else DRAFT, budget_minutes=budget_minutes,
            budget_tokens=budget_tokens, decay_share=decay_share, teacher=teacher, resume=resume, lr=lr, seed=seed,
            mix=Mix(raw=0.92 - edit_share, write=0.08, edit=edit_share), device=device, threads=threads,
            compile=compile, step_tokens=step_tokens,
            micro_tokens=min(8192, step_tokens),
        )
    )  # fmt: skip


@app.command()
def export(
    run: Annotated[Path, typer.Option(help="Folder of a `train base` run, finished or not.")],
    to: Annotated[Path, typer.Option(help="Folder to write, in Hugging Face layout.")],
) -> None:
    """Export a run's latest checkpoint as float16 safetensors that transformers loads as they are."""
    from slipstream.training.export import export as export_run

    export_run(run, to)
    print(f"wrote {to}")


if __name__ == "__main__":
    app()
