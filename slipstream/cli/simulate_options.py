"""Options of `slipstream simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

_WHAT, _COST, _HARDWARE = "Acceptance and drafts", "Costs", "Hardware"


@dataclass(frozen=True)
class DraftOptions:
    """Draft length and acceptance rates."""

    alpha: Annotated[
        float | None,
        typer.Option(
            help="Acceptance rate of a draft token.",
            show_default="the published rate of the pair, else 0.7",
            rich_help_panel=_WHAT,
        ),
    ] = None
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="R1,R2,...",
            help="Acceptance by position: share of steps that accept the 1st, 2nd, ... draft token.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    tree_rates: Annotated[
        str | None,
        typer.Option(
            metavar="R1,R2,...",
            help="Evaluate draft trees, too: probability that the drafter's 1st, 2nd, ... choice is accepted.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    nodes: Annotated[int, typer.Option(help="Maximum number of nodes in a tree.", rich_help_panel=_WHAT)] = 64
    draft_tokens: Annotated[
        int | None,
        typer.Option("--draft-tokens", "-k", help="Draft length (K).", show_default="the best", rich_help_panel=_WHAT),
    ] = None
    longest: Annotated[int, typer.Option(help="Maximum draft length to consider.", rich_help_panel=_WHAT)] = 16


@dataclass(frozen=True)
class CostOptions:
    """Cost of a speculative step, in decode steps of the target or as measured."""

    c: Annotated[
        float, typer.Option("--c", help="Cost of a draft token, in decode steps of the target.", rich_help_panel=_COST)
    ] = 0.05
    row_cost: Annotated[
        float,
        typer.Option(help="Cost of verifying one more token, in decode steps of the target.", rich_help_panel=_COST),
    ] = 0.0
    host: Annotated[
        float,
        typer.Option(
            help="Fixed overhead of a speculative step, in decode steps of the target.", rich_help_panel=_COST
        ),
    ] = 0.0
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the costs of -m and -md on this machine.", rich_help_panel=_COST),
    ] = False


@dataclass(frozen=True)
class HardwareOptions:
    """Hardware to predict for, with a roofline model."""

    hardware: Annotated[
        str | None,
        typer.Option(help="Hardware preset: a100, h100, h200, rtx3090 or rtx4090.", rich_help_panel=_HARDWARE),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(help="Number of devices.", show_default="as many as memory requires", rich_help_panel=_HARDWARE),
    ] = None
    bandwidth: Annotated[float | None, typer.Option(help="Peak memory bandwidth, GB/s.", rich_help_panel=_HARDWARE)] = (
        None
    )
    tflops: Annotated[float | None, typer.Option(help="Peak 16-bit TFLOP/s.", rich_help_panel=_HARDWARE)] = None
    memory: Annotated[float | None, typer.Option(help="Memory per device, GB.", rich_help_panel=_HARDWARE)] = None
    link: Annotated[
        float | None, typer.Option(help="Bandwidth between devices, GB/s per direction.", rich_help_panel=_HARDWARE)
    ] = None
    bits: Annotated[float, typer.Option(help="Bits per weight of the target.", rich_help_panel=_HARDWARE)] = 16
    draft_bits: Annotated[
        float | None,
        typer.Option(help="Bits per weight of the draft model.", show_default="as --bits", rich_help_panel=_HARDWARE),
    ] = None
    kv_bits: Annotated[float, typer.Option(help="Bits per KV cache entry.", rich_help_panel=_HARDWARE)] = 16
    kv_bytes: Annotated[
        float | None,
        typer.Option(
            help="KV cache bytes per token of the target.", show_default="from its shape", rich_help_panel=_HARDWARE
        ),
    ] = None
    context: Annotated[int, typer.Option(help="Tokens of context per sequence.", rich_help_panel=_HARDWARE)] = 1024
    latency_ms: Annotated[
        float | None,
        typer.Option(
            help="Find the number of users served with at most this time per token.", rich_help_panel=_HARDWARE
        ),
    ] = None
    users: Annotated[
        int | None,
        typer.Option(help="Find the number of devices for this many concurrent users.", rich_help_panel=_HARDWARE),
    ] = None
