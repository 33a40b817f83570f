"""`Guard`: if a drafter fails, the text is that of plain decoding; faults are counted and logged once."""

import logging
import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.target import TargetOut
from slipstream.drafters.guard import MAX_NODES, Guard
from tests.core.fake_drafters import Sampling, Scripted, finish, sequence
from tests.targets.toy import ToyTarget

PROMPT = [1, 2, 3]


class Faulty(Scripted):
    """A correct drafter whose drafts are changed by `spoiled`; may raise in `observe` and `release`."""

    name = "faulty"

    def __init__(self, target: ToyTarget, spoiled: Callable[[Draft], object], where: str = "propose"):
        super().__init__(target)
        self.spoiled, self.where = spoiled, where
        self.observed, self.released = 0, list[int]()

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        draft = super().propose(seqs, budget)
        return self.spoiled(draft) if self.where == "propose" else draft  # type: ignore[return-value]

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


def distributions(draft: Draft, value: float = 1 / 7, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full((len(draft), 7), value, dtype=dtype)


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
    "a negative id": lambda draft: replace(draft, tokens=draft.tokens - 7),
    "parents out of order": lambda draft: replace(draft, parents=[p + 1 for p in draft.parents]),
    "int32 tokens": lambda draft: replace(draft, tokens=draft.tokens.int()),
    "tokens on a device without values": lambda draft: replace(draft, tokens=draft.tokens.to("meta")),
    "q of the wrong shape": lambda draft: replace(draft, q=distributions(draft)[:, :5]),
    "q of the wrong dtype": lambda draft: replace(draft, q=distributions(draft, dtype=torch.float16)),
    "q of NaN": lambda draft: replace(draft, q=distributions(draft, math.nan)),
    "q of zeros": lambda draft: replace(draft, q=distributions(draft, 0.0)),
    "q that does not sum to one": lambda draft: replace(draft, q=distributions(draft, 0.2)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_draft_costs_speed_and_nothing_else(fault, temperature, caplog):
    """Also sampled: a step without a draft draws the same random numbers as plain decoding, so the text is the same."""
    target = ToyTarget(vocab=7, order=2, seed=3)

    def requests() -> list[Sequence]:
        return [sequence(target, PROMPT[: 2 + i], i, temperature=temperature, max_tokens=9) for i in range(2)]

    wanted = finish(requests(), target)
    seqs, guard = requests(), Guard(Faulty(target, FAULTS[fault]), target)
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        assert finish(seqs, target, guard) == wanted
    drafting = 7  # of 9 steps: not the prefill, and not the last token, which leaves no room for a draft token
    assert guard.faults == drafting
    for seq in seqs:
        assert seq.stats.drafter_faults == drafting
        assert seq.stats.proposed == seq.stats.accepted == 0
    assert len(caplog.records) == 1, "warned of once"
    assert "faulty" in caplog.text
    assert "the text is not affected" in caplog.text


def test_a_drafter_that_fails_in_observe_keeps_its_accepted_draft_tokens(caplog: pytest.LogCaptureFixture) -> None:
    target = ToyTarget(vocab=7, order=2, seed=3)
    wanted = finish([sequence(target, PROMPT, max_tokens=12)], target)
    seq, drafter = sequence(target, PROMPT, max_tokens=12), Faulty(target, fail, "observe")
    guard = Guard(drafter, target)
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        assert finish([seq], target, guard) == wanted
    assert seq.stats.acceptance_rate == 1
    assert seq.stats.drafter_faults == guard.faults == drafter.observed == seq.stats.steps
    assert len(caplog.records) == 1
    assert "observe is broken" in caplog.text


@pytest.mark.parametrize("spoiled", [lambda draft: draft, fail], ids=["at the end", "after a fault"])
def test_a_drafter_that_fails_in_release_does_no_harm(spoiled, caplog):
    target = ToyTarget(vocab=7, order=2, seed=3)
    wanted = finish([sequence(target, PROMPT, max_tokens=12)], target)

    class Stuck(Faulty):
        def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
            return spoiled(super().propose(seqs, budget))

    seq = sequence(target, PROMPT, max_tokens=12)
    guard = Guard(Stuck(target, fail, "release"), target)
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        assert finish([seq], target, guard) == wanted
        before = guard.faults
        guard.release(seq.id)
    assert guard.faults == before + 1
    assert len(caplog.records) == 1, "warned of the first fault, also if the release after it fails"


def test_after_a_fault_the_drafter_starts_again() -> None:
    target = ToyTarget(vocab=7, order=2, seed=3)
    seq, drafter = sequence(target, PROMPT, max_tokens=4), Faulty(target, fail)
    finish([seq], target, Guard(drafter, target))
    assert drafter.released == [seq.id] * 2
    drafter.released.clear()
    Guard(drafter, target).release(seq.id)
    assert drafter.released == [seq.id]


def test_a_fault_passes_and_drafting_goes_on() -> None:
    target = ToyTarget(vocab=7, order=2, seed=3)

    class Once(Scripted):
        def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
            draft = super().propose(seqs, budget)
            return fail(draft) if self.steps == 2 else draft

    wanted = finish([sequence(target, PROMPT, max_tokens=20)], target)
    seq = sequence(target, PROMPT, max_tokens=20)
    assert finish([seq], target, Guard(Once(target), target)) == wanted
    assert seq.stats.drafter_faults == 1
    assert seq.stats.accepted > 5


def test_a_correct_drafter_is_not_changed(caplog: pytest.LogCaptureFixture) -> None:
    target = ToyTarget(vocab=7, order=2, seed=3)
    for temperature in (0.0, 1.0):
        bare, guarded = (sequence(target, PROMPT, 5, temperature=temperature, max_tokens=30) for _ in range(2))
        guard = Guard(Sampling(target), target)
        finish([bare], target, Sampling(target))
        finish([guarded], target, guard)
        assert bare.output == guarded.output
        assert bare.stats.histogram == guarded.stats.histogram
        assert guard.faults == 0
    assert not caplog.records


def test_without_a_budget_the_drafter_is_not_asked() -> None:
    target = ToyTarget(vocab=7, order=2, seed=3)
    draft = Guard(Faulty(target, fail), target).propose([sequence(target)], [0])
    assert (draft.batch, len(draft)) == (1, 0)


def test_an_interrupt_is_not_swallowed() -> None:
    target = ToyTarget(vocab=7, order=2, seed=3)

    def interrupt(_: Draft) -> Draft:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish([sequence(target, PROMPT)], target, Guard(Faulty(target, interrupt), target))
