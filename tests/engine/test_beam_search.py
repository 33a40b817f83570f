"""Beam search over targets: the texts and scores of transformers, and what is held meanwhile."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from slipstream import LLM, BeamParams, SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.engine.beam_search import BeamSearch, Search
from slipstream.errors import ParameterError, PromptError, TargetError
from slipstream.targets.describe import as_target
from tests.engine.paged_toy import PagedToy
from tests.targets.huggingface.architectures import VOCAB, random_model
from tests.targets.reference import Wide
from tests.tiny_checkpoints import random_llama

PROMPTS = [[5, 9, 33], [7, 8, 9, 10, 11, 12, 13], [40]]
TOKENS = 9


@functools.cache
def module(name: str) -> Any:
    """A tiny random model in float64 whose texts often end early."""
    if name == "llama":
        llama = random_llama(vocab_size=VOCAB, hidden_size=32, eos_token_id=2).double()
    elif name == "gpt2":
        llama = random_gpt2()
    else:
        llama = random_model(name)
    llama.generation_config.pad_token_id = 0
    return llama


@torch.random.fork_rng(devices=[])
def random_gpt2() -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.25, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double().eval()


@functools.cache
def target(name: str) -> Target:
    return as_target(module(name))


def by_transformers(name: str, beams: int, n: int, eos: list[int] | None, **how: Any) -> list[tuple[Any, ...]]:
    """(tokens, score) of the n best texts of each prompt, in float64."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    with Wide():
        out = module(name).generate(
            ids, attention_mask=mask, num_beams=beams, num_return_sequences=n, max_new_tokens=TOKENS, do_sample=False,
            eos_token_id=eos, return_dict_in_generate=True, output_scores=True, **how,
        )  # fmt: skip
    beams_of_prompts = []
    for row, score in zip(out.sequences[:, width:].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in (eos or ())), len(row))
        beams_of_prompts.append((row[:end], score))
    return beams_of_prompts


def ours(name: str, beams: int, n: int, eos: list[int] | None, **how: Any) -> list[tuple[Any, ...]]:
    params = BeamParams(
        beams=beams, n=n, max_tokens=TOKENS, ignore_eos=True, stop_token_ids=eos or [],
        **{{"min_new_tokens": "min_tokens"}.get(key, key): value for key, value in how.items()},
    )  # fmt: skip
    searched = LLM(target(name)).beam_search(PROMPTS, params)
    return [(beam.token_ids, beam.score) for beams_of_prompt in searched for beam in beams_of_prompt]


def frequent(name: str) -> int:
    """A token that ends texts early: the most probable one after the first prompt."""
    with torch.no_grad():
        return int(module(name)(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax())


@pytest.mark.parametrize(
    ("name", "beams", "n", "more_ends", "how"),
    [
        (name, 4, 3, (), {"length_penalty": penalty, "early_stopping": early})
        for name, penalty in (("llama", -1.0), ("llama", 0.0), ("llama", 2.0), ("gpt2", 2.0))
        for early in (True, False, "never")
    ]
    + [
        (name, n, n, (2, 17), {"min_new_tokens": 3, "early_stopping": "never"})
        for name, n in (("llama", 2), ("gpt2", 7))
    ]
    + [("gpt2", 4, 4, None, {}), ("stablelm", 4, 4, (), {}), ("bloom", 4, 4, (), {})],
)
def test_texts_and_scores_are_those_of_transformers(name, beams, n, more_ends, how):
    """more_ends: None: texts never end. Code of transformers computes norms and softmax of some models in float32."""
    eos = None if more_ends is None else [frequent(name), *more_ends]
    actual, wanted = ours(name, beams, n, eos, **how), by_transformers(name, beams, n, eos, **how)
    assert [text for text, _ in actual] == [text for text, _ in wanted]
    tolerance = 1e-6 if name in ("stablelm", "bloom") else 1e-9
    assert [score for _, score in actual] == pytest.approx([score for _, score in wanted], abs=tolerance)


def test_a_model_with_states_finds_what_a_forward_of_each_whole_text_finds() -> None:
    """Its own beam search reorders a cache that depends on the version of transformers."""
    name, prompt = "lfm2", PROMPTS[0]
    params = BeamParams(beams=3, n=3, max_tokens=5, ignore_eos=True, stop_token_ids=[frequent(name)])
    search = Search(Sequence(prompt, context=128), params, frozenset({frequent(name)}))
    while not search.beams.done:
        texts = [[*prompt, *one.output] for one in search.beams.running]
        with torch.no_grad():
            search.beams.advance(module(name)(torch.tensor(texts), use_cache=False).logits[:, -1])
    result = LLM(target(name)).beam_search([prompt], params)[0]
    assert [beam.token_ids for beam in result] == [beam.token_ids for beam in search.beams.best()]


def test_each_prompt_is_searched_as_if_it_were_alone() -> None:
    params = BeamParams(beams=3, n=3, max_tokens=8, stop_token_ids=[frequent("llama")])
    alone = [LLM(target("llama")).beam_search([prompt], params)[0] for prompt in PROMPTS]
    for order, most in (([0, 1, 2], 2), ([2, 0, 1], 8)):
        results = LLM(target("llama"), max_batch=most).beam_search([PROMPTS[i] for i in order], params)
        for i, beams in zip(order, results, strict=True):
            assert [beam.token_ids for beam in beams] == [beam.token_ids for beam in alone[i]]


def searched(toy: PagedToy, prompts: list[list[int]], params: BeamParams, most: int = 8) -> tuple[Any, list[Search]]:
    searches = [Search(Sequence(prompt, context=toy.context), params, toy.eos_ids) for prompt in prompts]
    return BeamSearch(toy, most).run(searches), searches


TEXTS = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [3, 1], [4, 5, 6, 7, 0]]


