"""Shows one prompt decoded plainly, by the drafter alone, and speculatively, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from slipstream.cli import render
from slipstream.core.params import SamplingParams
from slipstream.drafters.model import ModelDrafter
from slipstream.host.interrupt import Interrupt
from slipstream.llm import LLM, Prompt

NARROW = 100
"""Terminals narrower than this (in characters) show the three texts below each other."""


@dataclass
class Column:
    title: str
    engine: LLM | None
    pieces: list[Any] = field(default_factory=list)
    note: str = ""
    ids: list[int] | None = None


def side_by_side(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Decode one after the other, so that they do not compete for the CPU, and stream all three texts."""
    request = llm.sequence(prompt, params).asked  # checks the prompt before anything is drawn
    columns = [Column("plain", llm), Column("drafter alone", drafter_alone(llm)), Column("speculative", llm)]
    drafter = llm.drafter
    with Interrupt() as interrupt, canvas(columns) as draw:
        for column in columns:
            if column.engine is None:
                column.note = f"{llm.drafter.name!r} cannot generate text alone: it is not a model"
            else:
                if column.engine is llm:
                    llm.use(None if column.title == "plain" else drafter)
                try:
                    decode(column, request, params, draw, interrupt)
                finally:
                    llm.use(drafter)
            if column is columns[-1] and not interrupt.asked:
                column.note += f"; {against_plain(llm, params, columns[0].ids, column.ids)}"
            draw()
            if interrupt.asked:
                break


def against_plain(llm: LLM, params: SamplingParams, plain: list[int] | None, fast: list[int] | None) -> str:
    """Whether the speculative text is the plain one, or why it need not be."""
    if plain == fast:
        return "identical text"
    if not llm.rule.lossless:
        return f"differs from plain: the rule {llm.rule.name} is lossy"
    if not params.greedy and llm.rule.name != "coupled":
        return "another sample of the same distribution (rule coupled or temperature 0 would repeat the plain text)"
    if not params.greedy and params.seed is None:
        return "another sample: no seed is set"
    return "differs from plain: `slipstream verify` tells rounding from a bug"


def drafter_alone(llm: LLM) -> LLM | None:
    """The draft model as a target; None if the drafter is not a model."""
    drafter = llm.drafter
    return LLM(drafter.model, tokenizer=llm.tokenizer) if isinstance(drafter, ModelDrafter) else None


def decode(column: Column, prompt: list[int], params: SamplingParams, draw: Any, interrupt: Interrupt) -> None:
    assert column.engine is not None
    seq = column.engine.sequence(prompt, params)
    for chunk in column.engine.follow(seq):
        column.pieces += chunk.pieces
        draw()
        if interrupt.asked:
            break
    stats, column.ids = seq.stats, seq.output
    size, speed = render.counted(stats.tokens, "token"), stats.tokens_per_second or 0
    column.note = f"{size}, {stats.total_seconds:.2f} s, {speed:.0f} tokens/s"
    if stats.proposed:
        column.note += f", acceptance rate {render.percent(stats.acceptance_rate)}"


@contextmanager
def canvas(columns: list[Column]) -> Iterator[Any]:
    """Yields the function that redraws. Without a terminal the texts are printed once, at the end."""
    console = render.out()
    colours = render.coloured(console)
    if not console.is_terminal:
        yield lambda: None
        console.print(Group(*(plain_block(column) for column in columns)))
        return
    with Live(console=console, refresh_per_second=12) as live:

        def draw() -> None:
            live.update(layout(columns, console.width, colours))

        draw()
        yield draw


def layout(columns: list[Column], width: int, colours: bool) -> RenderableType:
    panels = [panel(column, colours) for column in columns]
    if width < NARROW:
        return Group(*panels)
    for each in panels:
        each.width = width // len(panels)
    return Columns(panels, padding=0)


def panel(column: Column, colours: bool) -> Panel:
    text = render.coloured_text(column.pieces, colours and column.title == "speculative")
    if column.note:
        text.append(f"\n\n{column.note}", "dim")
    return Panel(text, title=column.title, title_align="left")


def plain_block(column: Column) -> Text:
    text = "".join(piece.text for piece in column.pieces)
    return Text(f"--- {column.title}: {column.note}\n{text}\n")
