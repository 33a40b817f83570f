"""Measures latencies that a load test does not show: the time to the first text after a known prefix, and the gaps in a
running stream while a prompt arrives.

Prompts are token ids, so that their lengths are exact. Functions return plain lists of numbers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence as Seq
from itertools import pairwise

import numpy as np

from slipstream.measure.endpoint import Endpoint
from slipstream.measure.traffic_client import COMPLETIONS, TrafficClient, TrafficRequest, read_stream

TIMEOUT = 120.0
PREFIX, TAIL = 768, 16
"""Tokens of the prefix that two requests share, and of the rest of each prompt."""
RUNNING = 700
"""Tokens of a stream during which prompts arrive."""
ARRIVALS = 3
"""Prompts that arrive during one stream, one after another."""


def ids(rng: random.Random, texts: Seq[Seq[int]], count: int) -> list[int]:
    """Return `count` token ids: a few random ids, so that no prefix cache has the prompt, and then real texts in random
    order."""
    ids = [rng.randrange(1, 4000) for _ in range(8)]
    while len(ids) < count:
        ids += rng.choice(texts)
    return ids[:count]


def asking(prompt: list[int], tokens: int) -> TrafficRequest:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return TrafficRequest(COMPLETIONS, body)


async def first_texts(place: Endpoint, texts: Seq[Seq[int]], count: int, seed: int) -> dict[str, list[float]]:
    """Measure the seconds to the first text of `count` prompts: "cold", and "warm" for a second prompt with the same
    prefix and another tail."""
    rng, seconds = random.Random(seed), dict[str, list[float]](cold=[], warm=[])
    clock = asyncio.get_running_loop().time
    async with TrafficClient(place, TIMEOUT) as client:
        await client.ask(asking(ids(rng, texts, PREFIX), 2), clock())  # opens the connection
        for _ in range(count):
            prefix = ids(rng, texts, PREFIX)
            for name in ("cold", "warm"):
                answered = read_stream(await client.ask(asking(prefix + ids(rng, texts, TAIL), 2), clock()))
                if answered.fault or answered.first is None:
                    raise RuntimeError(f"a request failed: {answered.fault}")
                seconds[name].append(answered.first)
    return seconds


async def gaps(place: Endpoint, texts: Seq[Seq[int]], count: int, seed: int) -> dict[str, list[float]]:
    """Measure gaps in `count` streams while prompts arrive. Returns for each prompt, in seconds: "longest", the longest
    gap while the prompt was read, and "median", the median gap of the stream while nothing else ran."""
    rng, seconds = random.Random(seed), dict[str, list[float]](longest=[], median=[])
    async with TrafficClient(place, TIMEOUT) as client:
        for _ in range(count):
            windows, times = await _disturbed(client, rng, texts)
            quiet = [b - a for a, b in pairwise(times) if not any(a < end and b > begin for begin, end in windows)]
            for begin, end in windows:
                within = [b - a for a, b in pairwise(times) if a < end and b > begin]
                if within and quiet:
                    seconds["longest"].append(max(within))
                    seconds["median"].append(float(np.median(quiet)))
    if not seconds["longest"]:
        raise RuntimeError("no prompt arrived while a stream ran")
    return seconds


async def _disturbed(
    client: TrafficClient, rng: random.Random, texts: Seq[Seq[int]]
) -> tuple[list[tuple[float, float]], list[float]]:
    """Run one stream while prompts arrive. Returns (begin and end of the time in which each prompt was read, times at
    which pieces of the stream arrived)."""
    clock, pace = asyncio.get_running_loop().time, 0.15
    stream = asyncio.create_task(client.ask(asking(ids(rng, texts, 64), RUNNING), clock()))
    windows = []
    for _ in range(ARRIVALS):
        await asyncio.sleep(pace)
        if stream.done():
            break
        began = clock()
        answered = read_stream(await client.ask(asking(ids(rng, texts, PREFIX), 1), began))
        if answered.first is not None:
            windows.append((began, began + answered.first))
    timed = await stream
    answered = read_stream(timed)
    if answered.fault or answered.first is None:
        raise RuntimeError(f"the stream failed: {answered.fault}")
    times = np.cumsum([timed.scheduled + answered.first, *answered.gaps]).tolist()
    return windows, times
