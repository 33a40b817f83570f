"""`verify` finds planted faults with its default settings, and nothing in the same code without them.

To be quick, most tests leave out the long text; to see which tokens are lost, one samples more texts.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.core import rules as core_rules, step as core_step, warp as core_warp
from slipstream.core.drafter import Budget
from slipstream.core.random import Stream
from slipstream.core.rules import RULES, Rule
from slipstream.core.sequence import Sequence
from slipstream.llm import LLM
from slipstream.verify.verification import VerifyConfig, verify
from tests.core.wrong import chain_rule
from tests.targets.toy import ToyTarget
from tests.verify.nearby_drafter import PROMPTS, VOCAB, NearbyDrafter


class SureDrafter(NearbyDrafter):
    """Makes likely tokens too likely, so that rare ones come from the residual distribution."""

    def near(self, text):
        if text not in self.known:
            row = torch.softmax(1.6 * self.target.logits(text), -1)
            self.known[text] = row, row.cumsum(0).numpy()
        return self.known[text]


class PricedDrafter(SureDrafter):
    """Ends a draft before the first token that is not worth its row, by the highest probability of its distribution;
    wrongly: by that of the token that was drawn."""

    by_drawn = False

    def __init__(self, target):
        super().__init__(target)
        self.traits = replace(self.traits, prices_rows=True)

    def propose(self, seqs, budgets):
        draft, worth = super().propose(seqs, budgets), []
        for b, budget in enumerate(budgets):
            sure = [float(draft.q[i, draft.ids[i]] if self.by_drawn else draft.q[i].max()) for i in draft.nodes(b)]
            ends = [n for n, q in enumerate(sure) if budget.row_costs and q < budget.row_cost(n)]
            worth.append(Budget(ends[0] if ends else len(sure)))
        return super().propose(seqs, worth)


class ByDrawnToken(PricedDrafter):
    by_drawn = True


def planted(**fault) -> Rule:
    return chain_rule("planted", **fault, tokenwise=True)  # under another name, so that its steps are not replayed


DEFAULT = VerifyConfig(checks=("distribution",))
QUICK = replace(DEFAULT, reach=0)


def found(rule: Rule | None = None, config: VerifyConfig = QUICK, drafter=NearbyDrafter, **made) -> dict:
    target = ToyTarget(vocab=VOCAB, **{"sharpness": 1.0} | made)
    llm = LLM(target, drafter(target), draft_tokens=4)
    llm._rule = rule or llm.rule
    return verify(llm, PROMPTS, config).data


POOLED = {"behind a draft token", "all positions", "late positions", "chosen lengths"}


def faulty_places(data: dict) -> set[str]:
    assert data.verdict == ("BUG" if any(row.verdict == "BUG" for row in data.distribution) else "ok")
    return {row.place for row in data.distribution if row.verdict == "BUG"} - POOLED


@pytest.mark.parametrize("seed", range(3))
def test_the_right_rule_passes(seed):
    data = found(planted(), replace(QUICK, seed=seed))
    assert data.verdict == "ok"
    assert {row.place for row in data.distribution if row.verdict == "no difference seen"} >= {
        "draft token 1", "draft token 2", "draft token 3 or deeper", "bonus token",
    }  # fmt: skip


FAULTS = {
    "a bonus token from the wrong row": ({"bonus": 0}, {"bonus token"}),
    "always accepted from depth 3 on": (
        {"accept": lambda p, q, depth: p / q if depth < 3 else torch.ones_like(p)}, {"draft token 3 or deeper"},
    ),
    "accepted a fifth too often": ({"accept": lambda p, q, depth: 1.2 * p / q}, None),
    "accepted a tenth too often": ({"accept": lambda p, q, depth: p / q + 0.1}, None),
    "the residual of a neighbouring row": ({"neighbour": 1}, None),
}  # fmt: skip
"""What is wrong -> arguments of `chain_rule`, and all places where it shows; None: the first draft token is one."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_rule_is_found_where_it_is_wrong(name):
    fault, places = FAULTS[name]
    shown = faulty_places(found(planted(**fault)))
    assert shown == places if places else "draft token 1" in shown


