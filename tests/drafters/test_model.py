"""The draft-model drafter: its shadow cache, its q, its stopping, its vocabulary. `ToyTarget` plays the draft model
too, so every wrong rollback of the shadow fails by name."""

from __future__ import annotations

import logging

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.drafters.model import ModelDraftConfig, ModelDrafter
from slipstream.errors import ParameterError
from slipstream.targets.toy import ToyTarget

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1]]


def drafter(model: ToyTarget, vocab: int = 8, **options: float) -> ModelDrafter:
    return ModelDrafter(model, vocab, ModelDraftConfig(**options))


@pytest.mark.parametrize("k", range(1, 9))
def test_R7_a_draft_model_equal_to_the_target_is_always_right_at_every_draft_length(k: int) -> None:
    params = SamplingParams(max_tokens=41)
    plain = LLM(ToyTarget(seed=1)).generate(PROMPTS, params)
    llm = LLM(ToyTarget(seed=1), drafter(ToyTarget(seed=1)), draft_tokens=k)
    done = llm.generate(PROMPTS, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert all(c.stats.acceptance_rate == 1 for c in done)
    assert done[0].stats.rounds == 1 + -(-40 // (k + 1))  # prefill, then k + 1 tokens a round


def test_the_shadow_cache_survives_rollbacks_of_differing_depth_in_ragged_batches() -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5)
    llm = LLM(ToyTarget(seed=1), drafter(ToyTarget(seed=2, sharpness=1.0)), draft_tokens=5, max_batch=2)
    done = llm.generate(PROMPTS, params)
    assert sum(c.stats.drafter_faults for c in done) == 0
    assert len(done[0].stats.histogram) > 2  # runs of several lengths were accepted


def test_a_request_draws_the_same_text_alone_and_in_a_batch() -> None:
    def texts(max_batch: int) -> list[list[int]]:
        llm = LLM(ToyTarget(seed=1), drafter(ToyTarget(seed=2)), max_batch=max_batch)
        return [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(temperature=1.0, seed=3))]

    assert texts(1) == texts(3)


def test_q_is_the_law_that_each_guess_was_sampled_from() -> None:
    model = ToyTarget(seed=2)
    seq = Sequence([1, 2], SamplingParams(temperature=0.7, top_k=3, seed=0))
    draft = drafter(model).propose([seq], [3])
    text = [1, 2]
    for i, token in enumerate(draft.ids):
        x = torch.softmax(model.logits(text) / 0.7, -1)
        kept = torch.zeros(8, dtype=torch.float64).scatter(0, x.topk(3).indices, x.topk(3).values)
        assert draft.q is not None
        torch.testing.assert_close(draft.q[i], kept / kept.sum())
        assert draft.q[i, token] > 0
        text.append(token)


def test_confidence_keeps_the_guess_that_made_it_fall() -> None:
    model = ToyTarget(seed=2, sharpness=1.0)
    for seed in range(20):
        seq = Sequence([1, 2], SamplingParams(temperature=1.0, seed=seed))
        draft = drafter(model, confidence=0.2).propose([seq], [8])
        assert draft.q is not None
        sure = draft.q.gather(1, draft.tokens[:, None])[:, 0].cumprod(0).tolist()
        assert all(p >= 0.2 for p in sure[:-1])
        assert sure[-1] < 0.2 or len(sure) == 8


def test_confidence_is_measured_at_temperature_0_too() -> None:
    unsure, sure = ToyTarget(seed=2, sharpness=0.1), ToyTarget(seed=2, sharpness=50.0)
    seq = Sequence([1, 2], SamplingParams())
    assert len(drafter(unsure, confidence=0.5).propose([seq], [6])) == 1
    assert len(drafter(sure, confidence=0.5).propose([seq], [6])) == 6


@pytest.mark.parametrize("width", [6, 11])
def test_padded_vocabularies_of_the_draft_model_are_cut_or_filled_up(width: int) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    llm = LLM(ToyTarget(seed=1), drafter(ToyTarget(vocab=width, seed=2, sharpness=0.5)))
    prompts = [[1, 2, 3], [4]]
    done = llm.generate(prompts, params)
    assert all(t < 8 for c in done for t in c.token_ids)
    if width > 8:
        assert sum(c.stats.drafter_faults for c in done) == 0


def test_drafting_stops_at_the_draft_models_context_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=40)
    plain = LLM(ToyTarget(seed=1)).generate(PROMPTS, params)
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        done = LLM(ToyTarget(seed=1), drafter(ToyTarget(seed=1, context=16))).generate(PROMPTS, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert sum(c.stats.drafter_faults for c in done) == 0
    assert sum("context of 16 tokens" in r.message for r in caplog.records) == 1


def test_released_sequences_leave_nothing_behind() -> None:
    model = ToyTarget(seed=2)
    mine = drafter(model)
    LLM(ToyTarget(seed=1), mine).generate(PROMPTS, SamplingParams(max_tokens=9))
    assert not mine._shadows
    assert not model._slots


@pytest.mark.parametrize("confidence", [-0.1, 1.0, float("nan")])
def test_impossible_confidence_is_refused(confidence: float) -> None:
    with pytest.raises(ParameterError, match="confidence"):
        ModelDraftConfig(confidence=confidence)


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ParameterError, match="did you mean 'confidence'"):
        ModelDraftConfig(confidance=0.5)  # type: ignore[call-arg]


def test_the_end_of_a_text_compiles_no_further_unrolled_graph() -> None:
    class Unrolled(ToyTarget):
        asked: set[int] = set()  # noqa: RUF012

        def greedy_chains(self, seqs: list[Sequence], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.asked.add(steps)
            rows, scores = [], []
            for seq in seqs:
                text, logits = list(seq.tokens), []
                for _ in range(steps):
                    logits.append(self.logits(text))
                    text.append(int(logits[-1].argmax()))
                rows.append(text[len(seq.tokens) :])
                scores.append(torch.stack(logits))
                self._slots[seq.id] = text[:-1]
            return torch.tensor(rows).T, torch.stack(scores, 1)

    model = Unrolled(seed=2, sharpness=1.0)
    params = SamplingParams(max_tokens=40)
    done = LLM(ToyTarget(seed=1), drafter(model), draft_tokens=5).generate(PROMPTS, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in LLM(ToyTarget(seed=1)).generate(PROMPTS, params)]
    assert sum(c.stats.drafter_faults for c in done) == 0
    assert model.asked == {5}
