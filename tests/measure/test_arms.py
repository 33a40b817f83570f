"""Interleaving, pairing and the figures computed from the cells."""

from dataclasses import replace

import pytest

from slipstream.core.params import SamplingParams
from slipstream.core.stats import SpecStats
from slipstream.drafters.none import NoDrafter
from slipstream.llm import LLM
from slipstream.measure import arms as measured_arms
from slipstream.measure.arms import Arm, Cell, count_passes, line_up, load_weights_once, race
from slipstream.measure.estimates import Estimate
from tests.targets.toy import ToyTarget

PROMPTS = [[1, 2, 3], [4, 5], [6], [2, 2, 7]]


@pytest.fixture
def llm() -> LLM:
    return LLM(ToyTarget(vocab=16, sharpness=3.0), draft_tokens=4)


def pair(llm: LLM, **common) -> list[Arm]:
    plain = Arm("plain", llm, params=SamplingParams(max_tokens=6), **common)
    return [plain, Arm("ngram", llm, "ngram", 3, params=plain.params, against=plain, **common)]


def test_every_arm_runs_in_every_round_and_takes_turns(llm, monkeypatch):
    order, calls = [], []
    decode = measured_arms.decode
    monkeypatch.setattr(measured_arms, "decode", lambda arm, *rest: (order.append(arm.name), decode(arm, *rest))[1])
    runs = line_up(pair(llm), PROMPTS)
    race(runs, 4, advance=lambda: calls.append(1))
    assert len(calls) == count_passes(runs, 4) == 2 * 4 * 5
    assert [len(row) for run in runs for row in run.cells] == [4] * 8
    timed = order[8:]
    assert timed[:4] == ["plain", "ngram"] * 2
    assert timed[8:12] == ["ngram", "plain"] * 2  # the order rotates with each round


def test_a_wrong_text_is_found_in_any_round(llm, monkeypatch):
    generate, calls = LLM.generate, []

    def wrong(self, prompts, params=None):
        done = generate(self, prompts, params)
        calls.append(1)
        if len(calls) == 2 + 2 + 4 + 1:  # warm-up of both arms, the first round, and now the second arm comes first
            done[0].token_ids[2] ^= 1
        return done

    monkeypatch.setattr(LLM, "generate", wrong)
    runs = line_up(pair(llm), PROMPTS[:2])
    race(runs, 3)
    assert [(run.arm.name, i, d.position) for run in runs for i, d in run.divergences] == [("ngram", 0, 2)]
    assert not runs[1].exact


def test_batches_keep_to_their_category_and_are_decoded_at_once(llm):
    runs = line_up(pair(llm, batch=2), PROMPTS, ["a", "b", "a", "a"])
    assert runs[0].groups == [[0, 2], [3], [1]]
    race(runs, 1)
    assert [row[0].tokens for row in runs[0].cells] == [12, 6, 6]
    assert runs[0].texts == runs[1].texts
    assert (runs[1].exact, runs[1].divergences) == (True, [])
    assert llm.max_batch == 8  # as it was


def test_all_arms_sample_with_the_same_seeds_and_rounds_differ(llm):
    params, seen = SamplingParams(max_tokens=8, temperature=1.0), {}
    arms = [Arm("a", llm, params=params), Arm("b", llm, params=params)]
    generate = llm.generate

    def note(prompts, given):
        done = generate(prompts, given)
        seen.setdefault(tuple(prompts[0]), []).append(tuple(done[0].token_ids))
        return done

    llm.generate = note
    race(line_up(arms, PROMPTS[:1]), 3)
    texts = seen[tuple(PROMPTS[0])]
    assert [a == b for a, b in zip(texts[::2], texts[1::2], strict=True)] == [True] * 4
    assert len(set(texts)) > 1


