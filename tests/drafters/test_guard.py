"""`Guard`: if a drafter fails, the text is that of plain decoding; faults are counted and logged once. What was drawn
before a fault stays in the draft, so the text keeps the target's distribution."""

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.decode_steps import ARGMAX, DecodedSteps, StepSampling
from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import step
from slipstream.core.target import TargetOut
from slipstream.drafters.eagle import EagleDrafter
from slipstream.drafters.guard import MAX_NODES, Guard, first_children
from slipstream.drafters.model import ModelDrafter
from slipstream.errors import TargetError
from slipstream.llm import LLM
from tests.core.fake_drafters import Scripted, finish, sequence
from tests.drafters.fakes import MultiStepToy
from tests.enumeration import Branch, enumerate_runs, enumerate_texts
from tests.heads.tiny_heads import eagle_drafter
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

PROMPT = [1, 2, 3]
TOY = ToyTarget(vocab=7, order=2, seed=3)


class Faulty(Scripted):
    """A correct drafter whose drafts are changed by `spoiled`; may raise in `observe` and `release`."""

    name = "faulty"

    def __init__(self, target: ToyTarget, spoiled: Callable[[Draft], object], where: str = "propose"):
        super().__init__(target)
        self.spoiled, self.where = spoiled, where
        self.observed, self.released = 0, list[int]()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        draft = super().propose(seqs, budgets)
        return self.spoiled(draft) if self.where != "observe" else draft  # type: ignore[return-value]

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        self.observed += 1
        if self.where == "observe":
            raise RuntimeError("observe is broken")

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)
        if self.where == "release":
            raise RuntimeError("release is broken")


def fail(_: Draft) -> Draft:
    raise ZeroDivisionError("one over nothing")


FAULTS: dict[str, Callable[[Draft], object]] = {
    "raises": fail,
    "returns None": lambda draft: None,
    "returns a list": lambda draft: draft.ids,
    "too deep": lambda draft: Draft.chains([[*draft.ids, 1, 1, 1, 1, 1, 1, 1] for _ in range(draft.batch)]),
    "too many": lambda draft: Draft(
        torch.zeros(MAX_NODES + 1, dtype=torch.int64), [-1] * (MAX_NODES + 1), (0, *[MAX_NODES + 1] * draft.batch)
    ),
    "for another batch": lambda draft: Draft.empty(draft.batch + 1),
    "an id outside the vocabulary": lambda draft: replace(draft, tokens=draft.tokens + 7),
    "parents out of order": lambda draft: replace(draft, parents=[p + 1 for p in draft.parents]),
    "tokens on a device without values": lambda draft: replace(draft, tokens=draft.tokens.to("meta")),
    "q of NaN": lambda draft: replace(draft, q=torch.full((len(draft), 7), math.nan, dtype=torch.float64)),
}
"""Other faults that `Draft.check` finds are in `core/test_draft.py`."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_draft_costs_speed_and_nothing_else(fault, temperature, caplog):
    """Also sampled: a step without a draft draws the same random numbers as plain decoding, so the text is the same."""

    def requests() -> list[Sequence]:
        return [sequence(TOY, PROMPT[: 2 + i], i, temperature=temperature, max_tokens=9) for i in range(2)]

    wanted = finish(requests(), TOY)
    seqs, guard = requests(), Guard(Faulty(TOY, FAULTS[fault]), TOY)
    assert finish(seqs, TOY, guard) == wanted
    drafting = 7  # of 9 steps: not the prefill, and not the last token, which leaves no room for a draft token
    assert guard.faults == drafting
    for seq in seqs:
        assert seq.stats.drafter_faults == drafting
        assert seq.stats.proposed == seq.stats.accepted == 0
    assert len(caplog.records) == 1, "warned of once"
    assert "faulty" in caplog.text
    assert ".)" not in caplog.text
    assert ("not a Draft" in caplog.text) == fault.startswith("returns")
    assert "the text is not affected" in caplog.text


def test_a_drafter_that_fails_in_observe_keeps_its_accepted_draft_tokens(caplog: pytest.LogCaptureFixture) -> None:
    wanted = finish([sequence(TOY, PROMPT, max_tokens=12)], TOY)
    seq, drafter = sequence(TOY, PROMPT, max_tokens=12), Faulty(TOY, fail, "observe")
    guard = Guard(drafter, TOY)
    assert finish([seq], TOY, guard) == wanted
    assert seq.stats.acceptance_rate == 1
    assert seq.stats.drafter_faults == guard.faults == drafter.observed == seq.stats.steps
    assert len(caplog.records) == 1
    assert "observe is broken" in caplog.text


@pytest.mark.parametrize("spoiled", [lambda draft: draft, fail], ids=["at the end", "after a fault"])
def test_a_drafter_that_fails_in_release_does_no_harm(spoiled, caplog):
    wanted = finish([sequence(TOY, PROMPT, max_tokens=12)], TOY)
    seq, guard = sequence(TOY, PROMPT, max_tokens=12), Guard(Faulty(TOY, spoiled, "release"), TOY)
    assert finish([seq], TOY, guard) == wanted
    before = guard.faults
    guard.release(seq.id)
    assert guard.faults == before + 1
    assert len(caplog.records) == 1, "warned of the first fault, also if the release after it fails"


def test_after_a_fault_the_drafter_starts_again() -> None:
    seq, drafter = sequence(TOY, PROMPT, max_tokens=4), Faulty(TOY, fail)
    finish([seq], TOY, Guard(drafter, TOY))
    assert drafter.released == [seq.id] * 2
    drafter.released.clear()
    Guard(drafter, TOY).release(seq.id)
    assert drafter.released == [seq.id]


def test_a_fault_passes_and_drafting_goes_on() -> None:
    class Once(Scripted):
        def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
            draft = super().propose(seqs, budgets)
            return fail(draft) if self.steps == 2 else draft

    wanted = finish([sequence(TOY, PROMPT, max_tokens=20)], TOY)
    seq = sequence(TOY, PROMPT, max_tokens=20)
    assert finish([seq], TOY, Guard(Once(TOY), TOY)) == wanted
    assert seq.stats.drafter_faults == 1
    assert seq.stats.accepted > 5


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupt(_: Draft) -> Draft:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish([sequence(TOY, PROMPT)], TOY, Guard(Faulty(TOY, interrupt), TOY))


V, BAD, TEXT, NODES = 4, 1, [0, 2, 2], 3
AFTER = len(TEXT) + 2
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
        self, seqs: Seq[Sequence], steps: int, sampling: StepSampling = ARGMAX, *more: Any
    ) -> DecodedSteps:
        draft = super().decode_steps(seqs, steps, sampling, *more)
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
        drafter = eagle_drafter(V, 3, shape=shape, width=2, nodes=NODES)
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
    "model of fewer ids": (lambda: ModelDrafter(ToyTarget(V - 1, order=2, seed=22, sharpness=1.5), V), FORBIDDEN),
    "head raises in a chain": (eagle("chain", raises=True), {}),
    "head is NaN in a chain": (eagle("chain", raises=False), {}),
    "head raises in a tree": (eagle("tree", raises=True), {}),
    "head is NaN in a tree": (eagle("tree", raises=False), {}),
    "head of fewer ids": (lambda: eagle_drafter(V, 3), FORBIDDEN),
    "tree of a head of fewer ids": (lambda: eagle_drafter(V, 3, shape="tree", width=2, nodes=NODES), FORBIDDEN),
}  # fmt: skip


class Dropping(Guard):
    """Wrong on purpose: drops the whole draft if it could not go on after BAD."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        draft = super().propose(seqs, budgets)
        ends = {i for i in range(len(draft)) if draft.depths[i] < budgets[0].depth} - {*draft.parents}
        return Draft.empty(1) if any(draft.ids[i] == BAD for i in ends) else draft


