"""Sampled texts of models that transformers runs have their distribution: one model of each kind.

G-tests at a p-value of 1e-6 (`tests.significance.LEVEL`), on the first two tokens."""

import pytest
import torch

from slipstream import LLM, SamplingParams
from tests.end_to_end.sampling import assert_drafted_samples, distribution_after
from tests.targets.huggingface.architectures import ONE_EACH, PACKED, STATEFUL, random_model

PROMPT = [5, 9, 33]
PARAMS = SamplingParams(temperature=0.7, top_k=4, max_tokens=3)
KINDS = {  # samples: a model with a pass for each sequence takes longer
    "gpt-oss": (PACKED, 600),
    "deepseek-v3": (PACKED, 600),
    "bloom": (ONE_EACH, 200),
    "lfm2": (STATEFUL, 200),
}


@pytest.mark.parametrize("name", KINDS)
def test_sampled_texts_have_the_distribution_of_the_model(name: str) -> None:
    table, n = KINDS[name]
    assert name in table
    module = random_model(name)

    def logits(text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return module(torch.tensor([[*PROMPT, *text]]), use_cache=False).logits[:, -1]

    draft = random_model(name)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.1 * parameter.std().nan_to_num() * noise
    llm = LLM(module, draft, draft_tokens=2, max_batch=100)
    assert_drafted_samples(llm, PROMPT, PARAMS, n, distribution_after(logits, PARAMS, 2))
