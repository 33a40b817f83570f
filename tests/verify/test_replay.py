"""`verify` replays each sampled step: a fault that no statistic of so few tokens could show is found, and nothing in
the right code.

The power is that of one wrong decision: with `n` decisions that a fault changes with probability r, it is missed with
(1 - r)^n. Each test states n r, or that the fault changes every decision of some kind. A right step is never called
wrong but where two float64 sums differ by `SLACK`: below 1e-5 for the 8,000 tokens of a run.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.core import rules as core_rules, step as core_step, warp as core_warp
from slipstream.core.dice import Dice, invert
from slipstream.core.params import SamplingParams
from slipstream.core.random import VERIFY, Stream
from slipstream.core.rules import RULES, Rule
from slipstream.core.stats import TokenLogprob
from slipstream.kv.kv_memory import KVMemory
from slipstream.llm import LLM
from slipstream.measure.prompts import Prompt, PromptSet
from slipstream.verify.panel_requests import PanelRequest, cross_requests
from slipstream.verify.reference import wrong_logprob
from slipstream.verify.replay import EndStream, numbers
from slipstream.verify.verification import Checks, VerifyConfig
from tests.drafters.scripted_drafters import RandomDrafter
from tests.targets.toy import ToyTarget
from tests.tiny_checkpoints import make_model
from tests.verify.nearby_drafter import PROMPTS, VOCAB, NearbyDrafter

FEW = VerifyConfig(checks=("distribution",), texts=1, reach=0)


def faults(config: VerifyConfig = FEW, target: ToyTarget | None = None, rule: Rule | None = None) -> list[str]:
    """What single steps of a run have wrong. (Statistics of so few tokens are not looked at.)"""
    target = target or ToyTarget(vocab=VOCAB, sharpness=1.0)
    llm = LLM(target, NearbyDrafter(target), draft_tokens=4)
    llm._rule = rule or llm.rule
    checks = Checks(llm, PROMPTS, config)
    checks.control()
    checks.distribution()
    return checks.data.faults


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_wrong_with_the_right_steps(seed):
    assert faults(replace(FEW, seed=seed)) == []


def test_a_residual_of_few_bits_is_found(monkeypatch):
    """Four significant bits change a token in one of ten rejections: n r = 15."""
    right = core_rules._normalise
    monkeypatch.setattr(
        core_rules, "_normalise", lambda mass, other: right(mass.to(torch.float8_e4m3fn).double(), other)
    )
    assert "random numbers give id" in faults()[0]


def test_a_number_of_zero_that_accepts_an_impossible_token_is_found(monkeypatch):
    """A usual run draws a 0 once in 2^53 numbers. Half of the numbers of some requests are 0: n r = 50."""

    def accept(self, probability):
        self._column += 1
        return [u <= p for u, p in zip(self._uniforms(self._column).tolist(), probability, strict=True)]

    monkeypatch.setattr(Dice, "accept", accept)
    assert "which the target cannot emit there" in faults()[0]


@pytest.mark.parametrize("bits", [12, 24])
def test_random_numbers_of_few_bits_are_found(bits, monkeypatch):
    """Every number differs."""
    right = Stream.uniforms

    def coarse(self, purpose, position, n):
        drawn = right(self, purpose, position, n)
        return np.floor(drawn * 2**bits) / 2**bits if purpose == VERIFY else drawn

    monkeypatch.setattr(Stream, "uniforms", coarse)
    assert "are not those of its seed" in faults()[0]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 11, 2**64 - 1])
@pytest.mark.parametrize("kind", [Stream, EndStream])
def test_the_numbers_of_a_seed_are_computed_a_second_time(kind, seed):
    stream = kind(seed)
    stream.nonce = 3
    assert np.array_equal(stream.uniforms(VERIFY, 130, 9), numbers(stream, VERIFY, 130, 9))
    assert set(EndStream(5).uniforms(VERIFY, 1, 50)) == {0.0, 1 - 2**-53}


def test_numbers_of_the_step_before_are_found(monkeypatch):
    """After a rejection the next step begins with the number that chose: all such steps, n r = 500 times 0.8."""
    right = core_step.dice

    def again(seqs, draft):
        counts = [len(draft.nodes(b)) for b in range(len(seqs))]
        return Dice([s.random for s in seqs], [len(s.tokens) - (s.proposers[-1:] == [None]) for s in seqs], counts)

    monkeypatch.setattr(core_step, "dice", again)
    assert right is not again
    assert "random numbers give id" in faults()[0]


def test_requests_without_a_seed_that_share_one_are_found(monkeypatch):
    right = Stream.__init__
    monkeypatch.setattr(Stream, "__init__", lambda own, seed=None: right(own, 12345 if seed is None else seed))
    assert "two requests without a seed have the same random numbers" in faults()


def test_a_bonus_token_of_the_draft_is_found(monkeypatch):
    """After a whole draft of 3 or more, which some 20 of the texts have: each shows it with 0.3."""
    right = RULES["rejection"]

    def decide(draft, probs, dice):
        paths, following = right.decide(draft, probs, dice)
        for b in range(draft.batch):
            if len(draft.nodes(b)) >= 3 and len(paths[b]) == len(draft.nodes(b)):
                u = torch.tensor([float(dice._uniforms(0)[b])], dtype=torch.float64)
                following[b] = int(invert(draft.q[draft.splits[b + 1] - 1][None], u)[0])
        return paths, following

    assert "random numbers give id" in faults(rule=replace(right, decide=decide))[0]


def test_a_nucleus_of_the_wrong_temperature_is_found(monkeypatch):
    """Only requests with a filter and another temperature than 1 show it: one of the settings has both."""
    right = core_warp.warp

    def wrong(logits, params, *rest, **named):
        if params.greedy or params.top_p == 1:
            return right(logits, params, *rest, **named)
        kept = right(logits, replace(params, temperature=1.0), *rest, **named) > 0
        p = right(logits, replace(params, top_p=1.0), *rest, **named) * kept
        return p / p.sum(-1, keepdim=True)

    monkeypatch.setattr(core_warp, "warp", wrong)
    assert faults(replace(FEW, texts=2))


def test_a_minimum_that_is_measured_by_other_rows_is_found(monkeypatch):
    right = core_warp.warp

    def wrong(logits, params, *rest, **named):
        if params.greedy or not params.min_p:
            return right(logits, params, *rest, **named)
        p = right(logits, replace(params, min_p=0.0), *rest, **named)
        kept = p.masked_fill(p < params.min_p * p.amax(), 0.0)
        return torch.where(kept.sum(-1, keepdim=True) > 0, kept / kept.sum(-1, keepdim=True), p)

    monkeypatch.setattr(core_warp, "warp", wrong)
    assert faults(replace(FEW, texts=2))


def test_rejected_draft_tokens_that_count_for_penalties_are_found(monkeypatch):
    right_record, right_penalty, right_warped, gone, current = (
        core_step.record, core_warp._penalise, core_warp._warp_rows, {}, [0],
    )  # fmt: skip

    def record(seqs, draft, out, verdict):
        for b, seq in enumerate(seqs):
            nodes = [n for n in range(len(draft.nodes(b))) if n not in verdict.path[b]]
            gone[seq.id] = [draft.ids[draft.splits[b] + n] for n in nodes]
        right_record(seqs, draft, out, verdict)

    def warped(logits, seq, params, outputs):
        current[0] = seq.id
        return right_warped(logits, seq, params, outputs)

    def penalise(row, params, prompt, output):
        right_penalty(row, params, prompt, [*output, *gone.get(current[0], [])])

    monkeypatch.setattr(core_step, "record", record)
    monkeypatch.setattr(core_warp, "_warp_rows", warped)
    monkeypatch.setattr(core_warp, "_penalise", penalise)
    assert faults(replace(FEW, texts=2))


class LateShift(ToyTarget):
    """In passes with drafts, logits are those of other tokens once a text is long: as of a wrong position or mask."""

    def run(self, seqs, draft, taps=()):
        out = super().run(seqs, draft, taps)
        for b, seq in enumerate(seqs):
            if len(draft.nodes(b)) and len(seq.tokens) > 40 and seq.params.temperature:
                out.logits[draft.splits[b] + b + 1 : draft.splits[b + 1] + b + 1] += 0.05 * torch.arange(VOCAB)
        return out


def test_logits_that_differ_in_passes_with_a_draft_are_found():
    """Every such row does, and the rule decides rightly on it."""
    assert "logits before token" in faults(target=LateShift(vocab=VOCAB, sharpness=1.0))[0]


def test_log_probabilities_are_checked_with_their_alternatives():
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    top = ((0, logits[0]), (1, logits[1]))
    assert wrong_logprob(logits, 1, TokenLogprob(1, logits[1], top), 0.0) is None
    assert "of id 1, it is" in wrong_logprob(logits, 1, TokenLogprob(1, logits[1] - 0.1, top), 0.0)
    assert "of id 2" in wrong_logprob(logits, 1, TokenLogprob(1, logits[1], (top[0], (2, logits[2]))), 0.0)
    assert "in place of" in wrong_logprob(logits, 1, TokenLogprob(2, logits[1]), 0.0)


def test_texts_are_crossed_at_a_block():
    requests = [PanelRequest(str(i), [10 * i + n for n in range(5)], SamplingParams()) for i in (1, 1, 2, 2)]
    each = cross_requests(requests, [[1, 2, 3]] * 4, 4)
    assert [one.ids for one in each] == [[20, 21, 22, 23, 14, 1, 2, 3]] * 2 + [[10, 11, 12, 13, 24, 1, 2, 3]] * 2
    assert cross_requests(requests, [[]] * 4, 4) == []


@pytest.mark.parametrize("planted", [False, True])
def test_a_prefix_that_is_found_by_its_last_block_alone_is_found(planted, monkeypatch, tmp_path: Path):
    """Every crossed text of 64 tokens or more reads keys and values of another beginning."""
    make_model(tmp_path / "m")
    llm = LLM(tmp_path / "m", executor="torch", dtype="float64", device="cpu", draft_tokens=2)
    drafter = RandomDrafter(llm.target.vocab_size)
    llm.use(drafter)
    prompts = PromptSet("made up", [Prompt([(7 * i + n) % 90 for n in range(80)], "a", str(i)) for i in range(2)], "0")

    def keys(self, tokens):
        for end in range(self.block, len(tokens) + 1, self.block):
            yield np.asarray(tokens[end - self.block : end]).tobytes()

    if planted:
        monkeypatch.setattr(KVMemory, "_keys", keys)
    checks = Checks(llm, prompts, replace(FEW, params=SamplingParams(max_tokens=4)))
    checks.control()
    checks.distribution()
    assert any("crossed: logits before token" in fault for fault in checks.data.faults) == planted
