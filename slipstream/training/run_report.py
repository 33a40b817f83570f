"""Reports on a run: an estimate of time, memory and disk before it starts, and its model card at the end."""

import platform
import time

import torch

from slipstream.core.strict import JsonObject
from slipstream.templates import fill
from slipstream.templates.sizes import duration, size
from slipstream.training.features import Window
from slipstream.training.loop import Loop
from slipstream.training.methods import METHODS
from slipstream.training.objective import Figures

LIMIT = 20.0
"""Largest number of seconds that the measurements of an estimate may take."""
FIRST = 64
"""Tokens of the first measured pass, besides the extra tokens that the last draft tokens need."""


def estimate(loop: Loop) -> list[str]:
    """Return lines to print, after running a few windows through target and objective without an update. Sets
    `loop.rate`: tokens per second of an optimiser step."""
    config, objective, width = loop.config, loop.objective, loop.teacher.config.hidden_size
    count, reading, training = _measure(loop)
    reading_rate, rate = count / max(1e-9, reading), count / (training if loop.caches else reading + training)
    loop.rate = rate
    seconds = 60 * config.budget_minutes if config.budget_minutes else (config.budget_tokens or 0) / rate
    tokens, seen = sum(len(s.tokens) for s in loop.orders.streams.values()), int(seconds * rate)
    states = sum(3 * p.numel() * p.element_size() for p in loop.parameters)  # gradient and two moments
    stored = sum(p.numel() * p.element_size() for p in objective.module.state_dict().values())
    each = len(objective.taps) * width + 3 * loop.teacher.config.vocab_size * max(1, objective.depth)  # activations
    memory = states + stored + 4 * (config.micro_rows or config.rows) * config.length * each
    parameters = sum(p.numel() for p in loop.parameters)
    lines = [
        f"data       {tokens:,} training tokens; the budget sees {seen:,} ({seen / max(1, tokens):.2f} epochs)",
        f"training   {parameters:,} parameters, {size(memory)} of memory in addition to the target, "
        f"products in {'bfloat16' if loop.bf16 else 'float32'}",
        f"time       {duration(seconds)} at {rate:,.0f} tokens/s "
        f"({reading_rate:,.0f} tokens/s for the target's hidden states alone)",
        f"disk       {size(2 * (stored + 2 * states // 3))} for checkpoints (previous and new)",
    ]
    if loop.caches:
        stored = sum(c.nbytes for c in loop.caches.values())
        missing = sum(c.missing for c in loop.caches.values()) * config.length
        lines.append(f"states     {size(stored)} of disk, {duration(missing / reading_rate)} to compute them")
    return lines


def _measure(loop: Loop) -> tuple[int, float, float]:
    """Return the number of tokens of the largest measured pass, the seconds of the target's forward pass, and the
    seconds of the rest.

    Passes grow up to a micro-batch while the next pass is expected to take at most LIMIT seconds. The first pass of a
    size allocates memory, so the smallest and the largest size run twice."""
    config, objective = loop.config, loop.objective
    rows = config.micro_rows or config.rows
    stream = next(iter(loop.orders.streams.values()))
    tokens = stream.rows([i % len(stream.windows(config.length)) for i in range(rows)], config.length)[:, :-1]
    sizes = [tokens.numel()] * 2
    while sizes[0] > FIRST + objective.depth:
        sizes = [max(FIRST + objective.depth, sizes[0] // 4), *sizes]
    begun, count, reading, training = time.perf_counter(), 0, 0.0, 0.0
    for wanted in (sizes[0], *sizes):
        expected = (reading + training) * wanted / max(1, count)
        if time.perf_counter() - begun + expected > LIMIT:
            break
        part = tokens[: max(1, wanted // config.length), :wanted]
        count, start = part.numel(), time.perf_counter()
        taps = loop.teacher.read(part, objective.taps)
        read = time.perf_counter()
        part = part.to(loop.device)
        window = Window(part, torch.ones_like(part, dtype=torch.bool), taps)
        with loop.autocast():
            loss, _ = objective(window)
        loss.backward()
        objective.zero_grad(set_to_none=True)
        float(loss.detach())  # waits for a GPU
        reading, training = read - start, time.perf_counter() - read
    return count, reading, training


def run_card(loop: Loop, data: JsonObject, figures: Figures, commands: list[str]) -> str:
    """Return the model card, in Markdown with front matter. data: contents of data.json; figures: measurements;
    commands: command lines of the run's parts."""
    shown = []
    for name, value in figures.items():
        if name.startswith("tau@"):
            temperature = float(name[4:])
            at = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            shown.append((f"simulated acceptance length, {at}, chain of {loop.objective.depth}", f"{value:.2f}"))
        elif isinstance(value, float):
            shown.append((f"held-out {name}", f"{value:.3f}"))
    return fill(
        "model_card.md",
        config=loop.config,
        progress=loop.progress,
        makes=METHODS[loop.config.kind].makes,
        parameters=sum(p.numel() for p in loop.parameters),
        machine=f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        options=vars(loop.config.options),
        figures=shown,
        commands=commands,
        sources=data["sources"],
    )