def test_a_temperature_that_is_wrong_for_plain_and_speculative_decoding_alike_is_found(monkeypatch):
    right = core_warp.warp

    def wrong(logits, params, *rest, **named):
        return right(logits, replace(params, temperature=1.5 * params.temperature), *rest, **named)

    monkeypatch.setattr(core_warp, "warp", wrong)
    assert "draft token 1" in faulty_places(found())


def outcomes_below(data: dict, level: float) -> set[str]:
    return {name for row in data.distribution for name, p in row.outcomes.items() if p < level}


def test_a_residual_that_has_lost_its_rare_tokens_is_found(monkeypatch):
    """In 15 texts, rare tokens are too few by 7.5 standard deviations: a power of 0.998 for that outcome."""
    right = core_rules._without

    def wrong(draft, p, packed):
        rest = right(draft, p, packed)
        rest = torch.where(rest < 0.05, 0.0, rest)
        return rest / rest.sum(-1, keepdim=True)

    sure = {"drafter": SureDrafter, "sharpness": 1.7, "config": replace(QUICK, texts=15)}
    assert found(**sure).verdict == "ok"
    monkeypatch.setattr(core_rules, "_without", wrong)
    data = found(**sure)
    assert data.verdict == "BUG"
    assert "below 1 %" in outcomes_below(data, 1e-5)


def test_an_end_of_text_that_is_half_as_likely_after_a_draft_token_is_found(monkeypatch):
    """In 20 texts, p was below 1e-9 with each of six seeds; in 10, it was above 1e-3 with one of them."""
    right = core_step.distributions

    def wrong(logits, seqs, draft):
        probs = right(logits, seqs, draft)
        rows = sorted(set(range(len(probs))) - {draft.splits[b] + b for b in range(len(seqs))})
        probs[np.ix_(rows, sorted(seqs[0].stop_ids))] /= 2
        return probs / probs.sum(-1, keepdim=True)

    sure = {"eos_ids": (3,), "config": replace(QUICK, texts=20)}
    assert found(**sure).verdict == "ok"
    monkeypatch.setattr(core_step, "distributions", wrong)
    data = found(**sure)
    assert data.verdict == "BUG"
    assert "ends the text" in outcomes_below(data, 1e-3)


def test_a_text_that_is_one_token_too_long_is_found(monkeypatch):
    monkeypatch.setattr(Sequence, "limit", property(lambda s: min(s.context, s.prompt + s.params.max_tokens + 1)))
    data = found()
    assert data.verdict == "BUG"
    assert "it should after" in data.faults[0]


def test_random_numbers_that_two_requests_share_are_found(monkeypatch):
    right = Stream.uniforms
    monkeypatch.setattr(Stream, "uniforms", lambda own, *place: right(Stream(7), *place))
    data = found()
    assert {row.place for row in data.distribution if row.verdict == "BUG"} >= {"between requests"}


@pytest.mark.parametrize(("drafter", "verdict"), [(PricedDrafter, "ok"), (ByDrawnToken, "BUG")])
def test_a_draft_that_ends_by_the_token_that_was_drawn_is_found(drafter, verdict):
    """It does where lengths are chosen only."""
    data = found(drafter=drafter)
    assert data.verdict == verdict
    bugs = {row.place for row in data.distribution if row.verdict == "BUG"}
    assert ("chosen lengths" in bugs) == (verdict == "BUG")


def test_a_fault_far_into_a_text_is_found(monkeypatch):
    """Only the long text, and what continues it, has as many tokens."""
    right = core_step.stop

    def wrong(seqs, draft, verdict):
        following = [0 if len(s.tokens) > 340 else n for s, n in zip(seqs, verdict.next, strict=True)]
        return right(seqs, draft, replace(verdict, next=following))

    monkeypatch.setattr(core_step, "stop", wrong)
    rows = found(config=DEFAULT).distribution
    assert "late positions" in {row.place for row in rows if row.verdict == "BUG"}


def test_a_rule_that_decides_on_whole_chains_is_tested_over_all_positions():
    data = found(RULES["block"], DEFAULT)
    assert {row.place for row in data.distribution} == {
        "all positions", "late positions", "chosen lengths", "between requests",
    }  # fmt: skip
    assert data.verdict == "ok"
