"""transformers as an engine of the board: `generate`, plain, assisted, with prompt lookup, with early exit,
and assisted by a model with a tokenizer of its own ("universal")."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.protocol import serve, versions

EARLY_EXIT, DRAFT_TOKENS, FEWER_TOKENS = 2, 4, 96
models: dict[str, Any] = {}
options: dict[str, Any] = {}
drafted = {"tokens": 0}


def _model(path: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None  # texts go on past the end of text
    model.generation_config.pad_token_id = 0
    return model


def load(method: str, target: str, draft: str, streams: int, prefix_cache: bool) -> dict[str, Any]:
    if streams > 1 or prefix_cache:
        raise NotImplementedError("assisted generation takes one text at a time, and generate keeps no prefix cache")
    models["it"] = count_drafts(_model(target))
    options.clear()
    if method in ("assisted", "universal"):
        options["assistant_model"] = _model(draft)
        settings = options["assistant_model"].generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = DRAFT_TOKENS, "constant"
        settings.assistant_confidence_threshold = 0.0
    elif method == "prompt lookup":
        options["prompt_lookup_num_tokens"] = DRAFT_TOKENS
    elif method == "early exit":
        options["assistant_early_exit"] = EARLY_EXIT
    if method == "universal":
        options["tokenizer"] = AutoTokenizer.from_pretrained(target)
        options["assistant_tokenizer"] = shorten(options["assistant_model"], Path(draft))
    return {}


def count_drafts(model: Any) -> Any:
    """Let a model count the draft tokens that it verifies, which `generate` does not tell."""
    start = model._get_candidate_generator

    def counting(*arguments: Any, **named: Any) -> Any:
        generator = start(*arguments, **named)
        draft = generator.get_candidates

        def counted(ids: torch.Tensor, **more: Any) -> Any:
            candidates = draft(ids, **more)
            drafted["tokens"] += candidates[0].shape[1] - ids.shape[1]
            return candidates

        generator.get_candidates = counted
        return generator

    model._get_candidate_generator = counting
    return model


def shorten(model: Any, folder: Path) -> Any:
    """Take the last tokens of a model away, in place, because pairs of one vocabulary are refused, and rename another
    one, because `generate` fails if the target has all tokens of its assistant. Returns its tokenizer."""
    described = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, kept = described["model"]["vocab"], model.config.vocab_size - FEWER_TOKENS
    described["model"]["vocab"] = {token: number for token, number in vocabulary.items() if number < kept} | {
        "<|other|>": kept
    }
    described["model"]["merges"] = [pair for pair in described["model"]["merges"] if vocabulary["".join(pair)] < kept]
    model.resize_token_embeddings(kept + 1)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)))


@torch.inference_mode()
def generate(
    ids: list[int], tokens: int, sampling: dict[str, Any], schema: dict[str, Any] | None, seeds: list[int]
) -> dict[str, Any]:
    """One text for each seed; without a drafter all in one batch, since drafts are verified for one text at a time."""
    if schema is not None:
        raise NotImplementedError("generate has no JSON schemas")
    chosen = {"do_sample": bool(sampling), "max_new_tokens": tokens, **({"top_k": 0} | sampling if sampling else {})}
    prompt, texts = torch.tensor([ids]), []
    drafted["tokens"] = 0
    for seed in seeds if options else seeds[:1]:
        torch.manual_seed(seed)
        count = 1 if options or not sampling else len(seeds)
        mask = torch.ones_like(prompt)
        out = models["it"].generate(prompt, attention_mask=mask, num_return_sequences=count, **chosen, **options)
        texts += out[:, len(ids) :].tolist()
    return {"texts": texts} | ({"drafted": drafted["tokens"]} if options else {})


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"info": lambda: {"versions": versions("transformers", "torch")}, "load": load, "generate": generate})