def test_named_drafters_are_recreated_and_drafters_with_weights_are_kept(llm):
    named, options = load_weights_once(llm, "ngram", {"max_ngram": 3})
    assert (named, options) == ("ngram", {"max_ngram": 3})
    arm = Arm("ngram", llm, named, 3, options)
    assert arm.prepare() is not arm.prepare()
    kept = NoDrafter()
    assert load_weights_once(llm, kept)[0] is kept
    assert Arm("own", llm, kept).prepare() is kept
    stack, _ = load_weights_once(llm, ["ngram", kept])
    assert stack == ["ngram", kept]
    arm = Arm("stack", llm, stack, 3)
    assert arm.prepare().members[1] is arm.prepare().members[1] is kept


def test_at_least_three_rounds_are_run_and_none_begins_after_the_time_limit(llm):
    runs = line_up(pair(llm), PROMPTS[:1])
    race(runs, 9, seconds=0)
    assert runs[0].rounds == 3


def cell(seconds: float, tokens: int, first: float = 0.1) -> Cell:
    stats = SpecStats()
    stats.count([1, 2], 1, 2)
    return Cell(seconds, tokens, first, stats)


def test_figures_from_known_cells(llm):
    runs = line_up(pair(llm), PROMPTS[:3])
    runs[0].cells = [[cell(2.0, 10)] * 3, [cell(6.0, 10)] * 3, [cell(2.0, 10)] * 3]
    runs[1].cells = [[cell(1.0, 10)] * 3, [cell(2.0, 10)] * 3, [cell(1.0, 10)] * 3]
    assert runs[0].tokens_per_second().value == pytest.approx(30 / 10)
    assert runs[1].tokens_per_second().value == pytest.approx(30 / 4)
    assert runs[1].speedup().value == pytest.approx(10 / 4)  # of the times, not the mean of 2, 3 and 2
    assert runs[1].speedup().low < 2  # a further prompt may be like the first
    assert runs[1].speedup([1]).value == pytest.approx(3)
    assert runs[0].speedup().value == 1
    assert runs[1].first_token_seconds() == pytest.approx(0.1)
    assert runs[1].seconds_per_later_token([0]) == pytest.approx(0.9 / 9)
    assert runs[1].stats().steps == 9


def test_without_drafts_it_is_plain_decoding_and_has_no_interval(llm):
    """Two ways of plain decoding of which one was faster in every pass: what is timed is chance."""
    runs = line_up(pair(llm), PROMPTS[:3])
    runs[0].cells = [[cell(1.07, 10)] * 3] * 3
    runs[1].cells = [[replace(cell(1.0, 10), stats=SpecStats(tokens=10, steps=10))] * 3] * 3
    estimate = runs[1].speedup()
    assert estimate == Estimate(pytest.approx(1.07), None, None, "no drafts")
    runs[1].cells[0] = [cell(1.0, 10)] * 3  # one prompt had drafts
    assert runs[1].speedup().low is not None
    assert runs[1].speedup([1, 2]).note == "no drafts"


def test_a_gain_without_an_accepted_token_is_chance_and_a_loss_is_one(llm):
    """Drafts that are all rejected cost time, and save none."""
    runs = line_up(pair(llm), PROMPTS[:3])
    rejected = SpecStats(tokens=10, steps=10, proposed=20)
    runs[0].cells = [[cell(1.18, 10)] * 3] * 3
    runs[1].cells = [[replace(cell(1.0, 10), stats=rejected)] * 3] * 3
    assert runs[1].speedup() == Estimate(pytest.approx(1.18), None, None, "no draft accepted")
    runs[1].cells = [[replace(cell(2.0, 10), stats=rejected)] * 3] * 3
    assert runs[1].speedup().high < 1


def test_an_unfinished_round_does_not_count(llm):
    runs = line_up(pair(llm), PROMPTS[:2])
    runs[0].cells = [[cell(1, 10)] * 2, [cell(1, 10)]]
    assert runs[0].rounds == 1
    assert runs[0].seconds_per_token().shape == (2, 1)
