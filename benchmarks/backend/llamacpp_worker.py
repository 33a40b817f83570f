"""Times forward passes of llama.cpp by its low-level calls, in the environment of `make peer-llamacpp`."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.gguf_export import census
from benchmarks.peers.llamacpp_peer import quantized
from benchmarks.protocol import THREADS, serve, versions

loaded: list[llama_cpp.Llama] = []


def load(path: str, past: int, most: int, kind: str, threads: int = THREADS) -> dict[str, Any]:
    """Load the checkpoint as a GGUF file of that kind, converted once, and fill its cache with `past` tokens.
    logits: of the last of 8 rows, at 64 columns."""
    file = quantized(path, kind)
    model = llama_cpp.Llama(
        str(file), n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    loaded[:] = [model]
    _decode(0, past, last_only=True)
    logits = _decode(past, 8)
    columns = range(0, len(logits), max(1, len(logits) // 64))
    return {"logits": [float(logits[c]) for c in columns][:64], "note": f"stored as {census(file)}"}


def _decode(past: int, rows: int, last_only: bool = False) -> np.ndarray:
    """One pass over `rows` new tokens after `past`; logits of the last one."""
    batch = _batch(past, rows, last_only)
    try:
        return _run(past, rows, batch)
    finally:
        llama_cpp.llama_batch_free(batch)


def _batch(past: int, rows: int, last_only: bool) -> Any:
    vocabulary = loaded[0].n_vocab()
    batch = llama_cpp.llama_batch_init(rows, 0, 1)
    batch.n_tokens = rows
    for i in range(rows):
        batch.token[i] = (past + i) * 7919 % vocabulary
        batch.pos[i] = past + i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = not last_only or i == rows - 1
    return batch


def _run(past: int, rows: int, batch: Any) -> np.ndarray:
    context = loaded[0].ctx
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, past, -1)
    if llama_cpp.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    pointer = llama_cpp.llama_get_logits_ith(context, rows - 1)  # waits for the pass to end
    return np.ctypeslib.as_array(pointer, (loaded[0].n_vocab(),))


def forwards(rows: int, past: int, most: int, repeats: int, warmups: int, limit: float) -> dict[str, Any]:
    """Seconds of up to `repeats` passes over `rows` new tokens after `past`, fewer once they took `limit` seconds.
    The batch is created before the timing starts. With `past` 0 it is a prompt, which overwrites the cache: no further
    rows can be timed after it."""
    batch, seconds = _batch(past, rows, past == 0), []
    for index in range(warmups + repeats):
        start = time.perf_counter()
        _run(past, rows, batch)
        if index >= warmups:
            seconds.append(time.perf_counter() - start)
        if sum(seconds) > limit:
            break
    llama_cpp.llama_batch_free(batch)
    return {"seconds": seconds}


if __name__ == "__main__":
    info = lambda: {"versions": versions("llama-cpp-python", "gguf", "numpy")}  # noqa: E731
    serve({"info": info, "load": load, "forwards": forwards})
