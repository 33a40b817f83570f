"""Faults of a drafter that depend on what it drew: what was drawn before stays in the draft, so the text keeps the
target's distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.draft import Draft
from slipstream.core.drafter import Drafter, NoDrafter
from slipstream.core.params import SamplingParams
from slipstream.core.random import Stream
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import TargetOut
from slipstream.drafters.eagle import EagleDrafter
from slipstream.drafters.guard import Guard, first_children
from slipstream.drafters.model import ModelDrafter
from slipstream.errors import TargetError
from slipstream.llm import LLM
from tests.drafters.fakes import MultiStepToy
from tests.end_to_end.sampling import hurry, sample
from tests.heads.tiny_heads import eagle_drafter
from tests.oracle import Oracle, joint_distribution
from tests.significance import beginnings, g_test
from tests.targets.toy import ToyTarget

V, BAD, PROMPT = 4, 1, [0, 2, 2]
AFTER = len(PROMPT) + 2
"""Length of the text when the drafter cannot go on after BAD: its first draft token, once one token was said."""


def target(trees: bool = True) -> ToyTarget:
    return ToyTarget(V, order=2, seed=21, sharpness=1.0, trees=trees)


def fails(tokens: Seq[int]) -> bool:
    return len(tokens) == AFTER and tokens[-1] == BAD


class Failing(MultiStepToy):
    """A draft model that raises, or whose logits are NaN, where a text `fails`."""

    raises, in_one_call = True, False

    def run(self, seqs: Seq[Sequence], draft: Draft, taps: Seq[int] = ()) -> TargetOut:
        out = super().run(seqs, draft, taps)
        for b, seq in enumerate(seqs):
            texts = [seq.tokens, *([*seq.tokens, draft.ids[i]] for i in draft.nodes(b) if draft.parents[i] < 0)]
            rows = [draft.splits[b] + b, *(i + b + 1 for i in draft.nodes(b) if draft.parents[i] < 0)]
            for text, row in zip(texts, rows, strict=True):
                if fails(text):
                    self._fail(out.logits[row])
        return out

    def decode_steps(
        self, seqs: Seq[Sequence], steps: int, sampling: StepSampling = ARGMAX, exit: int | None = None
    ) -> DecodedSteps:
        draft = super().decode_steps(seqs, steps, sampling, exit)
        for b, seq in enumerate(seqs):
            for j in range(1, steps):
                if fails([*seq.tokens, *draft.tokens[:j, b].tolist()]):
                    self._fail(draft.logits[j:, b])
        return draft

    def _fail(self, logits: Tensor) -> None:
        if self.raises:
            raise TargetError("the draft model fails")
        logits.fill_(float("nan"))


def model(raises: bool, in_one_call: bool = False) -> Callable[[], Drafter]:
    def make() -> Drafter:
        target = Failing(V, order=2, seed=22, sharpness=1.5)
        target.raises, target.in_one_call = raises, in_one_call
        return ModelDrafter(target, V)

    return make


def eagle(shape: str, raises: bool) -> Callable[[], Drafter]:
    """A head that fails after BAD, whether it runs one step or several."""

    def make() -> EagleDrafter:
        drafter = eagle_drafter(V, 3, shape=shape, width=2, nodes=4)
        runtime = drafter.runtime
        extend = runtime.extend

        def failing(batch: Any, features: Tensor, from_head: bool = False) -> tuple[Tensor, Tensor]:
            hidden, logits = extend(batch, features, from_head)
            if from_head and bool((batch.tokens == BAD).any()):
                if raises:
                    raise TargetError("the head fails")
                logits = logits.masked_fill((batch.tokens == BAD)[list(batch.select)][:, None], float("nan"))
            return hidden, logits

        runtime.extend = failing  # type: ignore[method-assign]
        drafter.multi_step = False
        return drafter

    return make


FORBIDDEN = {"bad_words": tuple((BAD, t) for t in range(V - 1))}
"""After BAD only the token V - 1 is left, which some drafters do not know."""

CASES: dict[str, tuple[Callable[[], Drafter], dict[str, Any]]] = {
    "model raises": (model(raises=True), {}),
    "model is NaN": (model(raises=False), {}),
    "model raises in a call of several steps": (model(raises=True, in_one_call=True), {}),
    "model is NaN in a call of several steps": (model(raises=False, in_one_call=True), {}),
    "model of fewer ids": (
        lambda: ModelDrafter(ToyTarget(V - 1, order=2, seed=22, sharpness=1.5), V), FORBIDDEN,
    ),
    "head raises in a chain": (eagle("chain", raises=True), {}),
    "head is NaN in a chain": (eagle("chain", raises=False), {}),
    "head raises in a tree": (eagle("tree", raises=True), {}),
    "head is NaN in a tree": (eagle("tree", raises=False), {}),
    "head of fewer ids": (lambda: eagle_drafter(V, 3), FORBIDDEN),
    "tree of a head of fewer ids": (lambda: eagle_drafter(V, 3, shape="tree", width=2, nodes=4), FORBIDDEN),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_fault_after_a_drawn_token_leaves_the_distribution_as_it_is(name: str) -> None:
    """G-test on the first three tokens, n = 1500, fails at p < 1e-6. To drop the whole draft gives 3e-9 to 5e-17 in
    most cases. The step that drafts is taken by each request alone: a fault ends the drafts of a whole batch."""
    make, changes = CASES[name]
    params = SamplingParams(temperature=1.0, max_tokens=4, **changes)
    model, rule = target(), RULES["rejection"]
    drafter = Guard(make(), model)
    with hurry():
        seqs = [Sequence(PROMPT, params, stream=Stream(seed)) for seed in range(1500)]
        step(seqs, model, drafter, rule, 2)
        for seq in seqs:
            step([seq], model, drafter, rule, 2)
        while waiting := [seq for seq in seqs if len(seq.output) < 3]:
            step(waiting, model, NoDrafter(), rule, 2)
    assert g_test(beginnings(seq.output for seq in seqs), joint_distribution(Oracle(target()), PROMPT, params)) >= 1e-6
    assert sum(seq.stats.accepted for seq in seqs) > 200


def test_a_tree_for_a_target_that_runs_chains_only_is_cut_and_not_dropped() -> None:
    """Whether a drawn tree has siblings may depend on what was drawn. G-test as above, n = 4000."""
    params = SamplingParams(temperature=1.0, max_tokens=4)
    wanted = joint_distribution(Oracle(target()), PROMPT, params)
    chains_only = target(trees=False)
    drafter = Guard(eagle_drafter(V, 3, shape="tree", width=2, nodes=4), chains_only)
    seqs = sample(LLM(chains_only, drafter, draft_tokens=2, max_batch=4000), PROMPT, params, 4000, seed=6)
    assert g_test(beginnings(seq.output for seq in seqs), wanted) >= 1e-6
    assert drafter.faults == 0
    assert sum(seq.stats.accepted for seq in seqs) > 1000


def test_the_first_children_of_a_tree_are_a_chain_with_their_q() -> None:
    q = torch.eye(V, dtype=torch.float64)[[3, 0, 1, 2, 2]]
    draft = Draft(torch.tensor([3, 0, 1, 2, 2]), [-1, -1, 0, 0, -1], [0, 4, 4, 5], q)
    cut = first_children(draft)
    assert (cut.ids, cut.parents, cut.splits) == ([3, 1, 2], [-1, 0, -1], [0, 2, 2, 3])
    assert cut.q is not None
    assert torch.equal(cut.q, q[[0, 2, 4]])
    cut = first_children(Draft(draft.tokens, draft.parents, draft.splits, acceptable=[False, True, True, True, True]))
    assert cut.ids == [0, 2]
