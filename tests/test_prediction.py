"""Predictions change no distribution, whatever they are made of."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from slipstream.core.drafter import Budget
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.sequence import Sequence, SourcedSequence
from slipstream.drafters.lookups import ReadableText
from slipstream.drafters.registry import make_drafter
from slipstream.engine.messages import RequestSpec
from slipstream.llm import LLM
from tests.enumeration import Branch, enumerate_runs
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

PROMPT = [0, 1, 2, 0]
PARAMS = SamplingParams(temperature=1.0, max_tokens=4)


def toy() -> ToyTarget:
    return ToyTarget(5, order=2, seed=21, sharpness=1.0)


def sure(seed: int = 3) -> ToyTarget:
    """Of many ids, and nearly deterministic."""
    return ToyTarget(300, order=3, seed=seed, sharpness=9.0)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens)


def seeded(seed: int) -> SamplingParams:
    return replace(PARAMS, seed=seed)


def decoded(llm: LLM, asks: list[RequestSpec], streams: Seq[Stream] = ()) -> list[Sequence]:
    """streams: instead of those of their seeds."""
    engine, seqs = llm.engine(), []
    for i, ask in enumerate(asks):
        prepared = llm.prepare(ask)
        if streams:
            streams[i].nonce, prepared.seq.random = prepared.seq.random.nonce, streams[i]
        seqs.append(prepared.seq)
        engine.add(prepared.seq, prepared.rule, prepared.draft_tokens)
    while engine.unfinished:
        engine.step()
    return seqs


@pytest.mark.parametrize("same", [False, True], ids=["as it is", "control: with the same numbers for both"])
def test_a_prediction_that_the_same_seed_made_keeps_the_distribution(same: bool, monkeypatch) -> None:
    """Its tokens were drawn with the request's own random numbers. All numbers of both requests are enumerated."""
    target, prompt = ToyTarget(2, order=2, seed=21, sharpness=1.0), [0, 1, 0, 0]
    if same:
        monkeypatch.setattr(Branch, "nonce", property(lambda branch: 0, lambda branch, nonce: None))

    def run(branches: list[Branch]) -> list[Sequence]:
        llm = LLM(target, max_batch=len(branches), draft_tokens=4)
        first = decoded(llm, [RequestSpec(prompt, PARAMS)] * len(branches), branches)
        return decoded(llm, [RequestSpec(prompt, PARAMS, prediction=seq.output) for seq in first], branches)

    (texts,) = enumerate_runs(run, Branch())
    assert texts.accepted > 0.5
    error = texts.error(Oracle(target), prompt, PARAMS)
    assert error > 0.05 if same else error < 1e-9


def test_a_seeded_request_with_a_prediction_repeats_its_text() -> None:
    llm = LLM(toy(), draft_tokens=4)
    texts = [decoded(llm, [RequestSpec(PROMPT, seeded(3), prediction=(4, 3, 2))])[0].output for _ in range(2)]
    assert texts[0] == texts[1]


def test_under_coupled_a_prediction_does_not_change_the_text() -> None:
    llm = LLM(toy(), rule="coupled", draft_tokens=4)
    asks = [RequestSpec(PROMPT, seeded(3)), RequestSpec(PROMPT, seeded(3), prediction=(4, 3, 2))]
    asks.append(RequestSpec(PROMPT, seeded(3), "coupled", (1, 1)))
    assert len({tuple(seq.output) for seq in decoded(llm, asks)}) == 1


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_the_beginning_of_a_prediction_is_drafted_at_once(name: str) -> None:
    """Behind the end of the prompt, although nothing of it has been decoded yet."""
    seq = Sequence([0, 1, 2, 3], prediction=(4, 3, 2, 1))
    draft = make_drafter(name, toy()).propose([seq], [Budget(4)])
    assert draft.tokens.tolist() == [4, 3, 2, 1]


def test_lookup_drafters_read_the_source_then_the_prediction_then_the_tokens_so_far() -> None:
    seq = SourcedSequence([0, 1, 2, 3], prediction=(4, 3), source=(9, 8))
    text = ReadableText(seq)
    before = [0, 1, 2, 3, 9, 8, 0, 1, 2, 3, 4, 3]
    for gained in ([], [5], [], [6, 7]):
        seq.tokens += gained
        assert text.ids == [*before, *seq.tokens]
    alone = Sequence([0, 1])
    text = ReadableText(alone)
    alone.tokens += [2]
    assert text.ids == [0, 1, 2]


@pytest.mark.parametrize("name", ["ngram", None])
def test_a_drafter_in_use_that_looks_up_texts_reads_predictions_itself(name: str | None) -> None:
    llm = LLM(toy(), draft=name, draft_tokens=4)
    (seq,) = decoded(llm, [RequestSpec(PROMPT, PARAMS, prediction=(4, 3, 2))])
    assert set(seq.proposers) <= {name or "suffix", None}


def test_with_a_draft_model_the_prediction_is_copied_first_and_the_model_goes_on_where_it_ends() -> None:
    """The text leaves the prediction in the middle, and comes back to it."""
    llm = LLM(sure(), sure(), draft_tokens=4)
    (plain,) = decoded(llm, [RequestSpec(PROMPT, greedy(24))])
    changed = [*plain.output[:10], 299, 298, *plain.output[12:]]
    (seq,) = decoded(llm, [RequestSpec(PROMPT, greedy(24), prediction=changed)])
    assert seq.output == plain.output
    assert {"suffix", "model"} <= set(seq.proposers)
    assert seq.stats.steps < plain.stats.steps


def test_the_model_behind_a_prediction_is_the_one_in_use() -> None:
    llm = LLM(sure(), sure(4), draft_tokens=4)
    ask = RequestSpec(PROMPT, greedy(16), prediction=(39, 38, 37))
    (before,) = decoded(llm, [ask])
    llm.use(sure())
    (after,) = decoded(llm, [ask])
    assert before.output == after.output
    assert after.stats.accepted > 8 > before.stats.accepted


def test_draft_lengths_of_predictions_are_chosen_if_those_of_others_are() -> None:
    llm = LLM(toy())
    ask = RequestSpec(PROMPT, PARAMS, prediction=(4, 3, 2))
    assert llm.prepare(ask).draft_tokens == 16
    assert llm.engine().draft_tokens == 0, "without a drafter, only predictions and forced texts are drafted"
    llm.draft_tokens = 4
    assert llm.prepare(ask).draft_tokens == 10


def test_requests_with_and_without_predictions_draft_in_one_step() -> None:
    """Each decodes what it decodes alone, under greedy decoding."""
    llm, ask = LLM(sure(), sure(), draft_tokens=4), RequestSpec(PROMPT, greedy(24))
    (plain,) = decoded(llm, [ask])
    off = replace(ask, params=replace(ask.params, draft_tokens=0))
    without, predicted, off = decoded(llm, [ask, replace(ask, prediction=plain.output), off])
    assert without.output == predicted.output == off.output == plain.output
    assert set(without.proposers) == {"model", None}
    assert "suffix" in predicted.proposers
    assert not off.stats.proposed
