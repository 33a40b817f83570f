"""The scripted drafters: their acceptance is as set."""

from __future__ import annotations

import pytest

from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.stats import SpecStats
from slipstream.llm import LLM
from tests.drafters.scripted_drafters import RandomDrafter, ScriptedDrafter, replay, right, wrong, wrong_at
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

V = 32
PROMPT = [1, 2, 3]


def test_each_script_proposes_what_it_was_given() -> None:
    known = {(1, 2, 3): [4, 5, 6, 31, 7]}
    seq = Sequence(PROMPT)
    seq.tokens += [4, 5]
    for script, ids in ((right, [6, 31, 7]), (wrong, [7, 0, 8]), (wrong_at(1), [6, 0, 7])):
        assert ScriptedDrafter(known, V, script).propose([seq], [8]).ids == ids
        assert ScriptedDrafter(known, V, script).propose([seq], [2]).ids == ids[:2]
    assert len(ScriptedDrafter(known, V).propose([Sequence([9])], [4])) == 0
    seq.tokens += [6, 31, 7, 8]
    assert len(ScriptedDrafter(known, V).propose([seq], [4])) == 0


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_replay_reaches_its_rate(rate: float, draft_tokens: int) -> None:
    """Of 1500 positions, the share drafted right among those whose predecessor in the draft was; within 5 standard
    deviations of the rate."""
    target = ToyTarget(V, order=3, seed=1)
    text = Oracle(ToyTarget(V, order=3, seed=1)).greedy(PROMPT, 1500)
    drafter = ScriptedDrafter({tuple(PROMPT): text}, V, replay(rate))
    done = LLM(target, drafter, draft_tokens=draft_tokens).generate(PROMPT, SamplingParams(max_tokens=1500, seed=1))[0]
    assert done.token_ids == text
    stats = done.stats
    verified = sum(min(i + 1, draft_tokens) * n for i, n in stats.histogram.items()) - stats.undrafted
    assert abs(stats.accepted / verified - rate) <= 5 * (rate * (1 - rate) / verified) ** 0.5 + 2e-3


def test_random_draft_tokens_are_accepted_with_probability_1_over_v() -> None:
    for sampled in (True, False):
        llm = LLM(ToyTarget(8, seed=2), RandomDrafter(8, sampled), draft_tokens=1)
        prompts = [[i % 8, i // 8] for i in range(40)]
        done = llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=50, seed=1))
        stats = sum((d.stats for d in done), SpecStats())
        assert stats.acceptance_rate is not None
        if not sampled:  # a point mass is accepted with p(x), 1/V in the mean
            assert abs(stats.acceptance_rate - 1 / 8) < 0.03
        else:  # accepted with min(1, V p(x)), far more often
            assert stats.acceptance_rate > 0.25
