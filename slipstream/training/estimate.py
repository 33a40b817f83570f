"""Estimates time, memory and disk of a run before it starts, from measurements on a few windows."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from slipstream.core.sizes import size
from slipstream.training.loop import Loop


@dataclass(frozen=True)
class Estimate:
    """Seconds, bytes and counts of a run; see `lines`.

    feature_rate, step_rate  tokens per second of the target's forward pass, and of a whole optimiser step.
    """

    tokens: int
    parameters: int
    feature_rate: float
    step_rate: float
    memory: int
    checkpoint: int
    cache: int
    cache_seconds: float
    budget_tokens: int | None
    budget_minutes: float | None

    @property
    def seconds(self) -> float:
        """Training time in seconds, without evaluations."""
        if self.budget_minutes is not None:
            return 60 * self.budget_minutes
        return (self.budget_tokens or 0) / self.step_rate

    def lines(self) -> list[str]:
        seen = self.budget_tokens or int(self.seconds * self.step_rate)
        lines = [
            f"data       {self.tokens:,} training tokens; the budget sees {seen:,} "
            f"({seen / max(1, self.tokens):.2f} epochs)",
            f"training   {self.parameters:,} parameters, {size(self.memory)} of memory in addition to the target",
            f"time       {duration(self.seconds)} at {self.step_rate:,.0f} tokens/s "
            f"({self.feature_rate:,.0f} tokens/s for the target's hidden states alone)",
            f"disk       {size(2 * self.checkpoint)} for checkpoints (previous and new)",
        ]
        if self.cache:
            lines.append(f"states     {size(self.cache)} of disk, {duration(self.cache_seconds)} to compute them")
        return lines


def estimate(loop: Loop) -> Estimate:
    """Run two steps through target and head, without an update, and use the timing of the second."""
    config, objective = loop.config, loop.objective
    size_of = config.micro_rows or config.rows
    counters = dict(loop.orders.counters)
    chosen = loop.orders.choose(0, size_of, config.length)
    loop.orders.counters.clear()
    loop.orders.counters.update(counters)
    tokens = torch.cat([loop.orders.streams[n].rows([i], config.length) for n, i in chosen])[:, :-1]
    rates = []
    caches, loop.caches = loop.caches, {}
    for _ in range(2):  # the first compiles and allocates
        begun = time.perf_counter()
        loop.teacher.read(tokens, objective.taps)
        read = time.perf_counter()
        window = loop.window(chosen)
        made = time.perf_counter()
        with loop.devices.autocast():
            loss, _ = objective(window)
        loss.backward()
        objective.zero_grad(set_to_none=True)
        rates.append((read - begun, time.perf_counter() - (read if not caches else made)))
    loop.caches = caches
    count = size_of * config.length
    parameters = sum(p.numel() for p in loop.parameters)
    states = sum(3 * p.numel() * p.element_size() for p in loop.parameters)  # gradient and two moments
    stored = sum(p.numel() * p.element_size() for p in objective.module.state_dict().values())
    width = loop.teacher.config.hidden_size
    activations = (
        4 * count * (len(objective.taps) * width + 3 * loop.teacher.config.vocab_size * max(1, objective.depth))
    )
    cache = sum(c.nbytes(width) for c in loop.caches.values())
    feature_rate = count / max(1e-9, rates[1][0]) if objective.taps else float("inf")
    missing = sum(len(c.missing()) * c.SHARD for c in loop.caches.values()) * config.length
    return Estimate(
        tokens=sum(len(s.tokens) for s in loop.orders.streams.values()),
        parameters=parameters,
        feature_rate=feature_rate,
        step_rate=count / rates[1][1],
        memory=states + stored + activations,
        checkpoint=stored + 2 * states // 3,
        cache=cache,
        cache_seconds=missing / feature_rate,
        budget_tokens=config.budget_tokens,
        budget_minutes=config.budget_minutes,
    )


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
