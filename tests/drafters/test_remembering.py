"""Drafters that keep something of one request for the next ones: what they remember must be independent of the numbers
with which verification decides, also if requests have the same seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.target import Target
from slipstream.drafters.registry import make_drafter
from slipstream.llm import LLM
from tests.oracle import Oracle, joint_distribution
from tests.significance import LEVEL, beginnings, g_test
from tests.targets.toy import ToyTarget

V, PROMPT = 5, [0, 1, 2, 0]
PARAMS = SamplingParams(temperature=1.0, max_tokens=4)


CARRYING: dict[str, Callable[[Target], Drafter]] = {
    "suffix": lambda target: make_drafter("suffix", target, across=True, min_match=1, row_cost=0.0),
    "hybrid": lambda target: make_drafter(
        "hybrid", target, members=[make_drafter("ngram", target), make_drafter("suffix", target, across=True)]
    ),
}


def target() -> ToyTarget:
    return ToyTarget(V, order=2, seed=21, sharpness=1.0)


def test_requests_that_repeat_a_seed_have_the_targets_distribution_each() -> None:
    """G-test on the first three tokens of the second request of each seed, n = 900, fails at p < 1e-6. With the same
    random numbers for both requests, p is below 1e-9."""
    model, seconds = target(), list[Sequence]()
    for seed in range(900):
        llm = LLM(model, CARRYING["suffix"](model), draft_tokens=3)
        params = SamplingParams(temperature=1.0, max_tokens=4, seed=seed)
        for seq in (llm.sequence(PROMPT, params), llm.sequence(PROMPT, params)):
            for _ in llm.decode([seq]):
                pass
        seconds.append(seq)
    p = g_test(beginnings(seq.output for seq in seconds), joint_distribution(Oracle(target()), PROMPT, PARAMS))
    assert p >= LEVEL, f"p = {p:.1e}"
    assert sum(seq.stats.accepted for seq in seconds) > 250


@pytest.mark.parametrize("name", CARRYING)
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "typical"])
def test_each_request_for_a_drafter_that_remembers_has_random_numbers_of_its_own(name: str, rule: str) -> None:
    """Also within a batch. Under `coupled` the text is a function of target and seed, so there the seed is all."""
    model = target()
    llm = LLM(model, CARRYING[name](model), rule=rule, draft_tokens=4)
    assert llm.drafter.traits.remembers
    seqs = [llm.sequence(PROMPT, SamplingParams(temperature=1.0, seed=3, max_tokens=2)) for _ in range(3)]
    steps = llm.decode(seqs)
    next(steps)
    first = {tuple(seq.random.uniforms(1, 7, 4)) for seq in seqs}
    assert len(first) == (1 if rule == "coupled" else 3)
    steps.close()
