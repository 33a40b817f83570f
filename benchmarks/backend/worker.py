"""Times forward passes of Slipstream: of this checkout, or of another one that `PYTHONPATH` names.

So it uses nothing of `benchmarks.backend`, and of Slipstream only what both checkouts have.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.protocol import serve, versions

try:
    from slipstream.models.executor import Batch
    from slipstream.targets.decoder import Decoder
except ImportError:  # an older checkout, with other module names
    from slipstream.targets.decoder.executor import Batch  # type: ignore[no-redef]
    from slipstream.targets.decoder.model import Decoder  # type: ignore[no-redef]

CONTEXT, PROMPT = -1, -2  # sequence ids: one with tokens in the cache, one that always starts empty
NATIVE = (
    "slipstream.targets.decoder.native_executor",
    "slipstream.backends.native.executor",
    "slipstream.backends.native.native_executor",
)
"""Where the native executor is, in one version or another."""
loaded: list[Decoder] = []


def load(path: str, past: int, most: int, threads: int = 2, **options: Any) -> dict[str, Any]:
    """Load a decoder (`options` as in `Decoder.load`) and fill its cache with `past` tokens.

    most  largest number of rows that will be timed after them.
    logits: of the last of 8 rows, at 64 columns; memory: bytes of weights that a pass reads.
    """
    decoder = Decoder.load(path, threads=threads, **options)
    loaded[:] = [decoder]
    _forward(CONTEXT, 0, past, [past - 1], past + most)
    logits = _forward(CONTEXT, past, 8, range(8), past + most)[-1]
    columns = range(0, len(logits), max(1, len(logits) // 64))
    return {"logits": [float(logits[c]) for c in columns][:64], "weights": decoder.executor.memory().get("weights")}


def _forward(sequence: int, past: int, rows: int, select: Sequence[int], limit: int) -> torch.Tensor:
    decoder = loaded[0]
    tokens = (torch.arange(past, past + rows) * 7919) % decoder.vocab_size
    more = (limit,) if "limit" in Batch.__dataclass_fields__ else ()  # a checkout whose buffers are sized in advance
    batch = Batch((sequence,), tokens, range(past, past + rows), (0, rows), (past,), (None,), select, *more)
    return decoder.executor.forward(batch).logits


def forwards(rows: int, past: int, most: int, repeats: int, warmups: int, limit: float) -> dict[str, Any]:
    """Seconds of up to `repeats` passes over `rows` new tokens after `past`, fewer once they took `limit` seconds.
    With `past` 0 it is a prompt: only the logits of its last token are computed."""
    prompt = past == 0
    select = [rows - 1] if prompt else range(rows)
    seconds = []
    for index in range(warmups + repeats):
        start = time.perf_counter()
        _forward(PROMPT if prompt else CONTEXT, past, rows, select, rows if prompt else past + most)
        took = time.perf_counter() - start
        if prompt:
            loaded[0].executor.release(PROMPT)
        if index >= warmups:
            seconds.append(took)
        if sum(seconds) > limit:
            break
    return {"seconds": seconds}


def first_use(target: str, draft: str, threads: int = 2) -> dict[str, Any]:
    """Seconds that loading a pair and generating with it, greedily and by sampling, takes longer the first time in this
    process. Imports, and everything that other executors need too, are done before the clock starts (imports: their
    seconds)."""
    start = time.perf_counter()
    import numba

    for module in NATIVE:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    imports = time.perf_counter() - start
    from slipstream import LLM, SamplingParams
    from slipstream.errors import ParameterError

    params = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=1),
    ]
    prompts = [[(31 * i) % 1000 + 5 for i in range(count)] for count in (200, 20)]

    def run(executor: str, quantize: str | None) -> float:
        start = time.perf_counter()
        llm = LLM(target, draft=draft, draft_tokens=4, executor=executor, draft_quantize=quantize, threads=threads)
        for each in params:
            llm.generate(prompts, each)
        return time.perf_counter() - start

    run("torch", None)
    first = quantize = None
    for quantize in ("int8", "w8a16"):  # the kind's name has changed between versions
        try:
            first = run("native", quantize)
            break
        except ParameterError:
            continue
    if first is None:
        raise RuntimeError("no 8-bit draft could be loaded")
    again = min(run("native", quantize) for _ in range(3))
    return {
        "seconds": max(0.0, first - again),
        "first": first,
        "again": again,
        "imports": imports,
        "numba": numba.__version__,
    }


if __name__ == "__main__":
    info = lambda: {"versions": versions("slipstream", "torch", "openvino", "numba")}  # noqa: E731
    serve({"info": info, "load": load, "forwards": forwards, "first_use": first_use})
