"""Worker of Slipstream on GGUF files."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence as Seq
from typing import Any

import numpy as np
import torch

from benchmarks.protocol import peak_memory, serve, versions
from slipstream import LLM, SamplingParams
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.drafters.draft_plan import WITHOUT_DRAFT, names_of, parse_draft
from slipstream.executor.executor import make_batch
from slipstream.settings import AUTO

models: dict[str, LLM] = {}
drafting: dict[str, LLM] = {}


def load(
    name: str,
    file: str,
    threads: int,
    quantize: str | None = None,
    drafter: str = WITHOUT_DRAFT,
    draft: str | None = None,
    draft_tokens: int | str = AUTO,
    drafters: Mapping[str, str] | None = None,
    draft_quantize: str | None = None,
) -> dict[str, Any]:
    """Load a file under a name, for plain decoding and with a drafter. The drafter is given as on the command line:
    names of the registry, separated by commas, and a draft model or head. drafters: further drafters for the same
    target, by name. draft_quantize: weight format of the draft model."""
    models[name] = LLM(file, threads=threads, quantize=quantize)
    chosen, options = parse_draft(names_of(drafter), draft)
    drafting[name] = LLM(models[name].target, chosen, draft_options=options, draft_tokens=draft_tokens)
    for other, names in (drafters or {}).items():
        chosen, options = parse_draft(names_of(names), draft)
        drafting[other] = LLM(models[name].target, chosen, draft_options=options, draft_quantize=draft_quantize)
    return {}


def request(
    name: str, ids: list[int], tokens: int, ends: Seq[int] = (), drafted: bool = False, prediction: Seq[int] = ()
) -> dict[str, Any]:
    """Continue `ids` greedily. ends: ids that end the output. In the result, seconds is the time until the last token,
    and first the time until the first `count` tokens."""
    started, first, count = time.perf_counter(), 0.0, 0
    llm = (drafting if drafted else models)[name]
    seq = llm.sequence(ids, SamplingParams(max_tokens=tokens, ignore_eos=True, stop_token_ids=tuple(ends)))
    seq.prediction = prediction
    for _ in llm.decode([seq]):
        if not count:
            first, count = time.perf_counter() - started, len(seq.output)
    return {"seconds": time.perf_counter() - started, "first": first, "count": count, "tokens": seq.output}


def loss(name: str, ids: list[int]) -> dict[str, Any]:
    """Return the sum of -log p over all ids after the first, in one window."""
    target = models[name].target
    seq = Sequence(ids[:1])
    logits = target.run([seq], Draft.chains([ids[1:]])).logits[: len(ids) - 1]
    target.release(seq.id)
    nll = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[1:]), reduction="sum")
    assert math.isfinite(float(nll))
    return {"loss": float(nll), "count": len(ids) - 1}


def logits(name: str, ids: list[int], file: str) -> dict[str, Any]:
    """Write the logits after the last token to a numpy file, float32 [V]."""
    target = models[name].target
    seq = Sequence(ids)
    np.save(file, target.run([seq], Draft.empty(1)).logits[-1].float().numpy())
    target.release(seq.id)
    return {}


def rows(name: str, count: int, repeats: int, first: int = 20) -> dict[str, Any]:
    """Return the milliseconds of a pass over `count` rows of one sequence, after 64 tokens, and the number of experts
    that it read in all layers. first: the first draft token."""
    target = models[name].target
    seq, times, experts = Sequence(list(range(10, 74))), [], []
    target.run([seq], Draft.empty(1))
    seq.kv_len = len(seq.tokens)
    seq.tokens.append(7)
    for _ in range(repeats):
        draft = Draft.chains([list(range(first, first + count - 1))]) if count > 1 else Draft.empty(1)
        batch = make_batch([seq], draft, target.device)
        started = time.perf_counter()
        experts.append(target.executor.forward(batch).experts_read)
        times.append(1000 * (time.perf_counter() - started))
    target.release(seq.id)
    return {"milliseconds": times, "experts": experts}


def bandwidth(gigabytes: float = 1.0) -> dict[str, Any]:
    """Return the bytes per second that a loop reads which only adds, on all threads of torch; the best of ten runs."""
    numbers, best = torch.ones(int(gigabytes * 2**28)), math.inf
    for _ in range(10):
        started = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - started)
    return {"bandwidth": numbers.nbytes / best}


def memory(name: str) -> dict[str, Any]:
    """Return sizes in bytes: peak memory of the process so far, weights that a pass reads, and KV cache."""
    parts = models[name].target.executor.memory()
    return {"peak": peak_memory(), **parts}


if __name__ == "__main__":
    info = lambda: {"versions": versions("slipstream", "torch")}  # noqa: E731
    served = {each.__name__: each for each in (load, request, loss, logits, rows, memory, bandwidth)}
    serve({"info": info, **served})