def error_of_drafting(name: str, guard: type[Guard]) -> float:
    """Largest error of the probability of a text, by enumeration of the drafting step after the first token. Each run
    takes it alone: a fault ends the drafts of a whole batch."""
    make, changes = CASES[name]
    params, model = SamplingParams(temperature=1.0, max_tokens=4, **changes), target()

    def run(branches: Seq[Branch]) -> Seq[Sequence]:
        drafter, seqs = guard(make(), model), [Sequence(TEXT, params, stream=branch) for branch in branches]
        step(seqs, model, drafter, RULES["rejection"], 2)
        for seq in seqs:
            step([seq], model, drafter, RULES["rejection"], 2)
        return seqs

    (texts,) = enumerate_runs(run, Branch(start=len(TEXT) + 1))
    assert texts.accepted > (0.1 if guard is Guard else 0)
    return texts.error(Oracle(target()), TEXT, params)


@pytest.mark.parametrize("name", CASES)
def test_a_fault_after_a_drawn_token_leaves_the_distribution_as_it_is(name: str) -> None:
    """Up to the float32 of a call of several steps, whose logits differ from those of single steps."""
    assert error_of_drafting(name, Guard) < 1e-8
    assert error_of_drafting(name, Dropping) > 5e-4, "control"


def test_a_tree_for_a_target_that_runs_chains_only_is_cut_and_not_dropped() -> None:
    """Whether a drawn tree has siblings may depend on what was drawn."""
    params, guards = SamplingParams(temperature=1.0, max_tokens=4), list[Guard]()

    def make() -> LLM:
        chains_only = target(trees=False)
        guards.append(Guard(eagle_drafter(V, 3, shape="tree", width=2, nodes=NODES), chains_only))
        return LLM(chains_only, guards[-1], draft_tokens=2)

    (texts,) = enumerate_texts(make, TEXT, params)
    texts.check(Oracle(target()), TEXT, params)
    assert not any(guard.faults for guard in guards)
    assert texts.accepted > 0.2


def test_the_first_children_of_a_tree_are_a_chain_with_their_q() -> None:
    q = torch.eye(4, dtype=torch.float64)[[3, 0, 1, 2, 2]]
    draft = Draft(torch.tensor([3, 0, 1, 2, 2]), [-1, -1, 0, 0, -1], [0, 4, 4, 5], q)
    cut = first_children(draft)
    assert (cut.ids, cut.parents, cut.splits) == ([3, 1, 2], [-1, 0, -1], [0, 2, 2, 3])
    assert torch.equal(cut.q, q[[0, 2, 4]])
    cut = first_children(Draft(draft.tokens, draft.parents, draft.splits, acceptable=[False, True, True, True, True]))
    assert cut.ids == [0, 2]
