"""Greedy identity in float64, without tolerance: the text equals plain decoding's, token for token, for every draft,
draft length and batch.

The reference is `Oracle.greedy`: each token by a fresh prefill of the whole text, without a cache.
"""

from __future__ import annotations

import pytest
import torch

from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.target import Target
from slipstream.llm import LLM
from slipstream.targets.decoder import Decoder
from tests.checkpoints import make_family
from tests.drafters.scripted_drafters import ScriptedDrafter, replay, right, wrong, wrong_at
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

V = 7
LENGTH = 24
PROMPTS = [[3], [1, 2, 1, 2, 1], [0, 5], [6, 6, 4, 0, 1, 2, 3, 4, 5, 0, 1], [2, 2, 2, 2]]
SCRIPTS = {"right": right, "wrong": wrong, "replay": replay(0.6)} | {f"wrong at {j}": wrong_at(j) for j in range(8)}


def toy(seed: int = 1) -> ToyTarget:
    return ToyTarget(V, order=4, seed=seed)


@pytest.fixture(scope="module")
def truth() -> Oracle:
    return Oracle(toy())


def script(oracle: Oracle, name: str, prompts: list[list[int]], length: int = LENGTH) -> ScriptedDrafter:
    known = {tuple(prompt): oracle.greedy(prompt, length) for prompt in prompts}
    return ScriptedDrafter(known, oracle.target.vocab_size, SCRIPTS[name], oracle.target.device)


def texts(target: Target, drafter: Drafter, draft_tokens: int, prompts: list[list[int]], max_batch: int = 8) -> list:
    llm = LLM(target, drafter, draft_tokens=draft_tokens, max_batch=max_batch)
    done = llm.generate(prompts, SamplingParams(max_tokens=LENGTH))
    assert not any(completion.stats.drafter_faults for completion in done)
    return done


@pytest.mark.parametrize("draft_tokens", range(1, 9))
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripted(truth: Oracle, name: str, draft_tokens: int) -> None:
    """Draft lengths 1..8, every length of acceptance 0..8, batches of 1..5 prompts of different lengths."""
    for batch in range(1, len(PROMPTS) + 1):
        prompts = PROMPTS[-batch:]
        drafter = script(truth, name, prompts)
        for prompt, done in zip(prompts, texts(toy(), drafter, draft_tokens, prompts), strict=True):
            assert done.token_ids == truth.greedy(prompt, LENGTH)
            assert done.finish_reason == "length"
            stats = done.stats
            if name == "right":
                assert stats.accepted == stats.proposed
                assert stats.steps == 1 + -(-(LENGTH - 1) // (draft_tokens + 1))  # prefill, then K + 1 a step
            if name == "wrong":
                assert stats.accepted == 0
                assert stats.steps == LENGTH
            if name.startswith("wrong at"):
                assert set(stats.histogram) <= set(range(min(int(name[-1]), draft_tokens) + 1))


@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
def test_rules_agree_at_temperature_0(truth: Oracle, rule: str) -> None:
    """A batch with one sampled request keeps its rule, so greedy rows are verified by each rule's own arithmetic."""
    llm = LLM(toy(), script(truth, "wrong at 2", PROMPTS), draft_tokens=4, rule=rule)
    params = [SamplingParams(max_tokens=LENGTH)] * len(PROMPTS)
    if rule != "greedy":
        params[0] = SamplingParams(max_tokens=LENGTH, temperature=0.7, seed=1)
    done = llm.generate(PROMPTS, params)
    for prompt, completion in list(zip(PROMPTS, done, strict=True))[rule != "greedy" :]:
        assert completion.token_ids == truth.greedy(prompt, LENGTH)


# --- the torch executor, on a tiny random Llama in float64 -----------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(Decoder.load(make_family("llama", tmp_path_factory.mktemp("llama")), "torch", torch.float64, "cpu"))


LLAMA_PROMPTS = [[1, 17, 3], [1], [5, 80, 5, 80, 5, 80, 5], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13]]


@pytest.mark.parametrize("draft_tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["right", "wrong", "replay", "wrong at 0", "wrong at 1", "wrong at 4"])
def test_llama_scripted(llama: Oracle, name: str, draft_tokens: int) -> None:
    for prompts in (LLAMA_PROMPTS, LLAMA_PROMPTS[:1]):
        drafter = script(llama, name, prompts)
        llm = LLM(llama.target, drafter, draft_tokens=draft_tokens)
        done = llm.generate(prompts, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        assert [d.token_ids for d in done] == [llama.greedy(prompt, LENGTH) for prompt in prompts]
