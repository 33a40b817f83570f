"""`slipstream train`: commands that train draft heads and draft models."""

from __future__ import annotations

from typing import Any

import typer

from slipstream.cli.option_groups import grouped, option
from slipstream.cli.training import DataOptions, LoopOptions, TextOptions, start

app = typer.Typer(help="Train draft heads and draft models.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train draft heads and draft models."""


LOSS = option("kl", "Loss: kl, reverse-kl, tv or ce.")
DEPTH = option(4, "Draft length for which acceptance is simulated.")
COMPILE = option(False, "Compile the layers (needs a C++ compiler on a CPU).", "--compile/--no-compile")


@app.command()
@grouped
def medusa(
    data: DataOptions,
    loop: LoopOptions,
    texts: TextOptions,
    heads: int = option(4, "Number of heads; each predicts one position further."),
    layers: int = option(1, "Residual blocks per head."),
    own_head: bool = option(True, "Train a separate lm_head for each head."),
    loss: str = LOSS,
    decay: float = option(0.8, "Weight of head k in the loss is decay^k."),
) -> None:
    """Train Medusa heads (arXiv 2401.10774) for any target.

    Ctrl-C saves a checkpoint and stops; --resume continues. Create OUT/decay-now to start the final decay at once.
    """

    def options() -> Any:
        from slipstream.training.medusa_objective import MedusaOptions

        return MedusaOptions(heads, layers, own_head, loss, decay)

    start("medusa", data, loop, texts, options)


@app.command()
@grouped
def eagle3(
    data: DataOptions,
    loop: LoopOptions,
    texts: TextOptions,
    steps: int = option(4, "Number of training-time test steps."),
    draft_vocab: int | None = option(
        None, "Number of token ids that the head can draft.", shown="all up to 8192, else 32000"
    ),
    taps: list[int] | None = option(
        None, "Target layer that the head reads; repeatable.", "--tap", shown="low, middle, high"
    ),
    intermediate: int | None = option(None, "Width of the MLP of the head.", shown="the target's"),
    loss: str = LOSS,
    decay: float = option(0.8, "Weight of step j in the loss is decay^j."),
) -> None:
    """Train an EAGLE-3 head (arXiv 2503.01840) for any target, with training-time test."""

    def options() -> Any:
        from slipstream.training.eagle3_objective import EagleOptions

        return EagleOptions(steps, draft_vocab, tuple(taps) if taps else None, intermediate, loss, decay)

    start("eagle3", data, loop, texts, options)


@app.command()
@grouped
def draft(
    data: DataOptions,
    loop: LoopOptions,
    texts: TextOptions,
    begin: str | None = option(
        None, "Draft model to continue from: folder, hub id, 'embedded' or 'smollm2'.", "--start", shown="from scratch"
    ),
    hidden_size: int = option(256, "Hidden size, from scratch."),
    layers: int = option(2, "Number of layers, from scratch."),
    heads: int = option(4, "Number of query heads, from scratch."),
    kv_heads: int = option(1, "Number of KV heads, from scratch."),
    intermediate: int = option(640, "Width of the MLP, from scratch."),
    loss: str = LOSS,
    depth: int = DEPTH,
    compile: bool = COMPILE,
) -> None:
    """Distil a draft model from the target's distributions (arXiv 2310.08461), from scratch or from a checkpoint."""

    def options() -> Any:
        from slipstream.training.draft_objective import DraftOptions

        return DraftOptions(begin, hidden_size, layers, heads, kv_heads, intermediate, loss, depth, compile)

    start("draft", data, loop, texts, options)


@app.command()
@grouped
def layerskip(
    data: DataOptions,
    loop: LoopOptions,
    texts: TextOptions,
    exit: int | None = option(None, "Exit layer for which acceptance is simulated.", shown="half of the layers"),
    p_max: float = option(0.1, "Layer dropout rate of the last layer."),
    exit_scale: float = option(0.3, "Weight of the early exits in the loss."),
    rotation: int = option(7, "Each exit contributes to the loss once in this many steps."),
    loss: str = option("kl", "Loss: kl (stay near the original), reverse-kl, tv or ce."),
    depth: int = DEPTH,
    compile: bool = COMPILE,
) -> None:
    """Train a target further so that its early layers can draft (LayerSkip, arXiv 2404.16710). Makes a new target."""

    def options() -> Any:
        from slipstream.training.layerskip_objective import LayerSkipOptions

        return LayerSkipOptions(exit, p_max, exit_scale, rotation, loss, depth, compile)

    start("layerskip", data, loop, texts, options)


if __name__ == "__main__":
    app()
