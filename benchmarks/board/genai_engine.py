"""OpenVINO GenAI as an engine of the board: plain, with a draft model, with prompt lookup, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.genai_peer import FLOAT32, LOOKUP_NGRAM, export, scheduler
from benchmarks.protocol import serve, versions

DRAFT_TOKENS = 4
made: dict[str, Any] = {}


def load(method: str, target: str, draft: str) -> dict[str, Any]:
    options: dict[str, Any] = {"prompt_lookup": True} if method == "prompt lookup" else {}
    if method == "draft model":
        options["draft_model"] = genai.draft_model(str(export(draft, "fp32")), "CPU", **FLOAT32)
    folder = str(export(target, "fp32"))
    made["method"] = method
    made["it"] = genai.LLMPipeline(folder, "CPU", scheduler_config=scheduler(), **options, **FLOAT32)
    return {}


def generate(ids: list[int], tokens: int, sampling: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """One text for each seed."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, bool(sampling)
    for name, value in sampling.items():
        if not hasattr(config, name):
            raise NotImplementedError(f"GenerationConfig has no {name}")
        setattr(config, name, value)
    if made["method"] != "plain":
        config.num_assistant_tokens = DRAFT_TOKENS
    if made["method"] == "prompt lookup":
        config.max_ngram_size = LOOKUP_NGRAM
    prompt = genai.TokenizedInputs(ov.Tensor(np.array([ids], np.int64)), ov.Tensor(np.ones((1, len(ids)), np.int64)))
    texts = []
    for seed in seeds:
        config.rng_seed = seed
        texts.append(list(made["it"].generate(prompt, config).tokens[0]))
    return {"texts": texts}


if __name__ == "__main__":
    packages = ("openvino-genai", "openvino")
    serve({"info": lambda: {"versions": versions(*packages)}, "load": load, "generate": generate})
