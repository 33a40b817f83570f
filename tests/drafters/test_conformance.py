"""Every drafter of the registry, and the measuring instruments, through the suite of `conformance.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.drafters.base import Drafter
from slipstream.drafters.model import ModelDraftConfig, ModelDrafter
from slipstream.drafters.ngram import NgramConfig, NgramDrafter
from slipstream.drafters.registry import DRAFTERS, make_drafter
from slipstream.drafters.scripted import RandomDrafter, ScriptedDrafter, replay
from slipstream.targets.base import Target
from slipstream.targets.toy import ToyTarget
from tests.drafters.conformance import LENGTH, Case, Conformance
from tests.end_to_end.exact import Oracle

V = 5


def target() -> ToyTarget:
    return ToyTarget(V, order=3, seed=21, sharpness=1.5)


def other() -> ToyTarget:
    return ToyTarget(V, order=2, seed=22, sharpness=1.0)


MAKERS: dict[str, Callable[[Target], Drafter]] = {
    "model": lambda target: make_drafter("model", target, model=other()),
}
"""Registered drafters that need more than a target."""


def _scripted(target: Target) -> Drafter:
    oracle = Oracle(target)
    prompts = [*Case(lambda: target, _scripted).prompts(7), [0, 1, 2, 0, 1, 2, 0]]
    return ScriptedDrafter({tuple(p): oracle.greedy(p, LENGTH) for p in prompts}, V, replay(0.7))


VARIANTS: dict[str, Callable[[Target], Drafter]] = {
    "ngram tree": lambda target: NgramDrafter(
        NgramConfig(branches=3, forks=2, fillers=2, max_draft=6, max_entries=40, row_cost=0.1)
    ),
    "model, confident": lambda target: ModelDrafter(other(), V, ModelDraftConfig(confidence=0.3)),
    "scripted": _scripted,
    "random": lambda target: RandomDrafter(V, sampled=True),
}
"""Beyond the registry: other settings, and the instruments that the other tests rely on."""


@pytest.fixture(params=DRAFTERS)
def case(request: pytest.FixtureRequest) -> Case:
    name: str = request.param
    return Case(target, MAKERS.get(name, lambda target: make_drafter(name, target)))


class TestRegistered(Conformance):
    pass


class TestVariants(Conformance):
    @pytest.fixture(params=VARIANTS)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return Case(target, VARIANTS[request.param])

    def test_sampled_text_has_the_targets_law(self, case: Case) -> None:
        if case.make is not VARIANTS["model, confident"]:
            pytest.skip("tests/end_to_end/test_law.py tests the law of this one, under every parameter")
        super().test_sampled_text_has_the_targets_law(case)
