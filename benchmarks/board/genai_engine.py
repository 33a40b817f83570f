"""OpenVINO GenAI as an engine of the board: plain, with a draft model, with prompt lookup, in float32."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.genai_peer import FLOAT32, LOOKUP_NGRAM, export, scheduler
from benchmarks.protocol import serve, versions

DRAFT_TOKENS = 4
made: dict[str, Any] = {}


def load(method: str, target: str, draft: str, streams: int, prefix_cache: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"prompt_lookup": True} if method == "prompt lookup" else {}
    if method == "draft model":
        options["draft_model"] = genai.draft_model(str(export(draft, "fp32")), "CPU", **FLOAT32)
    folder, settings = str(export(target, "fp32")), scheduler()
    settings.enable_prefix_caching, settings.max_num_seqs = prefix_cache, streams
    made["method"], made["streams"] = method, streams
    made["it"] = genai.LLMPipeline(folder, "CPU", scheduler_config=settings, **options, **FLOAT32)
    return {}


def generate(
    ids: list[int], tokens: int, sampling: dict[str, Any], schema: dict[str, Any] | None, seeds: list[int]
) -> dict[str, Any]:
    """One text for each seed. Texts of one call share a seed, so that several at once are texts of one request."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, schema is None, bool(sampling)
    for name, value in sampling.items():
        if not hasattr(config, name):
            raise NotImplementedError(f"GenerationConfig has no {name}")
        setattr(config, name, value)
    if schema is not None:
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(schema))
    if made["method"] != "plain":
        config.num_assistant_tokens = DRAFT_TOKENS
    if made["method"] == "prompt lookup":
        config.max_ngram_size = LOOKUP_NGRAM
    prompt = genai.TokenizedInputs(ov.Tensor(np.array([ids], np.int64)), ov.Tensor(np.ones((1, len(ids)), np.int64)))
    texts: list[list[int]] = []
    drafted = 0
    while len(texts) < len(seeds):
        config.rng_seed = seeds[len(texts)]
        config.num_return_sequences = min(made["streams"], len(seeds) - len(texts)) if sampling else 1
        out = made["it"].generate(prompt, config)
        texts += [list(text) for text in out.tokens]
        drafted += out.extended_perf_metrics.get_num_draft_tokens() if made["method"] == "draft model" else 0
    return {"texts": texts} | ({"drafted": drafted} if made["method"] == "draft model" else {})


if __name__ == "__main__":
    packages = ("openvino-genai", "openvino")
    serve({"info": lambda: {"versions": versions(*packages)}, "load": load, "generate": generate})
