"""Bugs of other systems, each with the test that would have found it, end to end through `LLM`.

R-numbers and issue numbers are those of the project's list of known bugs. R7 on a real model is in `test_greedy.py`;
the same bugs within one step are in `tests/core`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter, DrafterTraits
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.core.warp import warp
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import NgramConfig, NgramDrafter
from slipstream.llm import LLM, Completion
from tests.drafters.scripted_drafters import RandomDrafter, Script, ScriptedDrafter, right, wrong, wrong_at
from tests.end_to_end.sampling import sample
from tests.oracle import Oracle, joint_distribution
from tests.significance import LEVEL, beginnings, g_test
from tests.targets.toy import ToyTarget

V = 6
PROMPT = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
TRUTH = Oracle(ToyTarget(V, order=4, seed=3))
GREEDY = TRUTH.greedy(PROMPT, 40)


def target(eos_ids: Seq[int] = (), sharpness: float = 2.0) -> ToyTarget:
    return ToyTarget(V, order=4, seed=3, eos_ids=eos_ids, sharpness=sharpness)


def scripted(how: Script = right, text: Seq[int] = GREEDY) -> ScriptedDrafter:
    return ScriptedDrafter({tuple(PROMPT): list(text)}, V, how)


def one(drafter: Drafter | None, params: SamplingParams, k: int = 4, rule: str = "rejection") -> Completion:
    return LLM(target(), drafter, draft_tokens=k, rule=rule).generate(PROMPT, params)[0]


@pytest.mark.parametrize("at", range(12))
def test_r01_eos_inside_an_accepted_run_ends_the_text(at: int) -> None:
    """transformers 47912: generation continued after an EOS that was accepted in the middle of a draft."""
    stop = GREEDY[at]
    done = one(scripted(), SamplingParams(max_tokens=40, stop_token_ids=(stop,)))
    assert done.token_ids == GREEDY[: GREEDY.index(stop) + 1]
    assert (done.finish_reason, done.stop_cause) == ("stop", stop)


@pytest.mark.parametrize("cap", range(1, 12))
def test_r02_stop_and_cap_in_one_step(cap: int) -> None:
    """sglang 31599: a stop among accepted tokens was hidden by the length limit, and the tokens after it were kept."""
    stop = GREEDY[5]
    first = GREEDY.index(stop) + 1
    done = one(scripted(), SamplingParams(max_tokens=cap, stop_token_ids=(stop,), logprobs=0), k=8)
    assert done.token_ids == GREEDY[: min(cap, first)]
    assert done.finish_reason == ("stop" if first <= cap else "length")
    assert done.logprobs is not None
    assert len(done.logprobs) == len(done.drafted) == done.stats.tokens == len(done.token_ids)


@pytest.mark.parametrize("k", [1, 4, 9])
@pytest.mark.parametrize("drafter", [NgramDrafter(), scripted()], ids=["ngram", "scripted"])
def test_r03_max_tokens_is_never_exceeded_and_eos_may_be_absent(drafter: Drafter, k: int) -> None:
    """transformers 46993, 46790: prompt lookup went past max_new_tokens, and crashed without an EOS."""
    for cap in range(1, k + 3):
        done = one(drafter, SamplingParams(max_tokens=cap), k)
        assert done.token_ids == GREEDY[:cap]
        assert done.finish_reason == "length"


def test_r04_an_eos_of_the_draft_alone_ends_nothing() -> None:
    """OpenVINO GenAI 3293: the draft's EOS finished the sequence though the target had rejected it."""
    eos = next(t for t in range(V) if t not in GREEDY[:10])
    text = [*GREEDY[:2], eos, *GREEDY[3:]]
    done = LLM(target(eos_ids=(eos,)), scripted(text=text), draft_tokens=4).generate(
        PROMPT, SamplingParams(max_tokens=10)
    )[0]
    assert done.token_ids == GREEDY[:10]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.6, max_tokens=30),
        SamplingParams(temperature=1.0, top_k=2, max_tokens=30),
        SamplingParams(temperature=1.0, top_p=0.6, min_p=0.1, max_tokens=30),
        SamplingParams(temperature=1.0, frequency_penalty=1.0, logit_bias={2: 2.0}, max_tokens=30),
    ],
)
def test_r05_q_is_the_distribution_that_was_drafted_from(params: SamplingParams) -> None:
    """transformers 32867, 47932: the draft was sampled after one filter and reported after another (or none). Every
    reported row must be the draft model's distribution after *this request's* filters and history; that the output then
    has the target's distribution is tested in `test_distribution.py`, drafter by drafter."""
    model = ToyTarget(V, order=2, seed=9)
    drafter = ModelDrafter(model, V)
    seen: list[tuple[list[int], list[int], torch.Tensor]] = []

    class Spy(ModelDrafter):
        def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
            draft = super().propose(seqs, budget)
            if len(draft):
                assert draft.q is not None
                seen.append((seqs[0].output, draft.ids, draft.q))
            return draft

    drafter = Spy(model, V)
    one(drafter, SamplingParams(**{**params.__dict__, "seed": 4}))
    assert len(seen) > 5
    for output, ids, q in seen:
        for i, token in enumerate(ids):
            so_far = [*output, *ids[:i]]
            probs = warp(model.logits([*PROMPT, *so_far])[None], params, PROMPT, [so_far])[0]
            torch.testing.assert_close(q[i], probs)
            assert q[i, token] > 0


