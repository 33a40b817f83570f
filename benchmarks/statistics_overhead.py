"""What the statistics of normal decoding cost: `python -m benchmarks.statistics_overhead`.

Two processor times, so that a busy machine does not matter: that of a whole step of the embedded target, and that of
the counting in it (`SpecStats.count`, the clock readings and their accounting), replayed with the arguments of those
very steps. Printed is the share, for plain decoding and for the draft model; above 1 % the exit code is 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.bench.prompts import built_in
from slipstream.bench.provenance import commit, machine, now, versions
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats

TOKENS, PROMPTS, REPLAYS = 96, 4, 200
LIMIT = 0.01
CLOCKS = 7
"""Readings of the clock in a step."""


class Noted(SpecStats):
    """Keeps the arguments of every count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def count(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        super().count(*arguments)


def step_seconds(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[tuple[Any, ...]]]:
    """Processor seconds of a step after the prompt, and the arguments of each count."""
    spent, calls = 0.0, []
    for prompt in prompts:
        seq = llm.sequence(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        seq.stats = noted = Noted()
        steps = llm.decode([seq])
        next(steps)  # the prompt
        began = process_time()
        for _ in steps:
            pass
        spent += process_time() - began
        calls += noted.calls[1:]
    return spent / len(calls), calls


def seconds_of(work: Callable[[], None]) -> float:
    began = process_time()
    for _ in range(REPLAYS):
        work()
    return (process_time() - began) / REPLAYS


def counting_seconds(calls: list[tuple[Any, ...]]) -> float:
    """Processor seconds of what a step counts."""
    seq, spent = Sequence([0]), {"draft": 0.1, "target": 0.2, "verify": 0.3, "host": 0.4}

    def work() -> None:
        for arguments in calls:
            for _ in range(CLOCKS):
                perf_counter()
            seq.stats.count(*arguments)
            seq.stats.add_seconds(spent, 1)

    return seconds_of(work) / len(calls)


def main() -> int:
    llm, rows = LLM("embedded", threads=1), {}
    prompts = built_in(llm, "code", PROMPTS)
    for name, draft in (("plain", None), ("draft model", "embedded")):
        llm.use(draft)
        step_seconds(llm, prompts)  # warm-up
        step, calls = step_seconds(llm, prompts)
        counting = counting_seconds(calls)
        rows[name] = {"step_us": 1e6 * step, "counting_us": 1e6 * counting, "share": counting / step}
        print(f"{name}: a step takes {1e6 * step:.0f} us, counting {1e6 * counting:.1f} us, {counting / step:.2%}")
    source = {"date": now(), "commit": commit(), "machine": machine(), "versions": versions()}
    print(json.dumps({"rows": rows, **source}))
    return int(any(row["share"] > LIMIT for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
