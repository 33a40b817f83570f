"""`RowDrafts`: drafts for an engine that shows its batch as rows."""

import random
from collections.abc import Callable, Sequence as Seq

import pytest

from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget
from slipstream.core.sequence import Sequence
from slipstream.drafters.suffix import SuffixConfig, SuffixDrafter
from slipstream.integrations.row_drafts import RowDrafts
from slipstream.integrations.vllm import make_lookup
from tests.integrations.batch_engine import VOCAB, BatchEngine, Running, novel, repetitive
from tests.measure.clock import Still

LOOKUPS = ["suffix", "ngram", "suffix,ngram"]


def requests(count: int) -> list[Running]:
    texts = [repetitive(seed, 200) for seed in range(count)]
    return [Running(f"r{i}", text[:80], text[80:]) for i, text in enumerate(texts)]


def full(name: str = "suffix", **options: object) -> RowDrafts:
    return RowDrafts(make_lookup(VOCAB, name, options), 8, 4096, timed=False)


def learned(clock: Callable[[], float], drafter: SuffixDrafter | None = None, timed: bool = True) -> RowDrafts:
    return RowDrafts(drafter or make_lookup(VOCAB), 8, 4096, timed=timed, clock=clock)


@pytest.mark.parametrize("name", LOOKUPS)
def test_drafts_are_accepted_in_repetitive_texts_whatever_the_batch_does(name: str) -> None:
    engine = BatchEngine(full(name), preempted=0.2, dropped=0.2)
    engine.run(requests(7))
    assert engine.accepted > 0.5 * engine.verified > 100


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_row_is_drafted_for_as_if_it_were_alone(name: str) -> None:
    together = BatchEngine(full(name), shuffled=False)
    together.run(requests(3))
    alone = [BatchEngine(full(name), shuffled=False) for _ in range(3)]
    for engine, request in zip(alone, requests(3), strict=True):
        engine.run([request])
    assert together.verified == sum(engine.verified for engine in alone)
    assert together.accepted == sum(engine.accepted for engine in alone)


def test_ranks_with_clocks_of_their_own_draft_alike_with_full_lengths() -> None:
    engines = [BatchEngine(learned(clock, timed=False)) for clock in (Still(), random.Random(3).random)]
    for engine in engines:
        engine.run(requests(5))
    assert engines[0].calls == engines[1].calls


def test_finished_requests_are_forgotten() -> None:
    engine = BatchEngine(full(across=True))
    engine.run(requests(6))
    engine.drafts.propose([], set())
    assert len(engine.drafts) == 0
    drafter = engine.drafts.drafter
    assert not drafter._states
    assert not engine.drafts._asked


def test_outputs_of_finished_requests_are_drafted_from_with_across_only() -> None:
    text = novel(1)
    rates = []
    for across in (True, False):
        drafts = full(across=across)
        for turn in range(2):
            engine = BatchEngine(drafts)
            engine.run([Running(f"t{turn}", novel(2 + turn, 20), text)])
        rates.append(engine.accepted)
    assert rates[0] > 80
    assert rates[1] == 0


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_prediction_is_drafted_from(name: str) -> None:
    text = novel(1)
    engine = BatchEngine(full(name))
    engine.run([Running("p", novel(2, 20), text, prediction=text)])
    assert engine.accepted > 80
    assert engine.steps < 40


def test_a_request_that_begins_anew_under_the_same_id_is_read_anew() -> None:
    drafts = full()
    for seed in (1, 2):
        engine = BatchEngine(drafts)
        engine.run([Running("same", repetitive(seed, 80), repetitive(seed, 60))])
        assert engine.accepted > 20


def paced(cost: float, drafts: RowDrafts, clock: Still, running: Seq[Running]) -> BatchEngine:
    """An engine whose step takes 1 + cost * rows, at the end of these requests."""

    def forward(rows: int) -> None:
        clock.now += 1 + cost * rows

    engine = BatchEngine(drafts, forward=forward)
    engine.run(running)
    return engine


def seldom_right(count: int) -> list[Running]:
    """Few different tokens: something is always found, and it is hardly ever right."""
    rng = random.Random(5)
    return [Running(f"{i}", [rng.randrange(6) for _ in range(60)], [rng.randrange(6) for _ in range(1500)])
            for i in range(count)]  # fmt: skip


class Silent(SuffixDrafter):
    """Proposes nothing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return Draft.empty(len(seqs))


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(("cost", "share"), [(0.25, 1.03), (0.0, 0.92)])
def test_learned_lengths_end_where_drafts_do_not_pay(cost: float, share: float, streams: int) -> None:
    spent, emitted = [], []
    for kind in (SuffixDrafter, Silent):
        clock = Still()
        drafts = learned(clock, kind(SuffixConfig(row_cost=0.0)))
        emitted.append(paced(cost, drafts, clock, seldom_right(streams)).emitted)
        spent.append(clock.now)
    assert emitted[0] == emitted[1]
    assert spent[0] < share * spent[1]


@pytest.mark.parametrize("streams", [1, 8])
def test_short_texts_that_repeat_are_drafted_as_far_as_with_full_lengths(streams: int) -> None:
    """A row is compared with what its batch gains at the speed that it has with drafts; a request begins with what
    earlier ones have shown."""
    spent = []
    for timed in (True, False):
        clock = Still()
        drafts = learned(clock, timed=timed)
        for turn in range(4):
            texts = [repetitive(seed + streams * turn, 140) for seed in range(streams)]
            paced(0.06, drafts, clock, [Running(f"{turn}, {i}", text[:80], text[80:]) for i, text in enumerate(texts)])
        spent.append(clock.now)
    assert spent[0] < 1.02 * spent[1]


@pytest.mark.parametrize("cost", [0.02, 0.2])
def test_texts_that_repeat_are_drafted_after_texts_that_do_not(cost: float) -> None:
    """What was learned from one kind of text does not keep the other from being drafted."""
    clock = Still()
    drafts = learned(clock)
    paced(cost, drafts, clock, seldom_right(2))
    engine = paced(cost, drafts, clock, [Running("late", repetitive(3, 80), repetitive(3, 120))])
    assert engine.accepted > 60


def test_the_time_in_which_an_engine_was_idle_is_no_cost() -> None:
    clock = Still()
    drafts = learned(clock)
    for turn in range(3):
        clock.now += 1000.0
        paced(0.1, drafts, clock, [Running(f"{turn}", repetitive(1, 80), repetitive(1, 60))])
    assert drafts._forward.of(1) < 2.0
