"""Enumeration finds what is wrong: each fault below changes the probability of some text, and must be seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import slipstream.drafters.chains
from slipstream.core.draft import Draft
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.random import VERIFY, Stream
from slipstream.core.rules import RULES
from slipstream.drafters.model import ModelDrafter
from slipstream.llm import LLM
from tests.core import wrong
from tests.drafters.fakes import MultiStepToy
from tests.enumeration import Branch, Texts, enumerate_texts
from tests.heads.tiny_heads import eagle_drafter
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

V, PROMPT, PARAMS = 3, [0, 1, 0], SamplingParams(temperature=1.0, max_tokens=4)


def target() -> ToyTarget:
    return ToyTarget(V, order=2, seed=21, sharpness=1.0)


def model() -> Drafter:
    return ModelDrafter(ToyTarget(V, order=1, seed=22, sharpness=1.5), V)


def tree() -> Drafter:
    return eagle_drafter(V, 1, shape="tree", width=2, nodes=3)


def texts_of(make: Callable[[], Drafter], rule: str = "rejection") -> Texts:
    (texts,) = enumerate_texts(lambda: LLM(target(), make(), draft_tokens=2, rule=rule), PROMPT, PARAMS)
    assert texts.accepted > 0.1
    return texts


def error(*how: Any) -> float:
    return texts_of(*how).error(Oracle(target()), PROMPT, PARAMS)


def several_steps(exact: bool) -> Drafter:
    """In one call, which draws in float32, so that near ties are picked again, or in float64."""
    toy = MultiStepToy(V, order=1, seed=22)
    toy.exact = exact
    return ModelDrafter(toy, V)


@pytest.mark.parametrize("make", [model, tree, lambda: several_steps(False), lambda: several_steps(True)])
def test_texts_of_the_right_program_have_the_probabilities_of_plain_decoding(make: Callable[[], Drafter]) -> None:
    assert error(make) < 1e-9


@pytest.mark.parametrize("rule", [wrong.A, wrong.B, wrong.C, wrong.D], ids=lambda rule: rule.name)
def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
    monkeypatch.setitem(RULES, rule.name, rule)
    assert error(model, rule.name) > 0.01
    monkeypatch.setitem(RULES, rule.name, wrong.chain_rule("right"))
    assert error(model, rule.name) < 1e-9


def test_verification_with_the_number_of_a_draft_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slipstream.drafters.chains, "DRAFT", VERIFY)
    assert error(model) > 0.01


def spoiled(make: Callable[[], Drafter], spoil: Callable[[Draft], Draft]) -> Callable[[], Drafter]:
    """The drafter, whose drafts are changed before verification."""

    def made() -> Drafter:
        drafter = make()
        propose = drafter.propose
        drafter.propose = lambda seqs, budgets: spoil(propose(seqs, budgets))  # type: ignore[method-assign]
        return drafter

    return made


def flatter(draft: Draft) -> Draft:
    return draft if draft.q is None else replace(draft, q=torch.softmax(draft.q.log() / 1.1, -1))


def with_replacement(draft: Draft) -> Draft:
    """Later siblings with the q of their first."""
    if draft.q is None:
        return draft
    first: dict[tuple[int, int], int] = {}
    for b in range(draft.batch):
        for i in draft.nodes(b):
            first.setdefault((b, draft.parents[i]), i)
    rows = [first[b, draft.parents[i]] for b in range(draft.batch) for i in draft.nodes(b)]
    return replace(draft, q=draft.q[rows])


def without_some(draft: Draft) -> Draft:
    """Without chains that end in token 0."""
    chains = [draft.ids[draft.splits[b] : draft.splits[b + 1]] for b in range(draft.batch)]
    kept = [i for b in range(draft.batch) for i in draft.nodes(b) if chains[b][-1]]
    splits = [sum(i < end for i in kept) for end in draft.splits]
    return draft.only(kept, [draft.parents[i] for i in kept], splits)


@pytest.mark.parametrize(
    ("make", "spoil"), [(model, flatter), (tree, flatter), (tree, with_replacement), (model, without_some)]
)
def test_a_wrong_draft_is_found(make: Callable[[], Drafter], spoil: Callable[[Draft], Draft]) -> None:
    assert error(spoiled(make, spoil)) > 1e-3


def test_numbers_before_the_branches_are_those_of_the_seed_and_all_of_fixed_purposes() -> None:
    branch, stream = Branch(seed=5, start=7, fixed=[VERIFY]), Stream(5)
    assert (branch.uniforms(2, 6, 3) == stream.uniforms(2, 6, 3)).all()
    assert (branch.uniforms(VERIFY, 9, 3) == stream.uniforms(VERIFY, 9, 3)).all()
    assert branch.uniforms(2, 7, 3).min() > 1
    assert branch.began == 7
