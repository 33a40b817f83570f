"""Options of `slipstream simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

_WHAT, _COST, _HARDWARE = "Acceptance and drafts", "Costs", "Hardware"


@dataclass(frozen=True)
class DraftOptions:
    """What is drafted, and how often it is accepted."""

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
            help="Acceptance by position: share of the steps that accept the 1st, 2nd, ... draft token.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    tree_rates: Annotated[
        str | None,
        typer.Option(
            metavar="R1,R2,...",
            help="Also trees: probability that the drafter's 1st, 2nd, ... choice is the one accepted.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    nodes: Annotated[int, typer.Option(help="Most draft tokens of a tree.", rich_help_panel=_WHAT)] = 64
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--draft-tokens", "-k", help="Draft length (gamma).", show_default="the best", rich_help_panel=_WHAT
        ),
    ] = None
    longest: Annotated[int, typer.Option(help="Longest draft to consider.", rich_help_panel=_WHAT)] = 16


@dataclass(frozen=True)
class CostOptions:
    """What a speculative step costs, in plain steps or as measured."""

    c: Annotated[float, typer.Option("--c", help="Cost of a draft step in target steps.", rich_help_panel=_COST)] = 0.05
    row_cost: Annotated[
        float, typer.Option(help="What each further row costs the target, in one-row steps.", rich_help_panel=_COST)
    ] = 0.0
    host: Annotated[
        float, typer.Option(help="Further fixed cost of a speculative step, in target steps.", rich_help_panel=_COST)
    ] = 0.0
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure these on this machine, with -m and -md.", rich_help_panel=_COST),
    ] = False


@dataclass(frozen=True)
class HardwareOptions:
    """Where to plan for, by a roofline."""

    hardware: Annotated[
        str | None, typer.Option(help="a100, h100, h200, rtx3090 or rtx4090.", rich_help_panel=_HARDWARE)
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(help="Devices that share the model.", show_default="as memory needs", rich_help_panel=_HARDWARE),
    ] = None
    bandwidth: Annotated[float | None, typer.Option(help="GB/s of memory, peak.", rich_help_panel=_HARDWARE)] = None
    tflops: Annotated[float | None, typer.Option(help="16-bit TFLOP/s, peak.", rich_help_panel=_HARDWARE)] = None
    memory: Annotated[float | None, typer.Option(help="GB a device.", rich_help_panel=_HARDWARE)] = None
    link: Annotated[float | None, typer.Option(help="GB/s between devices, one way.", rich_help_panel=_HARDWARE)] = None
    bits: Annotated[float, typer.Option(help="Bits of a target's weight.", rich_help_panel=_HARDWARE)] = 16
    draft_bits: Annotated[
        float | None, typer.Option(help="Of a draft's.", show_default="as --bits", rich_help_panel=_HARDWARE)
    ] = None
    kv_bits: Annotated[float, typer.Option(help="Bits of a number in the cache.", rich_help_panel=_HARDWARE)] = 16
    kv_bytes: Annotated[
        float | None,
        typer.Option(
            help="Bytes of cache a token of the target.", show_default="by its shape", rich_help_panel=_HARDWARE
        ),
    ] = None
    context: Annotated[int, typer.Option(help="Tokens that a sequence holds.", rich_help_panel=_HARDWARE)] = 1024
    latency_ms: Annotated[
        float | None,
        typer.Option(help="Count the users whose tokens come at least this often.", rich_help_panel=_HARDWARE),
    ] = None
    users: Annotated[
        int | None, typer.Option(help="Count the devices for so many users at once.", rich_help_panel=_HARDWARE)
    ] = None
