"""A trace records what happened and does not change it."""

import pytest

from slipstream.core.params import SamplingParams
from slipstream.llm import LLM, Completion
from slipstream.measure.benchmark import Contender
from slipstream.measure.measurements import TracedStep
from slipstream.measure.tracing import compute_rolling, trace


def test_the_record_adds_up(trace_result):
    data = trace_result.data
    stats, tokens, steps = data.stats, data.tokens, data.steps
    assert len(tokens) == stats["tokens"] == sum(r.tokens for r in steps) == 40
    assert len(steps) == stats["steps"]
    assert sum(t.drafted for t in tokens) == stats["accepted"] == sum(r.accepted for r in steps)
    assert sum(r.drafted for r in steps) == stats["proposed"]
    assert data.rolling[-1].overall == pytest.approx(stats["acceptance_rate"])
    assert len(data.pieces) == len(tokens)


def untraced(llm: LLM, contender: Contender, ids: list[int], params: SamplingParams) -> Completion:
    llm.use(contender.drafter)
    llm.draft_tokens = contender.draft_tokens
    return llm.generate([ids], params)[0]


@pytest.mark.parametrize("more", [{"max_tokens": 40, "seed": 3}, {"max_tokens": 12, "repetition_penalty": 1.3}])
def test_tracing_does_not_change_the_text(tiny_llm, contenders, more):
    """Parameters that need a history, too: a token's probability is that of its own distribution."""
    params = SamplingParams(temperature=1.0, ignore_eos=True, **{"seed": 2} | more)
    traced = trace(tiny_llm, contenders[0], [5, 6, 7], params).data.tokens
    plain = untraced(tiny_llm, contenders[0], [5, 6, 7], params)
    assert plain.token_ids == [t.token for t in traced]
    assert plain.drafted == [t.drafted for t in traced]
    assert all(t.p > 0 for t in traced)


def test_every_token_has_its_drafter_and_the_rejected_draft_token(trace_result):
    tokens = trace_result.data.tokens
    assert {t.by for t in tokens} == {"target", "model"}
    for t in tokens:
        assert t.drafted == (t.by == "model")
        assert (t.q is not None) == t.drafted
        assert 0 <= t.p <= 1
    lost = [(t, g) for t in tokens for g in t.rejected]
    assert lost
    for token, rejected in lost:
        assert token.by == "target"
        assert rejected.q > 0
        assert rejected.token != token.token  # the residual holds none of it: p - q cannot be drawn there again
    used = {t.token for t in tokens} | {g.token for _, g in lost}
    assert set(map(str, used)) <= set(trace_result.data.vocabulary)


def test_at_temperature_0_probabilities_are_the_softmax(tiny_llm):
    params = SamplingParams(max_tokens=12)
    traced = trace(tiny_llm, Contender("ngram", "ngram", 4), [5, 6, 7, 5, 6, 7, 5, 6], params)
    assert traced.settings["distribution"] == "softmax"
    for t in traced.data.tokens:
        assert 0 < t.p < 1  # one-hot would be 1
        assert all(g.p <= t.p for g in t.rejected)  # greedy: the most probable token
        assert t.q is None


def test_members_of_a_stack_are_distinguished_and_none_of_its_drafts_changes(tiny_llm, contenders):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    stack = Contender("ngram+model", ["ngram", contenders[0].drafter], 4)
    traced = trace(tiny_llm, stack, [5, 6, 7] * 8, params)
    named = {t.by for t in traced.data.tokens} | {g.by for t in traced.data.tokens for g in t.rejected}
    assert named == {"target", "ngram", "model"}
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    stack = Contender("ngram+model", ["ngram", contenders[0].drafter], 12)
    plain = untraced(tiny_llm, stack, [5, 6, 7] * 8, params).stats
    traced = trace(tiny_llm, stack, [5, 6, 7] * 8, params).data.stats
    assert traced["proposed"] == plain.proposed
    assert traced["histogram"] == plain.as_dict()["histogram"]


def test_the_rolling_rate_forgets():
    plain, right, wrong = TracedStep(0, 0, 1), TracedStep(4, 4, 5), TracedStep(4, 0, 1)
    steps = [plain, *[right] * 3, *[wrong] * 2]
    points = compute_rolling(steps, window=2)
    assert [p.rate for p in points] == [1, 1, 1, 0.5, 0]
    assert [p.token for p in points] == [6, 11, 16, 17, 18]
    assert points[-1].overall == pytest.approx(12 / 20)
    assert compute_rolling([plain]) == []
