"""Options shared by all training commands, and the function that starts a run from them."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import render
from slipstream.cli.loading import quieten
from slipstream.errors import ParameterError
from slipstream.host.interrupt import Interrupt
from slipstream.training.methods import METHODS

if TYPE_CHECKING:
    from slipstream.training.training_settings import LoopConfig

_DATA, _LOOP, _TEXTS = "Data", "Training", "Held-out texts"


@dataclass(frozen=True)
class DataOptions:
    """Target, training data and output folder."""

    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder.", show_default="runs/METHOD", rich_help_panel=_DATA)
    ] = None
    target: Annotated[
        str, typer.Option("--target", "-m", help="Target model: folder, hub id, or 'embedded'.", rich_help_panel=_DATA)
    ] = "embedded"
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Data: text file, folder, .jsonl, .bin stream, or 'corpus' (Python source found here); repeatable.",
            rich_help_panel=_DATA,
        ),
    ] = None
    share: Annotated[
        list[float] | None,
        typer.Option(
            "--share",
            help="Sampling weight of a --data; repeatable, one per --data.",
            show_default="by size",
            rich_help_panel=_DATA,
        ),
    ] = None
    heldout_share: Annotated[
        float, typer.Option(help="Share of the documents held out for evaluation.", rich_help_panel=_DATA)
    ] = 0.03
    answers_only: Annotated[
        bool, typer.Option("--answers-only", help="Compute the loss on answers only.", rich_help_panel=_DATA)
    ] = False
    regenerate: Annotated[
        int,
        typer.Option(
            help="First let the target generate this many tokens after prefixes of the data, and train on them, too.",
            metavar="TOKENS",
            rich_help_panel=_DATA,
        ),
    ] = 0
    regenerate_share: Annotated[
        float, typer.Option(help="Share of the target's own text in a batch.", rich_help_panel=_DATA)
    ] = 0.5
    cache_hidden: Annotated[
        bool,
        typer.Option(
            "--cache-hidden", help="Compute the target's hidden states once and store them.", rich_help_panel=_DATA
        ),
    ] = False
    executor: Annotated[
        str, typer.Option(help="Executor of the target: auto, native or torch.", rich_help_panel=_DATA)
    ] = "auto"


@dataclass(frozen=True)
class LoopOptions:
    """Training loop settings."""

    budget_minutes: Annotated[
        float | None, typer.Option(help="Training time of the whole run, in minutes.", rich_help_panel=_LOOP)
    ] = None
    budget_tokens: Annotated[
        int | None,
        typer.Option(
            help="Training tokens, instead of minutes; the result is then reproducible by seed.", rich_help_panel=_LOOP
        ),
    ] = None
    length: Annotated[int, typer.Option(help="Tokens per window.", rich_help_panel=_LOOP)] = 512
    rows: Annotated[int, typer.Option(help="Windows per optimiser step.", rich_help_panel=_LOOP)] = 8
    micro_rows: Annotated[
        int | None, typer.Option(help="Windows per forward pass; fewer need less memory.", rich_help_panel=_LOOP)
    ] = None
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default="by method", rich_help_panel=_LOOP)
    ] = None
    optimiser: Annotated[
        str | None, typer.Option(help="Optimiser: adamw or muon.", show_default="by method", rich_help_panel=_LOOP)
    ] = None
    decay_share: Annotated[
        float,
        typer.Option(help="Share of the budget, at its end, in which the learning rate decays.", rich_help_panel=_LOOP),
    ] = 0.35
    warmup_steps: Annotated[int, typer.Option(help="Number of warm-up steps.", rich_help_panel=_LOOP)] = 50
    seed: Annotated[int, typer.Option(help="Seed for weights, data order and texts.", rich_help_panel=_LOOP)] = 0
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue exactly from the checkpoint in --out.", rich_help_panel=_LOOP)
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the estimated disk, memory and time, and exit.", rich_help_panel=_LOOP),
    ] = False
    device: Annotated[
        str,
        typer.Option(
            help="Device: cpu, cuda, cuda:1; for several GPUs use `accelerate launch`.", rich_help_panel=_LOOP
        ),
    ] = "cpu"
    threads: Annotated[int | None, typer.Option(help="Number of CPU threads.", rich_help_panel=_LOOP)] = None
    bf16: Annotated[
        bool | None,
        typer.Option(
            help="Matrix products in bfloat16, else in float32.",
            show_default="where the hardware has them",
            rich_help_panel=_LOOP,
        ),
    ] = None
    save_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints.", rich_help_panel=_LOOP)] = 4.0
    eval_steps: Annotated[int, typer.Option(help="Steps between evaluations.", rich_help_panel=_LOOP)] = 200
    max_steps: Annotated[
        int | None,
        typer.Option(help="Stop this call after this many steps; --resume continues.", rich_help_panel=_LOOP),
    ] = None


@dataclass(frozen=True)
class TextOptions:
    """Texts generated by the target, on which the acceptance length is simulated."""

    texts: Annotated[int, typer.Option(help="Number of texts.", rich_help_panel=_TEXTS)] = 32
    text_tokens: Annotated[int, typer.Option(help="New tokens per text.", rich_help_panel=_TEXTS)] = 96
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature",
            help="Temperature in addition to 0; repeatable.",
            show_default="0.8",
            rich_help_panel=_TEXTS,
        ),
    ] = None


def start(kind: str, data: DataOptions, loop: LoopOptions, texts: TextOptions, options: Callable[[], Any]) -> None:
    """Prepare, print the estimate, and train unless it is a dry run. options: creates the options of the objective."""
    if not data.data:
        raise ParameterError(
            "no training data was given",
            fix="give --data: a file, a folder, or 'corpus' for the Python source found here",
        )
    quieten()
    made = options()  # reports invalid options before the slow imports
    from slipstream.training.estimate import LIMIT
    from slipstream.training.run import RunConfig, prepare
    from slipstream.training.training_settings import LoopConfig

    method = METHODS[kind]
    wanted = LoopConfig(
        out=data.out or Path("runs") / kind, budget_tokens=loop.budget_tokens,
        budget_minutes=loop.budget_minutes, length=loop.length,
        rows=loop.rows, micro_rows=loop.micro_rows, lr=method.rate if loop.lr is None else loop.lr,
        optimiser=loop.optimiser or method.optimiser, decay_share=loop.decay_share, warmup_steps=loop.warmup_steps,
        shares=tuple(data.share) if data.share else None, answers_only=data.answers_only, seed=loop.seed,
        resume=loop.resume, device=loop.device, bf16=loop.bf16, threads=loop.threads, save_minutes=loop.save_minutes,
        eval_steps=loop.eval_steps, max_steps=loop.max_steps,
    )  # fmt: skip
    settings = RunConfig(
        kind=kind, target=data.target, data=tuple(data.data), options=made, loop=wanted,
        heldout_share=data.heldout_share, regenerate=data.regenerate, regenerate_share=data.regenerate_share,
        cache_hidden=data.cache_hidden, texts=texts.texts, text_tokens=texts.text_tokens,
        temperatures=tuple(dict.fromkeys((0.0, *(texts.temperature or (0.8,))))), executor=data.executor,
        command=shlex.join(["slipstream", *sys.argv[1:]]),
    )  # fmt: skip
    try:
        with Interrupt((signal.SIGINT, signal.SIGTERM), at_once=True):
            run = prepare(settings)
            if run.loop.devices.rank == 0:
                print(f"measuring one step, for at most {LIMIT:.0f} s", flush=True)
                print("\n".join(run.estimate().lines()), flush=True)
            if not loop.dry_run:
                run.train()
    except KeyboardInterrupt as stop:
        render.message("note", *_how_to_continue(wanted, settings.command))
        raise typer.Exit(128 + int(stop.args[0])) from None


def _how_to_continue(loop: LoopConfig, command: str) -> tuple[str, str]:
    """What is saved of a run that was stopped, and how to continue it."""
    if not loop.checkpoint.exists():
        return "stopped; no step was saved", f"The same command begins again, with the data prepared in {loop.out}."
    from slipstream.training.resume_state import read_state

    step = read_state(loop.checkpoint)["progress"]["step"]
    resume = "" if loop.resume else " --resume"
    return f"stopped; step {step:,} is saved", f"Continue with: {command}{resume}"
