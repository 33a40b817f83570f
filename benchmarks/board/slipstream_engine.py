"""Slipstream as an engine of the board; its methods are named "executor: drafter"."""

from __future__ import annotations

from typing import Any

from benchmarks.protocol import serve, versions
from slipstream.core.params import SamplingParams
from slipstream.core.structured import Structured
from slipstream.engine.engine import Engine
from slipstream.llm import LLM

DRAFTS = {"plain": None, "draft model": "draft", "suffix": "suffix", "EAGLE-3": "eagle3", "Medusa": "medusa"}
DRAFT_TOKENS = {"of a step": 4}
models: dict[str, LLM] = {}
engines: dict[str, Engine] = {}


def load(method: str, target: str, draft: str, streams: int, prefix_cache: bool) -> dict[str, Any]:
    executor, _, drafter = method.rpartition(": ")
    kind = DRAFTS[drafter]
    options: dict[str, Any] = (
        {"draft": draft if kind == "draft" else kind, "draft_tokens": DRAFT_TOKENS["of a step"]} if kind else {}
    )
    models["it"] = LLM(target, executor=executor or "native", dtype="float32", threads=1, max_batch=streams, **options)
    engines.clear()
    if prefix_cache:
        engines["it"] = models["it"].engine()
    return {}


def generate(
    ids: list[int], tokens: int, sampling: dict[str, Any], schema: dict[str, Any] | None, seeds: list[int]
) -> dict[str, Any]:
    """One text for each seed."""
    form = {"ignore_eos": True} if schema is None else {"structured": Structured(json_schema=schema)}
    params = [SamplingParams(max_tokens=tokens, seed=seed, **form, **sampling) for seed in seeds]
    llm = models["it"]
    seqs = [llm.sequence(ids, each) for each in params]
    for _ in engines["it"].decode(seqs) if engines else llm.decode(seqs):
        pass
    reply: dict[str, Any] = {"texts": [seq.output for seq in seqs]}
    return reply | ({"drafted": sum(seq.stats.proposed for seq in seqs)} if llm.drafter.traits.drafts else {})


if __name__ == "__main__":
    serve({"info": lambda: {"versions": versions("slipstream", "torch")}, "load": load, "generate": generate})
