"""Worker of transformers: `generate`, plain, with an assistant model, and with prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.protocol import THREADS, serve, versions

models: dict[str, Any] = {}
settings: dict[str, tuple[str, float]] = {}


def load(
    name: str,
    target: str,
    draft: str | None = None,
    schedule: str = "constant",
    confidence: float = 0.0,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Load target and assistant model, each only once even if several names use them.

    schedule, confidence  transformers' `num_assistant_tokens_schedule` and `assistant_confidence_threshold`.
    """
    settings[name] = schedule, confidence
    for role, path in (("target", target), ("draft", draft)):
        if path is None or role in models:
            continue
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        # Every contender ignores end-of-text tokens. min_new_tokens is not used, because it would forbid these tokens.
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        models[role] = model
    return {}


def generate(name: str, ids: list[int], tokens: int, draft_tokens: int = 0, ends: Sequence[int] = ()) -> dict[str, Any]:
    """Continue `ids` greedily by `tokens` tokens, or up to one of `ends`. draft_tokens: draft length; 0: plain
    decoding. The assistant model drafts, or prompt lookup if the name is "lookup". With another schedule than
    "constant", this is only the first draft length.

    In the result, seconds is the wall time of the call, prefill included.
    """
    prompt = torch.tensor([ids])
    options: dict[str, Any] = {"eos_token_id": list(ends)} if ends else {}
    if draft_tokens and name == "lookup":
        options["prompt_lookup_num_tokens"] = draft_tokens
    elif draft_tokens:
        config = models["draft"].generation_config
        config.num_assistant_tokens = draft_tokens
        config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = settings[name]
        options["assistant_model"] = models["draft"]
    start = time.perf_counter()
    with torch.inference_mode():
        out = models["target"].generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens, **options
        )
    seconds = time.perf_counter() - start
    return {"tokens": out[0, len(ids) :].tolist(), "seconds": seconds}


def margin(ids: list[int]) -> dict[str, Any]:
    """Return the distance between the two largest logits after `ids` (natural units), and their ids."""
    with torch.inference_mode():
        top = models["target"](torch.tensor([ids])).logits[0, -1].topk(2)
    return {"margin": float(top.values[0] - top.values[1]), "ids": top.indices.tolist()}


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    info = lambda: {"versions": versions("transformers", "torch", "tokenizers", "safetensors")}  # noqa: E731
    serve({"info": info, "load": load, "generate": generate, "margin": margin})
