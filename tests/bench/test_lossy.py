"""The distance of a lossy rule is that of the tokens that it emits."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.bench.lossy import Distance, recorded
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.llm import LLM
from tests.drafters.scripted_drafters import RandomDrafter
from tests.targets.toy import ToyTarget

PARAMS = [SamplingParams(temperature=1.0, max_tokens=2, seed=seed, ignore_eos=True) for seed in range(4000)]


def run(drafter, rule="typical", params=PARAMS) -> tuple[LLM, Distance, list[list[int]]]:
    llm = LLM(ToyTarget(vocab=4, sharpness=1.0), drafter, draft_tokens=1, rule=rule, max_batch=512)
    into = Distance()
    llm._rule = recorded(RULES[rule], into)
    return llm, into, [done.token_ids for done in llm.generate([[1, 2]] * len(params), params)]


@pytest.mark.parametrize("sampled", [True, False])
def test_the_distance_is_that_of_the_texts(sampled):
    """Three tokens, of which the second is drafted: the distances per token are a third of the second's, whose
    distribution is counted after each first token."""
    params = [SamplingParams(temperature=1.0, max_tokens=3, seed=s, ignore_eos=True) for s in range(6000)]
    llm, into, texts = run(RandomDrafter(4, sampled=sampled), params=params)
    assert 0 < into.as_dict()["tv"] < 1
    expected = 0.0
    for first in range(4):
        own = [text for text in texts if text[0] == first]
        if not own:
            continue
        p = target_probs(llm, [1, 2, first])
        counted = torch.bincount(torch.tensor([text[1] for text in own]), minlength=4) / len(own)
        expected += len(own) / len(texts) * float((counted - p).abs().sum() / 2)
    if sampled:
        assert into.as_dict()["tv"] * into.tokens / len(texts) == pytest.approx(expected, abs=0.03)
    else:  # with the draft taken as given, an upper bound
        assert into.as_dict()["tv"] * into.tokens / len(texts) >= expected - 0.03


def target_probs(llm: LLM, ids: list[int]) -> torch.Tensor:
    params = SamplingParams(max_tokens=1, logprobs=4, ignore_eos=True)
    top = llm.generate([ids], params)[0].logprobs[0].top
    p = torch.zeros(4, dtype=torch.float64)
    for token, log in top:
        p[token] = math.exp(log)
    return p


def test_greedy_texts_have_no_distance():
    greedy = [SamplingParams(max_tokens=8, ignore_eos=True)]
    _, into, _ = run(RandomDrafter(4, sampled=False), params=greedy)
    assert into.tokens > 0
    assert (into.tv, into.kl) == (0.0, 0.0)


def test_plain_decoding_has_no_distance():
    _, into, _ = run(None)
    assert into.tv == into.kl == 0.0
