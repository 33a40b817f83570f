"""The draft-model drafter: its KV cache, its q, when it stops, its vocabulary. The draft model is a `ToyTarget`, which
detects every wrong rollback."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.drafter import Budget
from slipstream.core.random import Stream
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import decide
from slipstream.core.warp import warp
from slipstream.drafters.model import ModelDrafter
from slipstream.errors import ConfigError
from slipstream.targets.decoder import Decoder
from tests.drafters.fakes import MultiStepToy
from tests.end_to_end.sampling import hurry
from tests.enumeration import Branch, enumerate_runs
from tests.oracle import Oracle, joint_distribution
from tests.significance import LEVEL, g_test
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import random_llama, rewrite

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1]]
SMALL = {
    "vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "initializer_range": 0.3,
    "max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def drafter(model: ToyTarget, vocab: int = 8) -> ModelDrafter:
    return ModelDrafter(model, vocab)


@pytest.mark.parametrize("k", range(1, 9))
def test_a_draft_model_equal_to_the_target_is_always_right_at_every_draft_length(k: int) -> None:
    params = SamplingParams(max_tokens=41)
    plain = LLM(ToyTarget(seed=1), draft_tokens=4).generate(PROMPTS, params)
    llm = LLM(ToyTarget(seed=1), drafter(ToyTarget(seed=1)), draft_tokens=k)
    done = llm.generate(PROMPTS, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert all(c.stats.acceptance_rate == 1 for c in done)
    assert done[0].stats.steps == 1 + -(-40 // (k + 1))  # prefill, then k + 1 tokens a step


def test_drafting_stops_at_the_draft_models_context_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=40)
    plain = LLM(ToyTarget(seed=1), draft_tokens=4).generate(PROMPTS, params)
    done = LLM(ToyTarget(seed=1), drafter(ToyTarget(seed=1, context=16)), draft_tokens=4).generate(PROMPTS, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert sum(c.stats.drafter_faults for c in done) == 0
    assert sum("context of 16 tokens" in r.message for r in caplog.records) == 1


def proposed(model: ToyTarget, n: int, params: SamplingParams, k: int = 2, coupled: bool = False) -> Counter:
    """How often each chain is drafted for n sequences of one text, with the random streams 0..n-1."""
    seqs = [
        Sequence([1, 2], params, stream=Stream(i), rule=RULES["coupled" if coupled else "rejection"]) for i in range(n)
    ]
    with hurry():
        draft = drafter(model).propose(seqs, [Budget(k)] * n)
    return Counter(tuple(draft.ids[draft.splits[b] : draft.splits[b + 1]]) for b in range(n))


@pytest.mark.parametrize("in_one_call", [True, False])
def test_sampled_chains_have_the_distribution_of_the_model_in_one_call_and_token_by_token(in_one_call: bool) -> None:
    """By enumeration, up to float32. Where it picked another token, a chain ends with the right one."""
    model, params = MultiStepToy(seed=2), SamplingParams(temperature=0.8)
    model.in_one_call = in_one_call

    def run(branches: list[Branch]) -> list[Sequence]:
        seqs = [Sequence([1, 2], params, stream=branch) for branch in branches]
        draft = drafter(model).propose(seqs, [Budget(2)] * len(seqs))
        for b, seq in enumerate(seqs):
            seq.tokens += draft.ids[draft.splits[b] : draft.splits[b + 1]]
        return seqs

    (texts,) = enumerate_runs(run, Branch())
    assert texts.error(Oracle(ToyTarget(seed=2)), [1, 2], params) < 1e-7
    assert bool(model.asked) == in_one_call


def test_a_pick_that_rounding_changed_ends_the_chain_with_the_right_token() -> None:
    """Every third pick of the call is wrong. The first draft token keeps its distribution, as does the second where
    there is one."""
    params, n = SamplingParams(temperature=0.8), 8000
    model, oracle = MultiStepToy(seed=2), Oracle(ToyTarget(seed=2))
    model.clumsy = 3
    chains = proposed(model, n, params)
    first, pairs = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for chain, count in chains.items():
        first[chain[:1]] += count
        if len(chain) == 2:
            pairs[chain] += count
    assert 0 < pairs.total() < n
    assert g_test(first, joint_distribution(oracle, [1, 2], params, length=1)) >= LEVEL
    assert g_test(pairs, joint_distribution(oracle, [1, 2], params, length=2)) >= LEVEL


@pytest.mark.parametrize("coupled", [True, False])
def test_in_one_call_and_token_by_token_the_same_numbers_draw_the_same_tokens(coupled: bool) -> None:
    params = SamplingParams(temperature=0.8)
    one_call, stepwise = MultiStepToy(seed=2), MultiStepToy(seed=2)
    stepwise.in_one_call = False
    assert proposed(one_call, 300, params, 4, coupled=coupled) == proposed(stepwise, 300, params, 4, coupled=coupled)


def test_under_coupled_similar_distributions_pick_the_same_tokens() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=200, seed=3)
    llm = LLM(ToyTarget(seed=2), drafter(MultiStepToy(seed=2)), rule="coupled", draft_tokens=4)
    assert llm.generate([[1, 2]], params)[0].stats.acceptance_rate == 1


@pytest.mark.parametrize("exact", [False, True])
def test_q_and_draft_tokens_of_a_sequence_are_the_same_for_any_batch(exact, monkeypatch):
    """Temperatures, filters and greedy requests in one batch: one call where possible, single steps for the others."""
    monkeypatch.setattr(MultiStepToy, "exact", exact)
    each = [
        SamplingParams(temperature=0.5, seed=1), SamplingParams(temperature=2.0, seed=2), SamplingParams(),
        SamplingParams(temperature=1.0, top_k=2, seed=3),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=4), SamplingParams(temperature=1e-40, seed=5),
    ]  # fmt: skip
    text = [1, 2, 5]
    seqs = [Sequence(text, params) for params in each]
    draft = drafter(MultiStepToy(seed=2)).propose(seqs, list(map(Budget, (4, 2, 3, 4, 1, 4))))
    for b, params in enumerate(each):
        alone = drafter(MultiStepToy(seed=2)).propose([Sequence(text, params)], [Budget((4, 2, 3, 4, 1, 4)[b])])
        nodes = slice(draft.splits[b], draft.splits[b + 1])
        assert draft.ids[nodes] == alone.ids
        so_far = list(text)
        for i in draft.nodes(b):
            raw = ToyTarget(seed=2).logits(so_far)[None].float()  # as the call computes them
            probs = warp(raw, params, text, [so_far[3:]])[0]
            torch.testing.assert_close(draft.q[i], probs, rtol=1e-5, atol=1e-7)
            so_far.append(draft.ids[i])


def test_a_sequence_at_the_end_of_the_context_does_not_shorten_other_drafts() -> None:
    model = MultiStepToy(seed=2, context=10)
    seqs = [Sequence([1, 2] * 4, SamplingParams()), Sequence([3], SamplingParams())]
    draft = drafter(model).propose(seqs, [Budget(5)] * 2)
    assert list(draft.splits) == [0, 2, 7]
    assert model.asked == {2, 5}


def masked(folder: Path) -> Any:
    """A checkpoint in `folder` whose config.json has `pard_token` 11, and the model of transformers."""
    model = random_llama(6, **SMALL).double()
    model.save_pretrained(folder)
    rewrite(folder, pard_token=11)
    return model


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_a_model_with_a_mask_token_drafts_in_one_pass_what_transformers_gives_in_those_places(tmp_path, executor):
    """PARD (2504.18583): after the text come K - 1 mask tokens; the last K places give the draft tokens. A batch, and
    the steps after accepted and rejected drafts."""
    exact = masked(tmp_path)
    model = Decoder.load(tmp_path, executor, "float64" if executor == "torch" else None)
    world = Decoder.of_module(random_llama(6, **SMALL), LoadSettings(executor="torch", dtype="float64"))
    drafter = ModelDrafter(model, 12)
    seqs = [Sequence(text, SamplingParams(max_tokens=40)) for text in PROMPTS]
    runs, accepted = [], 0
    monkey = model.run
    model.run = lambda *a, **k: runs.append(1) or monkey(*a, **k)  # type: ignore[method-assign]
    for depth in (4, 1, 5, 3):
        runs.clear()
        draft = drafter.propose(seqs, [Budget(depth)] * 3)
        assert runs == [1]
        for b, seq in enumerate(seqs):
            with torch.no_grad():
                logits = exact(torch.tensor([seq.tokens + [11] * (depth - 1)])).logits[0]
            assert [draft.ids[i] for i in draft.nodes(b)] == logits[-depth:].argmax(-1).tolist()
        out = world.run(seqs, draft)
        verdict = decide(seqs, draft, out.logits, RULES["rejection"])
        world.commit(seqs, verdict.path)
        for b, seq in enumerate(seqs):
            seq.advance(verdict, draft, b)
            accepted += len(verdict.path[b])
        drafter.observe(seqs, draft, out, verdict)
    assert accepted > 0


def test_a_mask_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    masked(tmp_path)
    rewrite(tmp_path, pard_token=12)
    with pytest.raises(ConfigError, match=r"pard_token is 12, but the vocabulary has the ids 0\.\.11"):
        Decoder.load(tmp_path)