def test_all_beams_of_all_prompts_are_one_forward_and_no_token_is_computed_twice() -> None:
    toy = PagedToy(vocab=8, sharpness=1.0)
    rows = []
    steps, _ = searched(toy, TEXTS, BeamParams(beams=4, max_tokens=9))
    for i, _ in enumerate(steps, 1):
        assert toy.runs == i
        rows.append(toy.rows)
    assert rows[0] == sum(map(len, TEXTS))
    assert set(rows[1:]) == {4 * len(TEXTS)}
    assert len(rows) == 9


@pytest.mark.parametrize("length", [3, 4, 9])
def test_beams_share_the_blocks_of_their_common_text(length: int) -> None:
    """Blocks of 4 slots. After each step, at most the bound that searches are admitted by."""
    toy = PagedToy(vocab=8, sharpness=1.0, block=4)
    steps, (search,) = searched(toy, [(TEXTS[0] * 2)[:length]], BeamParams(beams=3, max_tokens=11))
    for _ in steps:
        toy.check()
        blocks = {block for table in toy.pool.tables.values() for block in table}
        assert len(blocks) <= search.blocks(toy.memory)
        assert len(toy.pool.tables) == (0 if search.beams.done else len(search.seqs))
        if length >= 4 and not search.beams.done:
            assert len(blocks) < sum(map(len, toy.pool.tables.values()))
    assert not toy.pool.tables


def test_nothing_is_held_after_a_search_that_was_cut_short_or_failed() -> None:
    for after in (1, 2, 5):
        toy = PagedToy(vocab=8, sharpness=1.0)
        steps, _ = searched(toy, TEXTS, BeamParams(beams=4, max_tokens=9), most=2)
        for _ in range(after):
            next(steps)
        assert toy.pool.tables
        steps.close()
        assert not toy.pool.tables
        assert toy.pool.allocated == 0
    toy = PagedToy(vocab=8, sharpness=1.0, faulty=5)
    steps, _ = searched(toy, [[1, 2], [3, 4]], BeamParams(beams=4, max_tokens=20))
    with pytest.raises(TargetError, match="token 5 is pending"):
        list(steps)
    assert toy.pool.allocated == 0


def test_a_cache_of_fixed_size_is_enough_for_one_prompt_after_the_other() -> None:
    params = BeamParams(beams=3, n=3, max_tokens=9)
    wide = PagedToy(vocab=8, sharpness=1.0)
    free, plain = searched(wide, TEXTS, params)
    list(free)
    need = max(search.blocks(wide.memory) for search in plain)
    tight = PagedToy(vocab=8, sharpness=1.0, blocks=need)
    steps, searches = searched(tight, TEXTS, params)
    for _ in steps:
        tight.check()
    assert [search.beams.best() for search in searches] == [search.beams.best() for search in plain]
    with pytest.raises(TargetError, match=f"may need {need} KV blocks, but the KV cache has {need - 1}"):
        next(searched(PagedToy(vocab=8, blocks=need - 1), TEXTS, params)[0])


def test_a_target_without_fork_is_refused() -> None:
    class Unforked(PagedToy):
        @property
        def capabilities(self) -> Any:
            return replace(super().capabilities, fork=None)

    with pytest.raises(ParameterError, match="Unforked, which cannot fork"):
        LLM(Unforked(vocab=8)).beam_search([[1]])


def test_wrong_requests_and_drafters_are_refused_and_draft_length_0_is_none() -> None:
    llm = LLM(target("llama"), "ngram")
    with pytest.raises(ParameterError, match="drafter 'ngram'"):
        llm.beam_search(PROMPTS)
    llm.draft_tokens = 0
    assert llm.beam_search(PROMPTS[:1], BeamParams(max_tokens=2))[0][0].token_ids
    llm.use(None)
    assert llm.beam_search(PROMPTS[:1], BeamParams(max_tokens=2))[0][0].token_ids
    llm = LLM(target("llama"))
    with pytest.raises(ParameterError, match="SamplingParams"):
        llm.beam_search(PROMPTS, SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=f"contains id {VOCAB}"):
        llm.beam_search(PROMPTS, BeamParams(stop_token_ids=[VOCAB]))
    with pytest.raises(PromptError, match="empty"):
        llm.beam_search([[]])
    assert llm.beam_search([]) == []
