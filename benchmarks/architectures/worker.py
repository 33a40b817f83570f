"""Tries one architecture in this process.

Every run must write what the model's own greedy `generate` writes for the prompt. The runs are plain decoding, the
n-gram drafter, and a drafter with two thirds right draft tokens, each with one request and with three at a time.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.architectures.replayed import Replayed
from benchmarks.architectures.tiny import VOCAB, tiny_model
from slipstream import LLM, SamplingParams
from slipstream.core.target import Target
from slipstream.errors import SlipstreamError
from slipstream.settings import AUTO, TRANSFORMERS
from slipstream.targets.describe import as_target
from slipstream.targets.huggingface.chains_only import ChainsOnly

PROMPTS = [[5, 9, 33, 12, 7, 5, 9, 33], [7, 8, 9, 8], [60, 61, 40, 17, 17, 21, 3, 4, 11, 5, 6, 58]]
TOKENS = 24
MEMORY = 8 << 30
"""Limit of the address space in bytes."""
_SEEDS = 4
_VARIED = VOCAB // 8
"""If an output has fewer different tokens, other weights are drawn, because such texts show few differences."""

NOT_BUILT, REFUSED, DIFFERS, CRASHED = "not built", "refused", "differs", "crashed"
OWN, PACKED, ONE_EACH, ONE_BY_ONE = "own decoder, and packed", "packed", "one each", "one by one"


@dataclass(frozen=True)
class Found:
    """The result for one architecture.

    outcome  how the model runs, if every output equals the output of `generate`; else REFUSED, NOT_BUILT, DIFFERS or
             CRASHED.
    why      text of the error. note: what differs from the usual comparison.
    """

    outcome: str
    why: str = ""
    note: str = ""


def confine() -> None:
    """Limit the memory of this process, and silence the libraries."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)


def tried(model_type: str) -> Found:
    """Try one architecture. Never raises: an error is part of the result."""
    try:
        model = tiny_model(model_type)
    except Exception as fault:  # transformers may raise anything
        return Found(NOT_BUILT, said(fault))
    texts, note = list[list[int]](), ""
    try:
        model, texts, note = varied(model_type, model)
    except Exception as fault:
        note = f"`generate` of transformers fails: {said(fault)}"
    kinds = []
    for executor in (AUTO, TRANSFORMERS):
        try:
            target = as_target(model, executor=executor)
            kinds.append(kind_of(target))
            other = difference(target, texts)
            if other and model.config.get_text_config().to_dict().get("sliding_window"):
                # transformers' cache drops tokens before the window, even if attention would see them.
                texts, note = expected(model, use_cache=False), "compared with `generate(use_cache=False)`"
                other = difference(target, texts)
        except SlipstreamError as fault:
            return Found(REFUSED, fault.what, note if not texts else "")
        except Exception as fault:
            return Found(CRASHED, said(fault), note)
        if other or not texts:
            return Found(DIFFERS, other, note)
    return Found(kinds[0] if kinds[0] == kinds[1] else OWN, note=note)


def varied(model_type: str, model: Any) -> tuple[Any, list[list[int]], str]:
    """Return a model whose outputs have many different tokens, the outputs, and a note with the dtype if it is not
    float64."""
    for seed in range(1, _SEEDS + 1):
        try:
            texts, note = expected(model), ""
        except RuntimeError:  # some models work only in float32
            model = model.float()
            texts, note = expected(model), "float32"
        if len(set().union(*texts)) > _VARIED or seed == _SEEDS:
            return model, texts, note
        model = tiny_model(model_type, seed=seed)
    raise AssertionError


def expected(model: Any, **more: Any) -> list[list[int]]:
    """Return the output of `generate` for each prompt, run one by one."""
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"do_sample": False, "max_new_tokens": TOKENS, "attention_mask": torch.ones_like(ids)}
        texts.append(model.generate(ids, **given, **more)[0, len(prompt) :].tolist())
    return texts


def kind_of(target: Target) -> str:
    runtime = target.capabilities.runtime
    assert runtime is not None
    if runtime.backend != TRANSFORMERS:
        return OWN
    if not isinstance(target, ChainsOnly):
        return PACKED
    return ONE_BY_ONE if target.one_by_one else ONE_EACH


def difference(target: Target, texts: Seq[list[int]]) -> str:
    """Describe the first run whose output differs; "" if no run differs, or if there is nothing to compare with."""
    recorded = {tuple(prompt): text for prompt, text in zip(PROMPTS, texts, strict=False)}
    for batch in (1, len(PROMPTS)) if recorded else ():
        llm = LLM(target, draft_tokens=4, max_batch=batch)
        for drafter in (None, "ngram", Replayed(recorded, target.vocab_size, 0.7)):
            llm.use(drafter)
            for one in llm.generate(PROMPTS[:batch], SamplingParams(max_tokens=TOKENS)):
                if one.token_ids != recorded[tuple(one.prompt_token_ids)] or one.stats.drafter_faults:
                    return (
                        f"batch of {batch}, drafter {llm.drafter.name}, prompt {one.prompt_token_ids}: {one.token_ids}"
                    )
    return ""


def said(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}"
