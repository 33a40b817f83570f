"""Options that every kind of head and draft training shares, and how they become a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.errors import ParameterError
from slipstream.training.methods import METHODS

_DATA, _LOOP, _TEXTS = "Data", "Training", "Held-out texts"


@dataclass(frozen=True)
class DataOptions:
    """What is trained for, from what, into which folder."""

    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the run.", show_default="runs/METHOD", rich_help_panel=_DATA)
    ] = None
    target: Annotated[
        str, typer.Option("--target", "-m", help="Folder, hub id, or 'embedded'.", rich_help_panel=_DATA)
    ] = "embedded"
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Text file, folder, .jsonl, .bin stream, or 'corpus' (Python source of this environment); repeatable.",
            rich_help_panel=_DATA,
        ),
    ] = None
    share: Annotated[
        list[float] | None,
        typer.Option(
            "--share", help="Weight of each --data in a batch.", show_default="by size", rich_help_panel=_DATA
        ),
    ] = None
    heldout_share: Annotated[
        float, typer.Option(help="Share of the documents that is held out.", rich_help_panel=_DATA)
    ] = 0.03
    answers_only: Annotated[
        bool, typer.Option("--answers-only", help="Only answers count in the loss.", rich_help_panel=_DATA)
    ] = False
    regenerate: Annotated[
        int,
        typer.Option(
            help="First let the target write so many tokens behind prefixes of the data, and train on them too.",
            metavar="TOKENS",
            rich_help_panel=_DATA,
        ),
    ] = 0
    regenerate_share: Annotated[
        float, typer.Option(help="Weight of the target's own text in a batch.", rich_help_panel=_DATA)
    ] = 0.5
    cache_hidden: Annotated[
        bool,
        typer.Option(
            "--cache-hidden", help="Make the target's hidden states once and keep them.", rich_help_panel=_DATA
        ),
    ] = False
    executor: Annotated[
        str, typer.Option(help="What runs the target: auto, native or torch.", rich_help_panel=_DATA)
    ] = "auto"


@dataclass(frozen=True)
class LoopOptions:
    """How it is trained."""

    budget_minutes: Annotated[
        float | None, typer.Option(help="Time at work of the whole run.", rich_help_panel=_LOOP)
    ] = None
    budget_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens, instead: the same seed then gives the same weights.", rich_help_panel=_LOOP),
    ] = None
    length: Annotated[int, typer.Option(help="Tokens of a window.", rich_help_panel=_LOOP)] = 512
    rows: Annotated[int, typer.Option(help="Windows of a step.", rich_help_panel=_LOOP)] = 8
    micro_rows: Annotated[
        int | None, typer.Option(help="Windows of one forward; less takes less memory.", rich_help_panel=_LOOP)
    ] = None
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default="by method", rich_help_panel=_LOOP)
    ] = None
    optimiser: Annotated[
        str | None, typer.Option(help="adamw or muon.", show_default="by method", rich_help_panel=_LOOP)
    ] = None
    decay_share: Annotated[
        float, typer.Option(help="Last share of the budget with a falling learning rate.", rich_help_panel=_LOOP)
    ] = 0.35
    warmup_steps: Annotated[int, typer.Option(help="Steps of warm-up.", rich_help_panel=_LOOP)] = 50
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and texts.", rich_help_panel=_LOOP)] = 0
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in --out, exactly.", rich_help_panel=_LOOP)
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the estimate of disk, memory and time, and stop.", rich_help_panel=_LOOP),
    ] = False
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1; several GPUs through `accelerate launch`.", rich_help_panel=_LOOP)
    ] = "cpu"
    threads: Annotated[int | None, typer.Option(help="CPU threads.", rich_help_panel=_LOOP)] = None
    bf16: Annotated[bool, typer.Option(help="Products in bfloat16.", rich_help_panel=_LOOP)] = True
    save_minutes: Annotated[float, typer.Option(help="Time between checkpoints.", rich_help_panel=_LOOP)] = 4.0
    eval_steps: Annotated[int, typer.Option(help="Steps between evaluations.", rich_help_panel=_LOOP)] = 200
    max_steps: Annotated[
        int | None, typer.Option(help="Most steps of this call; --resume goes on.", rich_help_panel=_LOOP)
    ] = None


@dataclass(frozen=True)
class TextOptions:
    """Texts that the target writes, on which the acceptance length is simulated."""

    texts: Annotated[int, typer.Option(help="How many.", rich_help_panel=_TEXTS)] = 32
    text_tokens: Annotated[int, typer.Option(help="New tokens of each.", rich_help_panel=_TEXTS)] = 96
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature", help="Temperatures beside 0; repeatable.", show_default="0.8", rich_help_panel=_TEXTS
        ),
    ] = None


def start(kind: str, data: DataOptions, loop: LoopOptions, texts: TextOptions, options: Callable[[], Any]) -> None:
    """Prepare, show the estimate, and train unless it is a dry run. options: makes those of the objective."""
    if not data.data:
        raise ParameterError(
            "no training data was named", fix="give --data: a file, a folder, or 'corpus' for the Python source here"
        )
    made = options()  # a mistake there is answered before anything is imported that takes long
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
    run = prepare(
        RunConfig(
            kind=kind, target=data.target, data=tuple(data.data), options=made, loop=wanted,
            heldout_share=data.heldout_share, regenerate=data.regenerate, regenerate_share=data.regenerate_share,
            cache_hidden=data.cache_hidden, texts=texts.texts, text_tokens=texts.text_tokens,
            temperatures=tuple(dict.fromkeys((0.0, *(texts.temperature or (0.8,))))), executor=data.executor,
            command=shlex.join(["slipstream", *sys.argv[1:]]),
        )
    )  # fmt: skip
    if run.loop.devices.rank == 0:
        print("\n".join(run.estimate().lines()), flush=True)
    if not loop.dry_run:
        run.train()
