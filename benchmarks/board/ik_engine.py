"""ik_llama.cpp's server as an engine of the board: plain, with a draft model, with n-grams, in float32.

Runs in Slipstream's environment; the server is what `make ik-server` builds from the source package of
ik-llama-cpp-python.
"""

from __future__ import annotations

from typing import Any

from benchmarks.board.llamacpp_engine import complete, drafted, gguf, made, run, start
from benchmarks.protocol import ROOT

HOME = ROOT / ".venv-peer-ik"
VERSION = "0.1.5"
SHORT = ["--spec-ngram-size-n", "2", "--spec-ngram-size-m", "4"]
"""Short n-grams: texts of the board are short."""


def load(method: str, target: str, draft: str, streams: int, prefix_cache: bool) -> dict[str, Any]:
    """Without flash attention, whose kernels have no float32 cache."""
    options = [] if method == "plain" else ["--draft-max", "4", "--draft-min", "0"]
    if method == "draft model":
        options += ["--model-draft", gguf(draft), "--draft-p-min", "0"]
    elif options:
        options += ["--spec-type", method, *SHORT]
    program = [str(HOME / "build/bin/llama-server"), "--model", gguf(target), "--no-flash-attn", *options]
    start(program, streams, HOME / f"{method}.log")
    made["cache"] = prefix_cache
    return {}


def generate(
    ids: list[int], tokens: int, sampling: dict[str, Any], schema: dict[str, Any] | None, seeds: list[int]
) -> dict[str, Any]:
    """One text for each seed. Only log-probabilities come with the ids of tokens."""
    done = complete("/v1/completions", {"logprobs": 1}, ids, tokens, sampling, schema, seeds)
    texts = [[token["id"] for token in each["choices"][0]["logprobs"]["content"]] for each in done]
    return {"texts": texts, "drafted": drafted(done)}


if __name__ == "__main__":
    run({"ik_llama.cpp of ik-llama-cpp-python": VERSION}, load=load, generate=generate)