def test_r06_many_siblings_keep_the_distribution() -> None:
    """EAGLE 50, 183: whether siblings with q = 1, removed one by one, are exact. Up to 4 point masses at one place, to
    depth two; sampled siblings are in `test_distribution.py`. G-test, n = 20000."""
    drafter = NgramDrafter(NgramConfig(branches=4, forks=2))
    params = SamplingParams(temperature=1.0, max_tokens=4)
    flat = target(sharpness=0.7)
    seqs = sample(LLM(flat, drafter, draft_tokens=2, max_batch=20_000), PROMPT, params, 20_000, seed=5)
    assert max(seq.stats.proposed for seq in seqs) >= 5
    p = g_test(beginnings(seq.output for seq in seqs), joint_distribution(Oracle(flat), PROMPT, params))
    assert p >= LEVEL, f"p = {p:.1e}"


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_r08_rejection_at_every_position_of_the_draft(k: int) -> None:
    """OpenVINO GenAI 4190: a rejection was handled one step late, and a rejected last draft token crashed. Sampled:
    under `coupled` the text is known beforehand, so a scripted drafter can be wrong at each position."""
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=11)
    text = one(None, params, rule="coupled").token_ids
    for j in range(k):
        done = one(scripted(wrong_at(j), text), params, k, rule="coupled")
        assert done.token_ids == text
        assert set(done.stats.histogram) <= set(range(j + 1))
        greedy = one(scripted(wrong_at(j)), SamplingParams(max_tokens=30), k)
        assert greedy.token_ids == GREEDY[:30]


@pytest.mark.parametrize("how", [right, wrong, wrong_at(1)], ids=["right", "wrong", "wrong at 1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_r13_penalties_see_every_token_and_no_rejected_draft_token(how: Script, temperature: float) -> None:
    """sglang 33643: one token per step was counted; vmlx-swift 357: rejected draft tokens were. The text under
    penalties, bad words and min_tokens equals that of plain decoding, for any share of draft tokens
    accepted."""
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=1.3,
        frequency_penalty=0.8,
        presence_penalty=0.5,
        bad_words=((1, 2), (3, 3)),
        min_tokens=12,
        stop_token_ids=(4, 5),
        max_tokens=30,
        seed=3,
    )
    plain = one(None, params, rule="coupled")
    unpenalised = SamplingParams(temperature=temperature, max_tokens=30, seed=3)
    assert plain.token_ids != one(None, unpenalised, rule="coupled").token_ids[: len(plain.token_ids)]
    assert len(plain.token_ids) > 12
    for k in (1, 4, 8):
        done = one(scripted(how, plain.token_ids), params, k, rule="coupled")
        assert done.token_ids == plain.token_ids
        assert (done.stats.accepted > 0) == (how is not wrong)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_r14_a_forbidden_token_never_appears_even_if_drafted(temperature: float) -> None:
    """vLLM 42744: the bias would have reached only the bonus token. The drafter always proposes the forbidden token."""
    forbidden = GREEDY[0]
    drafter = scripted(text=[forbidden] * 40)
    for extra in ({"logit_bias": {forbidden: -100.0}}, {"bad_words": ((forbidden,),)}):
        for seed in range(20):
            done = one(drafter, SamplingParams(temperature=temperature, max_tokens=20, seed=seed, **extra))  # type: ignore[arg-type]
            assert forbidden not in done.token_ids
            assert done.stats.proposed > 0


def test_r15_temperature_reaches_verification() -> None:
    """sglang 39253: temperature was ignored in verification. Samples at two temperatures pass the G-test against
    their own distribution and fail it against each other's. n = 5000."""
    distributions, counts = [], []
    for temperature in (0.5, 1.5):
        params = SamplingParams(temperature=temperature, max_tokens=4)
        llm = LLM(target(), NgramDrafter(), max_batch=5000, draft_tokens=4)
        seqs = sample(llm, PROMPT, params, 5000, seed=1)
        assert sum(seq.stats.accepted for seq in seqs) > 500
        counts.append(beginnings(seq.output for seq in seqs))
        distributions.append(joint_distribution(TRUTH, PROMPT, params))
    for own, count in enumerate(counts):
        assert g_test(count, distributions[own]) >= LEVEL
        assert g_test(count, distributions[1 - own]) < LEVEL


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_r16_a_seed_gives_one_text_for_any_batch(rule: str) -> None:
    """vLLM 6038, 9441, 10863, TensorRT-LLM 19487: seeds ignored; a seeded request in a batch with unseeded ones was
    wrong; requests that shared a generator got identical texts."""
    seeded = SamplingParams(temperature=1.0, max_tokens=24, seed=7)
    free = SamplingParams(temperature=1.0, max_tokens=24)

    def run(params: list[SamplingParams], max_batch: int) -> list[list[int]]:
        llm = LLM(target(), ModelDrafter(ToyTarget(V, seed=8), V), rule=rule, max_batch=max_batch, draft_tokens=4)
        return [done.token_ids for done in llm.generate([PROMPT] * len(params), params)]

    alone = run([seeded], 1)[0]
    mixed = run([free, seeded, free, seeded, free], 3)
    assert mixed[1] == mixed[3] == alone
    assert len({tuple(text) for text in (mixed[0], mixed[2], mixed[4], alone)}) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [right, wrong, wrong_at(2)], ids=["right", "wrong", "wrong at 2"])
