"""Slipstream as an engine of the board; its methods are named "executor: drafter"."""

from __future__ import annotations

from typing import Any

from benchmarks.protocol import serve, versions
from slipstream.core.params import SamplingParams
from slipstream.llm import LLM

DRAFTS = {"plain": None, "draft model": "draft", "suffix": "suffix", "EAGLE-3": "eagle3"}
models: dict[str, LLM] = {}


def load(method: str, target: str, draft: str) -> dict[str, Any]:
    executor, _, drafter = method.rpartition(": ")
    kind = DRAFTS[drafter]
    options: dict[str, Any] = {"draft": draft if kind == "draft" else kind, "draft_tokens": 4} if kind else {}
    models["it"] = LLM(target, executor=executor or "native", dtype="float32", threads=1, max_batch=8, **options)
    return {}


def generate(ids: list[int], tokens: int, sampling: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """One text for each seed."""
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, **sampling) for seed in seeds]
    done = models["it"].generate([ids] * len(seeds), params)
    return {"texts": [each.token_ids for each in done]}


if __name__ == "__main__":
    serve({"info": lambda: {"versions": versions("slipstream", "torch")}, "load": load, "generate": generate})
