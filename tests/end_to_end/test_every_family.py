"""Each family that the native kernels run, through an `LLM`: one text, however it is decoded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.errors import UnsupportedModelError
from tests import tiny_families
from tests.targets.reference import Reference
from tests.tiny_checkpoints import FAMILIES, FAMILY_VOCAB, clone, rewrite

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = [
    [(i * i * 7 + seed * i + seed) % (FAMILY_VOCAB - 5) + 3 for i in range(n)] for seed, n in enumerate((3, 9, 40, 17))
]


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("family", [*FAMILIES, *tiny_families.FAMILIES])
def test_the_text_is_that_of_transformers_alone_in_a_batch_drafted_and_after_a_prefix(
    family: str, checkpoint: Callable[[str], Path], reference: Callable[..., Reference]
) -> None:
    folder, model = checkpoint(family), reference(family, torch.float64)
    llm = LLM(folder, executor="native")
    texts = generate(llm)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        logits = model([prompt + text])[0][len(prompt) - 1 : -1]  # of each token of the text
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() < 1e-4 * logits.abs().max()  # the best one, but for ties
    assert [generate(llm, [prompt])[0] for prompt in PROMPTS] == texts
    for draft, threads in (("ngram", 2), ("suffix", 1)):
        assert generate(LLM(folder, draft, executor="native", draft_tokens=5, threads=threads)) == texts
    engine = llm.engine()
    for prompt, text in [*zip(PROMPTS, texts, strict=True)] * 2:
        seq = Sequence(list(prompt), GREEDY)
        engine.add(seq)
        while engine.unfinished:
            engine.step()
        assert seq.tokens[len(prompt) :] == text


def test_experts_are_chosen_by_scores_whose_sigmoids_are_all_one(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    def sharpen(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if name.endswith("router.weight")]:
            state[name] = state[name].abs() * 20
            state[name.replace("feed_forward.router", "post_attention_layernorm")].abs_()
        state["model.embed_tokens.weight"].abs_()

    folder = rewrite(clone(checkpoint("llama4"), tmp_path / "sharp"), sharpen)
    model, prompt = Reference(folder, torch.float64), PROMPTS[2]
    text = generate(LLM(folder, executor="native"), [prompt])[0]
    logits = model([prompt + text])[0][len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < 1e-4 * logits.abs().max()


@pytest.mark.parametrize("family", [*FAMILIES, *tiny_families.FAMILIES])
@pytest.mark.parametrize("quantize", ["w8a16", "w8a8", "int4"])
def test_drafts_change_no_text_of_quantised_weights(
    family: str, quantize: str, checkpoint: Callable[[str], Path]
) -> None:
    how: dict[str, Any] = {"executor": "native", "quantize": quantize}
    try:
        plain = LLM(checkpoint(family), **how)
    except UnsupportedModelError as refused:
        if "needs a multiple of" not in str(refused):  # a matrix of these tiny models is too narrow for its blocks
            raise
        return
    assert generate(LLM(checkpoint(family), "ngram", draft_tokens=5, **how)) == generate(plain)