def test_r18_logprobs_equal_those_of_the_target_alone(how: Script, temperature: float) -> None:
    """llama.cpp 27972, 27196: log-probabilities were 0.0, or right for the first token only. Each is compared with a
    fresh prefill of the text before it."""
    params = SamplingParams(temperature=temperature, top_k=4, max_tokens=20, logprobs=3, seed=2)
    text = one(None, params, rule="coupled").token_ids
    done = one(scripted(how, text), params, rule="coupled")
    assert done.token_ids == text
    assert done.logprobs is not None
    for i, (token, found) in enumerate(zip(text, done.logprobs, strict=True)):
        logs = torch.log_softmax(TRUTH.logits([*PROMPT, *text[:i]]), -1)
        assert found.id == token
        assert found.logprob == pytest.approx(float(logs[token]), abs=1e-12)
        best = sorted(range(V), key=lambda t: -float(logs[t]))[:3]
        assert [t for t, _ in found.top] == best
        assert [x for _, x in found.top] == pytest.approx([float(logs[t]) for t in best], abs=1e-12)


class _Placeholders:
    """A drafter whose draft tokens are still placeholders every other step."""

    name = "placeholders"
    traits = DrafterTraits()

    def __init__(self) -> None:
        self.steps = 0

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        self.steps += 1
        done = len(seqs[0].tokens) - len(PROMPT)
        row = [-1, -1, -1] if self.steps % 2 else GREEDY[done : done + 3]
        return Draft.chains([row[:most] for most in budget])

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


class _Watched(ToyTarget):
    """Records every id that reaches the model."""

    ids: set[int]

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        self.ids |= {*draft.ids, *(t for seq in seqs for t in seq.pending)}
        return super().run(seqs, draft, taps)


def test_r19_placeholders_never_reach_the_model() -> None:
    """vLLM 46899, 40768: drafts of -1 reached the model after a gap in scheduling. Here the guard stops them, that
    step decodes without a draft, and the next correct draft is used again."""
    watched = _Watched(V, order=4, seed=3)
    watched.ids = set()
    done = LLM(watched, _Placeholders(), draft_tokens=4).generate(PROMPT, SamplingParams(max_tokens=20))[0]
    assert done.token_ids == GREEDY[:20]
    assert watched.ids <= set(range(V))
    assert done.stats.drafter_faults > 2
    assert done.stats.accepted > 2


def test_r19_gaps_and_aborts_do_not_affect_other_requests() -> None:
    """The same issues: aborting a request between two steps does not affect the others."""
    model = target()
    drafter = NgramDrafter()
    llm = LLM(model, drafter, max_batch=2, draft_tokens=4)
    abandoned = llm.stream(PROMPT, SamplingParams(max_tokens=30))
    next(abandoned)
    next(abandoned)
    assert llm.generate(PROMPT, SamplingParams(max_tokens=20))[0].token_ids == GREEDY[:20]
    abandoned.close()
    assert llm.generate(PROMPT, SamplingParams(max_tokens=20))[0].token_ids == GREEDY[:20]
    assert not drafter._states
    assert not model._slots


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["ngram", "model", "random"])
def test_r20_a_second_call_gives_the_same(name: str, temperature: float) -> None:
    """TensorRT-LLM 2263: wrong or different text on the second call. No state of the first call may remain."""
    model = ToyTarget(V, seed=8)
    drafter: Drafter = {"ngram": NgramDrafter(), "model": ModelDrafter(model, V), "random": RandomDrafter(V)}[name]
    big = target()
    llm = LLM(big, drafter, max_batch=2, draft_tokens=4)
    prompts = [PROMPT, [3], [5, 5, 5, 5], [2, 4]]
    params = [SamplingParams(temperature=temperature, max_tokens=20, seed=seed) for seed in range(4)]
    first, second = llm.generate(prompts, params), llm.generate(prompts, params)
    assert [d.token_ids for d in first] == [d.token_ids for d in second]
    assert [d.drafted for d in first] == [d.drafted for d in second]
    assert not big._slots
    assert not model._slots
