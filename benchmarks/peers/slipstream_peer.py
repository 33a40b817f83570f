"""Slipstream itself: plain, with a draft model, with n-grams, with int8 weights, and its bare target forward."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.contenders import DRAFT_LENGTHS, LOOKUP_LENGTHS
from benchmarks.protocol import THREADS, serve, versions
from slipstream import LLM, SamplingParams
from slipstream.targets.decoder.executor import Batch

models: dict[str, LLM] = {}


def load(name: str, target: str, draft: str | None = None, quantize: str | None = None) -> dict[str, Any]:
    """Load an engine under a name. The draft length of each request may be anything up to the longest tried."""
    longest = max(LOOKUP_LENGTHS if draft == "ngram" else DRAFT_LENGTHS)
    options: dict[str, Any] = {"quantize": quantize, "threads": THREADS}
    models[name] = LLM(target, draft=draft, draft_tokens=longest, dtype="float32" if not quantize else None, **options)
    return {}


def generate(name: str, ids: list[int], tokens: int, draft_tokens: int = 0) -> dict[str, Any]:
    """Greedy continuation of `ids` by `tokens` tokens.

    seconds: wall time of the call, prefill and the making of text included. stats: what the engine counted.
    """
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, draft_tokens=draft_tokens)
    start = time.perf_counter()
    out = models[name].generate([ids], params)[0]
    seconds = time.perf_counter() - start
    return {"tokens": list(out.token_ids), "seconds": seconds, "stats": out.stats.as_dict()}
