"""`slipstream train`: commands that train draft heads and draft models."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from slipstream.cli.options import grouped
from slipstream.cli.training import DataOptions, LoopOptions, TextOptions, start

app = typer.Typer(help="Train draft heads and draft models.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train draft heads and draft models."""


@app.command()
@grouped
def medusa(
    data: DataOptions,
    loop: LoopOptions,
    texts: TextOptions,
    heads: Annotated[int, typer.Option(help="Number of heads; each predicts one position further.")] = 4,
    layers: Annotated[int, typer.Option(help="Residual blocks per head.")] = 1,
    own_head: Annotated[bool, typer.Option(help="Train a separate lm_head for each head.")] = True,
    loss: Annotated[str, typer.Option(help="Loss: kl, reverse-kl, tv or ce.")] = "kl",
    decay: Annotated[float, typer.Option(help="Weight of head k in the loss is decay^k.")] = 0.8,
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
    steps: Annotated[int, typer.Option(help="Number of training-time test steps.")] = 4,
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Number of token ids that the head can draft.", show_default="all up to 8192, else 32000"),
    ] = None,
    taps: Annotated[
        list[int] | None,
        typer.Option("--tap", help="Target layer that the head reads; repeatable.", show_default="low, middle, high"),
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(help="Width of the MLP of the head.", show_default="the target's")
    ] = None,
    loss: Annotated[str, typer.Option(help="Loss: kl, reverse-kl, tv or ce.")] = "kl",
    decay: Annotated[float, typer.Option(help="Weight of step j in the loss is decay^j.")] = 0.8,
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
    begin: Annotated[
        str | None,
        typer.Option(
            "--start", help="Draft model to continue from: folder, hub id or 'embedded'.", show_default="from scratch"
        ),
    ] = None,
    hidden_size: Annotated[int, typer.Option(help="Hidden size, from scratch.")] = 256,
    layers: Annotated[int, typer.Option(help="Number of layers, from scratch.")] = 2,
    heads: Annotated[int, typer.Option(help="Number of query heads, from scratch.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Number of KV heads, from scratch.")] = 1,
    intermediate: Annotated[int, typer.Option(help="Width of the MLP, from scratch.")] = 640,
    loss: Annotated[str, typer.Option(help="Loss: kl, reverse-kl, tv or ce.")] = "kl",
    depth: Annotated[int, typer.Option(help="Draft length for which acceptance is simulated.")] = 4,
    compile: Annotated[bool, typer.Option(help="Compile the layers (needs a C++ compiler on a CPU).")] = False,
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
    exit: Annotated[
        int | None,
        typer.Option(help="Exit layer for which acceptance is simulated.", show_default="half of the layers"),
    ] = None,
    p_max: Annotated[float, typer.Option(help="Layer dropout rate of the last layer.")] = 0.1,
    exit_scale: Annotated[float, typer.Option(help="Weight of the early exits in the loss.")] = 0.3,
    rotation: Annotated[int, typer.Option(help="Each exit contributes to the loss once in this many steps.")] = 7,
    loss: Annotated[str, typer.Option(help="Loss: kl (stay near the original), reverse-kl, tv or ce.")] = "kl",
    depth: Annotated[int, typer.Option(help="Draft length for which acceptance is simulated.")] = 4,
    compile: Annotated[bool, typer.Option(help="Compile the layers (needs a C++ compiler on a CPU).")] = False,
) -> None:
    """Train a target further so that its early layers can draft (LayerSkip, arXiv 2404.16710). Makes a new target."""

    def options() -> Any:
        from slipstream.training.layerskip_objective import LayerSkipOptions

        return LayerSkipOptions(exit, p_max, exit_scale, rotation, loss, depth, compile)

    start("layerskip", data, loop, texts, options)


if __name__ == "__main__":
    app()
