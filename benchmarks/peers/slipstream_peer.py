"""Worker of Slipstream: plain, with any drafter, with int8 weights, and forward passes of the target alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from functools import wraps
from typing import Any

import torch

from benchmarks.protocol import THREADS, serve, versions
from slipstream import LLM, SamplingParams
from slipstream.executor.executor import Batch, Executor

models: dict[str, LLM] = {}
loaded: dict[str, dict[str, Any]] = {}  # arguments of `load` by name
forwards = [0.0]  # seconds spent in executors since the last `generate` began


def load(
    name: str,
    target: str,
    draft: str | list[str] | None = None,
    quantize: str | None = None,
) -> dict[str, Any]:
    """Load an engine under a name. `draft` and the other arguments are as in `LLM`."""
    loaded[name] = {"target": target, "draft": draft, "quantize": quantize}
    _engine(name, 0)
    return {}


def _engine(name: str, draft_tokens: int) -> LLM:
    """Return the engine with this name. It is created again if the draft length changes, because a drafter may prepare
    for one length only."""
    if name not in models or models[name].draft_tokens != draft_tokens:
        models.pop(name, None)
        llm = LLM(**loaded[name], draft_tokens=draft_tokens, dtype="float32", threads=THREADS)
        clock_executors(llm)
        models[name] = llm
    return models[name]


def clock_executors(llm: LLM) -> None:
    """Add the seconds that the executors of target and draft model spend in forward passes to `forwards`."""
    drafter = getattr(llm.drafter, "drafter", llm.drafter)  # without its `Guard`
    parts: list[Any] = [llm.target, getattr(drafter, "model", None)]
    for model in parts:
        if hasattr(model, "executor"):
            _clock(model.executor)


def _clock(executor: Executor) -> None:
    """Add the seconds that this executor spends in single passes and in `decode_steps` to `forwards`."""

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def inner(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                forwards[0] += time.perf_counter() - start

        return inner

    for name in ("forward", "decode_steps"):
        if hasattr(executor, name):
            setattr(executor, name, counted(getattr(executor, name)))


def generate(name: str, ids: list[int], tokens: int, draft_tokens: int = 0) -> dict[str, Any]:
    """Continue `ids` greedily by `tokens` tokens.

    In the result, seconds is the wall time of the call, with prefill and detokenisation; step is the time of the
    engine's steps; forwards is the time of target and draft passes in these steps; stats are the engine's statistics.
    """
    params, engine = SamplingParams(max_tokens=tokens, ignore_eos=True), _engine(name, draft_tokens)
    forwards[0] = 0.0
    start = time.perf_counter()
    out = engine.generate([ids], params)[0]
    seconds = time.perf_counter() - start
    if out.stats.drafter_faults:
        raise RuntimeError(f"the drafter of {name!r} failed {out.stats.drafter_faults} times; see the log above")
    stats = out.stats.as_dict()
    step = sum(stats["seconds"].values())
    return {"tokens": list(out.token_ids), "seconds": seconds, "step": step, "forwards": forwards[0], "stats": stats}


def rows(name: str, past: int, counts: Seq[int], repeats: int) -> dict[str, Any]:
    """Measure the seconds of the target's forward pass over each number of new rows after `past` tokens, alternating,
    `repeats` times.

    The logits of all rows are computed, as in verification.
    """
    target = models[name].target
    executor, vocab = target.executor, target.vocab_size  # type: ignore[attr-defined]
    seconds: list[list[float]] = [[] for _ in counts]

    def forward(past: int, count: int, select: Seq[int]) -> float:
        tokens = torch.arange(past, past + count) % vocab
        positions = range(past, past + count)
        batch = Batch((-1,), tokens, positions, (0, count), (past,), (None,), select)
        start = time.perf_counter()
        executor.forward(batch)
        return time.perf_counter() - start

    forward(0, past, [past - 1])
    for index in range(repeats + 5):  # the first five warm up
        for which, count in enumerate(counts):
            took = forward(past, count, range(count))
            if index >= 5:
                seconds[which].append(took)
    executor.release(-1)
    return {"seconds": seconds}


if __name__ == "__main__":
    packages = ("slipstream", "torch", "numba", "transformers")
    info = lambda: {"versions": versions(*packages)}  # noqa: E731
    serve({"info": info, "load": load, "generate": generate, "rows": rows})
