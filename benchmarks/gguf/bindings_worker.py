"""llama-cpp-python's own `Llama` on the same GGUF files: plain, and with its prompt lookup as `draft_model`."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.protocol import serve, versions

CONTEXT, LOOKUP_NGRAM = 1024, 3
models: dict[str, llama_cpp.Llama] = {}


def load(name: str, file: str, kind: str, threads: int, lookup: bool = False) -> dict[str, Any]:
    """Load a file under a name. F32 has keys and values in float32, the others in float16 with flash attention, as
    Slipstream has them."""
    cache: dict[str, Any] = {"type_k": 0, "type_v": 0} if kind == "F32" else {}
    models[name] = llama_cpp.Llama(
        file, n_ctx=CONTEXT, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False,
        flash_attn=kind != "F32", draft_model=LlamaPromptLookupDecoding(LOOKUP_NGRAM) if lookup else None, **cache,
    )  # fmt: skip
    return {}


def generate(
    name: str, ids: list[int], tokens: int, draft_tokens: int = 0, processor_time: bool = False
) -> dict[str, Any]:
    """Greedy continuation of `ids` by `tokens` tokens; seconds: wall time of the call, or the processor time of this
    process; prefill included. Nothing is kept from an earlier call."""
    model = models[name]
    model.reset()
    if model.draft_model is not None:
        model.draft_model.num_pred_tokens = draft_tokens
    clock = time.process_time if processor_time else time.perf_counter
    start = clock()
    out = list(islice(model.generate(ids, temp=0.0), tokens))
    return {"tokens": out, "seconds": clock() - start}


if __name__ == "__main__":
    info = lambda: {"versions": versions("llama-cpp-python", "numpy")}  # noqa: E731
    serve({"info": info, "load": load, "generate": generate})
