"""Estimates time, memory and disk of a run before it starts, from measurements on a few windows."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from slipstream.core.sizes import duration, size
from slipstream.training.features import Window
from slipstream.training.loop import Loop

LIMIT = 20.0
"""Seconds that the measurement may take."""
FIRST = 64
"""Tokens of the first pass, without those that the last draft tokens need."""


@dataclass(frozen=True)
class Estimate:
    """Seconds, bytes and counts of a run.

    feature_rate, step_rate  tokens per second of the target's forward pass, and of a whole optimiser step.
    seconds                  training time, without evaluations.
    """

    tokens: int
    parameters: int
    bf16: bool
    feature_rate: float
    step_rate: float
    seconds: float
    memory: int
    checkpoint: int
    cache: int
    cache_seconds: float

    def lines(self) -> list[str]:
        seen = int(self.seconds * self.step_rate)
        lines = [
            f"data       {self.tokens:,} training tokens; the budget sees {seen:,} "
            f"({seen / max(1, self.tokens):.2f} epochs)",
            f"training   {self.parameters:,} parameters, {size(self.memory)} of memory in addition to the target, "
            f"products in {'bfloat16' if self.bf16 else 'float32'}",
            f"time       {duration(self.seconds)} at {self.step_rate:,.0f} tokens/s "
            f"({self.feature_rate:,.0f} tokens/s for the target's hidden states alone)",
            f"disk       {size(2 * self.checkpoint)} for checkpoints (previous and new)",
        ]
        if self.cache:
            lines.append(f"states     {size(self.cache)} of disk, {duration(self.cache_seconds)} to compute them")
        return lines


def estimate(loop: Loop) -> Estimate:
    """Run a few windows through target and objective, without an update; see `_measured`."""
    config, objective, width = loop.config, loop.objective, loop.teacher.config.hidden_size
    count, reading, training = _measured(loop)
    states = sum(3 * p.numel() * p.element_size() for p in loop.parameters)  # gradient and two moments
    stored = sum(p.numel() * p.element_size() for p in objective.module.state_dict().values())
    each = len(objective.taps) * width + 3 * loop.teacher.config.vocab_size * max(1, objective.depth)  # activations
    feature_rate, step_rate = count / max(1e-9, reading), count / (training if loop.caches else reading + training)
    missing = sum(len(c.missing()) * c.SHARD for c in loop.caches.values()) * config.length
    return Estimate(
        tokens=sum(len(s.tokens) for s in loop.orders.streams.values()),
        parameters=sum(p.numel() for p in loop.parameters),
        bf16=loop.devices.bf16,
        feature_rate=feature_rate,
        step_rate=step_rate,
        seconds=60 * config.budget_minutes if config.budget_minutes else (config.budget_tokens or 0) / step_rate,
        memory=states + stored + 4 * (config.micro_rows or config.rows) * config.length * each,
        checkpoint=stored + 2 * states // 3,
        cache=sum(c.nbytes(width) for c in loop.caches.values()),
        cache_seconds=missing / feature_rate,
    )


def _measured(loop: Loop) -> tuple[int, float, float]:
    """Tokens of the largest pass that was measured, and seconds: of the target's forward, and of the rest.

    Passes grow to a micro-batch while the next is expected to end within LIMIT seconds. The first pass of a size
    allocates memory, so the smallest and the largest are run twice. Compiled layers are compiled for each size, so they
    are measured at the largest only, however long that takes.
    """
    config, objective = loop.config, loop.objective
    rows = config.micro_rows or config.rows
    stream = next(iter(loop.orders.streams.values()))
    tokens = stream.rows([i % len(stream.windows(config.length)) for i in range(rows)], config.length)[:, :-1]
    sizes = [tokens.numel()] * 2
    if not objective.compiled:
        while sizes[0] > FIRST + objective.depth:
            sizes = [max(FIRST + objective.depth, sizes[0] // 4), *sizes]
        sizes = [sizes[0], *sizes]
    begun, count, reading, training = time.perf_counter(), 0, 0.0, 0.0
    for wanted in sizes:
        expected = (reading + training) * wanted / max(1, count)
        if not objective.compiled and time.perf_counter() - begun + expected > LIMIT:
            break
        part = tokens[: max(1, wanted // config.length), :wanted]
        count, start = part.numel(), time.perf_counter()
        taps = loop.teacher.read(part, objective.taps)
        read = time.perf_counter()
        window = Window(part.to(loop.devices.device), torch.ones_like(part, dtype=torch.bool), taps)
        with loop.devices.autocast():
            loss, _ = objective(window)
        loss.backward()
        objective.zero_grad(set_to_none=True)
        reading, training = read - start, time.perf_counter() - read
    return count, reading, training
