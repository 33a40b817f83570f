"""Worker of llama.cpp through llama-cpp-python: in F32, F16, Q8_0 and Q4_K_M, plain, with prompt lookup and with a
draft model.

The package's `draft_model` is a callable from ids to draft ids. The package provides prompt lookup. For a draft model,
we pass a second `Llama` that continues greedily. llama.cpp's own speculative decoding (in `llama-server`) cannot be
called from Python, so this measures the loop of the Python bindings. Runs in its own environment (`make
peer-llamacpp`).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from benchmarks.protocol import DRIVER_PYTHON, ROOT, THREADS, fingerprint, serve, versions

FILES = ROOT / ".venv-peer-llamacpp" / "gguf"
KINDS = {
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
CONTEXT, LOOKUP_NGRAM = 1024, 3
models: dict[str, llama_cpp.Llama] = {}


class Continuation(LlamaDraftModel):
    """Drafts the greedy continuation of a second model. Its `generate` keeps the KV of the common prefix."""

    def __init__(self, model: llama_cpp.Llama):
        self.model, self.num_pred_tokens = model, 0

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        room = min(self.num_pred_tokens, self.model.n_ctx() - len(input_ids))
        draft = islice(self.model.generate(input_ids.tolist(), temp=0.0), max(0, room))
        return np.fromiter(draft, np.intc)

    def reset(self) -> None:
        self.model.reset()


def quantized(checkpoint: str, kind: str) -> Path:
    """Return the checkpoint as a GGUF file in this format, which is made once for the same weights. Our converter makes
    F32 files, in the environment of the driver; llama.cpp makes the others."""
    file = FILES / f"{fingerprint(checkpoint)}-{kind}.gguf"
    if file.exists():
        return file
    FILES.mkdir(parents=True, exist_ok=True)
    if kind == "F32":
        writer = [os.environ[DRIVER_PYTHON], "-m", "benchmarks.gguf.gguf_writer"]
        subprocess.run([*writer, checkpoint, str(file), "f32"], check=True)
        return file
    part = file.with_suffix(".part")  # an interrupted run leaves no incomplete model
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = KINDS[kind], THREADS
    source = quantized(checkpoint, "F32")
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(part), params):
        raise RuntimeError(f"llama.cpp could not quantise {source.name} to {kind}")
    part.replace(file)
    return file


def census(file: Path) -> str:
    """Describe the formats of a file's matrices, with their share of the weights: "69 % Q5_0, 31 % Q8_0"."""
    sizes: Counter[str] = Counter()
    for tensor in gguf.GGUFReader(str(file)).tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    return ", ".join(f"{n / sizes.total():.0%} {kind}" for kind, n in sizes.most_common())


def _model(file: Path, kind: str, draft: LlamaDraftModel | None = None) -> llama_cpp.Llama:
    # With F32 weights, keys and values are float32. With other formats they are float16, llama.cpp's default, and flash
    # attention is on, because it is faster.
    cache = {"type_k": 0, "type_v": 0} if kind == "F32" else {}
    return llama_cpp.Llama(
        str(file), n_ctx=CONTEXT, n_batch=512, n_threads=THREADS, n_threads_batch=THREADS, verbose=False,
        draft_model=draft, flash_attn=kind != "F32", **cache,
    )  # fmt: skip


def load(name: str, target: str, kind: str, draft: str | None = None, lookup: bool = False) -> dict[str, Any]:
    """Load a model under a name. Files that do not exist yet are converted and quantised, a draft model in the same
    format as its target. Returns a note about the formats in the target's file."""
    helper: LlamaDraftModel | None = LlamaPromptLookupDecoding(max_ngram_size=LOOKUP_NGRAM) if lookup else None
    if draft:
        helper = Continuation(_model(quantized(draft, kind), kind))
    file = quantized(target, kind)
    models[name] = _model(file, kind, helper)
    return {"note": f"stored as {census(file)}"}


def generate(name: str, ids: list[int], tokens: int, draft_tokens: int = 0) -> dict[str, Any]:
    """Continue `ids` greedily by `tokens` tokens. A model with a drafter drafts `draft_tokens` per step.

    In the result, seconds is the wall time of the call, prefill included. No KV is reused from an earlier call.
    """
    model = models[name]
    model.reset()
    if model.draft_model is not None:
        model.draft_model.num_pred_tokens = draft_tokens
        if isinstance(model.draft_model, Continuation):
            model.draft_model.reset()
    start = time.perf_counter()
    out = list(islice(model.generate(ids, temp=0.0), tokens))
    return {"tokens": out, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    info = lambda: {"versions": versions("llama-cpp-python", "gguf", "numpy")}  # noqa: E731
    serve({"info": info, "load": load, "generate": generate})
