"""Worker of OpenVINO GenAI: `LLMPipeline`, plain, with a draft model and with prompt lookup. Runs in its own
environment (`make peer-genai`)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.protocol import ROOT, THREADS, fingerprint, serve, versions

EXPORTS = ROOT / ".venv-peers" / "exports"
PROPERTIES = {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
FLOAT32 = {**PROPERTIES, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
# Without a setting, the pipeline chooses the precision of its arithmetic, which is bfloat16 if the processor has it,
# and stores keys and values in 8 bits. All other contenders store keys and values in 16 or 32 bits.
FAST = {**PROPERTIES, "KV_CACHE_PRECISION": "f16"}
LOOKUP_NGRAM = 3  # longest n-gram at the end of the text that prompt lookup searches for
pipelines: dict[str, genai.LLMPipeline] = {}
lookups: dict[str, bool] = {}


def scheduler() -> genai.SchedulerConfig:
    """Configure the pipeline for one request at a time. The prefix cache is off, because rounds repeat prompts and
    their prefill must be timed."""
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False
    config.max_num_seqs = 1
    config.max_num_batched_tokens = 4096
    return config


def export(path: str, precision: str, *options: str) -> Path:
    """Convert a checkpoint with optimum-intel, unless the same weights were converted before. precision: fp32, fp16 or
    int8. options: further options of `optimum-cli export openvino`."""
    folder = EXPORTS / f"{fingerprint(path)}-{precision}"
    if not (folder / "openvino_model.bin").exists():
        tool = Path(sys.executable).parent / "optimum-cli"
        command = [str(tool), "export", "openvino", "--model", path, "--task", "text-generation-with-past"]
        done = subprocess.run(
            [*command, "--weight-format", precision, *options, str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"optimum-cli could not export:\n{done.stderr[-2000:]}")
    return folder


def load(
    name: str,
    target: str,
    draft: str | None = None,
    lookup: bool = False,
    precision: str = "fp32",
    float32: bool = True,
) -> dict[str, Any]:
    """Build a pipeline under a name. Checkpoints that were not exported yet are exported, a draft model in the same
    format as its target.

    float32: compute in float32 instead of the precision that the pipeline chooses.
    """
    options: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
    properties = FLOAT32 if float32 else FAST
    lookups[name] = lookup
    if draft:
        options["draft_model"] = genai.draft_model(str(export(draft, precision)), "CPU", **properties)
    folder = str(export(target, precision))
    pipelines[name] = genai.LLMPipeline(folder, "CPU", scheduler_config=scheduler(), **options, **properties)
    return {}


def generate(name: str, ids: list[int], tokens: int, draft_tokens: int = 0, ends: Sequence[int] = ()) -> dict[str, Any]:
    """Continue `ids` greedily by `tokens` tokens, or up to one of `ends`. draft_tokens: draft length; 0: plain
    decoding.

    In the result, seconds is the wall time of the call, prefill included. Nothing is detokenised.
    """
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, not ends, False
    config.stop_token_ids = set(ends)
    if draft_tokens and lookups[name]:
        config.num_assistant_tokens, config.max_ngram_size = draft_tokens, LOOKUP_NGRAM
    elif draft_tokens:
        config.num_assistant_tokens, config.assistant_confidence_threshold = draft_tokens, 0.0
    prompt = genai.TokenizedInputs(ov.Tensor(np.array([ids], np.int64)), ov.Tensor(np.ones((1, len(ids)), np.int64)))
    start = time.perf_counter()
    out = pipelines[name].generate(prompt, config)
    seconds = time.perf_counter() - start
    return {"tokens": list(out.tokens[0]), "seconds": seconds}


if __name__ == "__main__":
    packages = ("openvino-genai", "openvino", "openvino-tokenizers", "optimum-intel", "transformers", "torch", "nncf")
    serve({"info": lambda: {"versions": versions(*packages)}, "load": load, "generate": generate})
