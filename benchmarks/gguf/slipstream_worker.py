"""Slipstream on GGUF files: plain, with a lookup drafter, and with draft lengths that it chooses."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.protocol import serve, versions
from slipstream import LLM, SamplingParams

models: dict[str, LLM] = {}
engines: dict[tuple[str, str | None, int | str], LLM] = {}


def load(name: str, file: str, threads: int) -> dict[str, Any]:
    """Load a file under a name."""
    models[name] = LLM(file, threads=threads)
    return {}


def _engine(name: str, drafter: str | None, draft_tokens: int | str) -> LLM:
    """One for each drafter, around the same target: it keeps what it has learned about draft lengths."""
    key = name, drafter, draft_tokens
    if key not in engines:
        of = models[name]
        engines[key] = LLM(of.target, drafter, tokenizer=of.tokenizer, draft_tokens=draft_tokens)
    return engines[key]


def generate(
    name: str, ids: list[int], tokens: int, drafter: str | None = None, draft_tokens: int | None = None,
    temperature: float = 0.0, seed: int | None = None, processor_time: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Continue `ids` by `tokens` tokens. draft_tokens: None lets Slipstream choose.

    seconds: wall time of the call, or the processor time of this process; prefill and detokenisation included.
    """
    llm = _engine(name, drafter, "auto" if draft_tokens is None else draft_tokens)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=seed)
    clock = time.process_time if processor_time else time.perf_counter
    start = clock()
    out = llm.generate([ids], params)[0]
    seconds = clock() - start
    if out.stats.drafter_faults:
        raise RuntimeError(f"the drafter {drafter!r} failed {out.stats.drafter_faults} times; see the log above")
    return {"tokens": list(out.token_ids), "seconds": seconds, "stats": out.stats.as_dict()}


if __name__ == "__main__":
    info = lambda: {"versions": versions("slipstream", "llama-cpp-python", "torch")}  # noqa: E731
    serve({"info": info, "load": load, "generate": generate})
