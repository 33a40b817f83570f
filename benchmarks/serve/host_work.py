"""Worker that measures the time of an engine's steps outside forward passes, with several requests in each step."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.slipstream_peer import clock_executors, forwards
from benchmarks.protocol import THREADS, serve, versions
from slipstream import LLM, SamplingParams
from slipstream.core.sequence import Sequence

models: dict[str, LLM] = {}
STREAMS = 16


def load(name: str, target: str, draft: str | None, draft_tokens: int) -> dict[str, Any]:
    """Load a target with a drafter. draft: name of a drafter, or folder of a draft model."""
    llm = LLM(target, draft, draft_tokens=draft_tokens, dtype="float32", threads=THREADS, max_batch=STREAMS)
    clock_executors(llm)
    models[name] = llm
    return {}


def measure(name: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Decode these prompts together, greedily. Returns the seconds of all steps after the prompts were read, the
    seconds of the forward passes of target and draft model in these steps, and the numbers of steps and tokens."""
    llm = models[name]
    engine = llm.engine()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    seqs: list[Sequence] = [llm.sequence(ids, params) for ids in prompts]
    for seq in seqs:
        engine.add(seq)
    while any(seq.unread > 1 for seq in seqs):
        engine.step()
    before, steps = sum(len(seq.output) for seq in seqs), engine.stats.steps
    forwards[0] = 0.0
    start = time.perf_counter()
    while engine.unfinished:
        engine.step()
    whole = time.perf_counter() - start
    done = sum(len(seq.output) for seq in seqs) - before
    return {"whole": whole, "forwards": forwards[0], "steps": engine.stats.steps - steps, "tokens": done}


if __name__ == "__main__":
    packages = ("slipstream", "torch", "numba", "transformers")
    serve({"info": lambda: {"versions": versions(*packages)}, "load": load, "measure": measure})
