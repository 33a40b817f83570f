"""`verify` passes correct programs and finds planted faults."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2, ncx2

from slipstream.bench.prompts import Prompt, PromptSet
from slipstream.bench.results import read
from slipstream.core import step as core_step
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT
from slipstream.core.rules import follow
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.targets.huggingface.huggingface_target import of_module
from slipstream.verify import distribution
from slipstream.verify.checks import Checks, VerifyConfig
from slipstream.verify.distribution import Cells, cells, distribution_test, noncentral_sf, sample, shift_seen
from slipstream.verify.panel_requests import Request
from slipstream.verify.texts import Control, control, wrong_token
from slipstream.verify.verification import steps, verify
from tests.core.wrong import FAULTS, chain_rule
from tests.drafters.scripted_drafters import RandomDrafter
from tests.targets.huggingface.encoder_decoders import random_encoder_decoder
from tests.targets.toy import ToyTarget

PROMPTS = PromptSet("made up", [Prompt([1, 2], "a", "one"), Prompt([3, 4, 0], "a", "two")], "0")
FEW = VerifyConfig(params=SamplingParams(max_tokens=24), samples=100, batch=100, distribution_prompts=1, texts=3)
SMALL = replace(FEW, samples=1000, batch=1000)
JOINT = replace(SMALL, checks=("distribution",), texts=1, reach=0)


def toy(drafter=None, rule="rejection", **target) -> LLM:
    made = ToyTarget(vocab=5, sharpness=1.0, **target)
    return LLM(made, drafter or RandomDrafter(5), draft_tokens=3, rule=rule)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_lossless_rules_pass(rule):
    result = verify(toy(rule=rule), PROMPTS, SMALL)
    data = result.data
    assert data["verdict"] == "ok"
    assert data["control"]["verdict"] == "identical"
    assert {row["verdict"] for row in (*data["greedy"], *data["coupled"])} == {"identical"}
    assert [row["verdict"] for row in data["distribution"]] == ["no difference seen"]
    assert 0 < data["distribution"][0]["smallest_bias"] < 0.2
    assert result.complete
    assert not result.warnings


@pytest.fixture(scope="module")
def encoder_decoder() -> LLM:
    target, draft = (of_module(random_encoder_decoder("bart", noise=noise)) for noise in (0.0, 0.1))
    return LLM(target, draft, draft_tokens=3)


@pytest.mark.parametrize("planted", [False, True])
def test_an_encoder_decoder_passes_and_a_fault_in_what_it_reads_is_found(planted, encoder_decoder, monkeypatch):
    """BART ends each text at its limit by force. The fault: with drafts, every text answers the first source."""
    target = encoder_decoder.target
    prompts = PromptSet("made up", [Prompt([5, 9, 33], "a", "one"), Prompt([10, 20, 30, 40], "b", "two")], "0")
    config = replace(FEW, checks=("greedy", "coupled"), params=SamplingParams(max_tokens=12), texts=2)
    if planted:
        run = target.run

        def confused(seqs, draft, taps=()):
            for seq in seqs if len(draft) and target.sources._held else ():
                target.sources._held[seq.id] = next(iter(target.sources._held.values()))
            return run(seqs, draft, taps)

        monkeypatch.setattr(target, "run", confused)
    data = verify(encoder_decoder, prompts, config).data
    assert data["control"]["verdict"] in ("identical", "rounding")
    assert data["verdict"] == ("BUG" if planted else "ok")


class SkewedDrafter(RandomDrafter):
    """Samples from one distribution after every text, and reports it. (With a uniform one, fault A would cause no
    bias.)"""

    probs = torch.tensor([0.5, 0.25, 0.15, 0.05, 0.05], dtype=torch.float64)

    def propose(self, seqs, budget):
        rows = [
            torch.bucketize(torch.from_numpy(seq.random.uniforms(DRAFT, len(seq.tokens), n)), self.probs.cumsum(0)[:-1])
            for seq, n in zip(seqs, budget, strict=True)
        ]
        return Draft.chains([row.tolist() for row in rows], self.probs.expand(sum(budget), 5).contiguous())


class LyingDrafter(RandomDrafter):
    """Samples uniformly and reports another distribution."""

    def propose(self, seqs, budget):
        draft = super().propose(seqs, budget)
        lie = torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64).expand(len(draft), 5)
        return Draft(draft.tokens, draft.parents, draft.splits, lie.contiguous())


class ArgmaxDrafter(RandomDrafter):
    """Fault E: always the most probable token, with the softmax as q."""

    def propose(self, seqs, budget):
        rows = [[0] * depth for depth in budget]
        q = torch.tensor([0.4, 0.15, 0.15, 0.15, 0.15], dtype=torch.float64).expand(sum(budget), 5)
        return Draft.chains(rows, q.contiguous())


@pytest.mark.parametrize("drafter", [LyingDrafter(5), ArgmaxDrafter(5)])
def test_a_q_that_is_not_what_was_sampled_from_is_a_bug(drafter):
    row = verify(toy(drafter), PROMPTS, JOINT).data["distribution"][0]
    assert row["verdict"] == "BUG"
    assert min(row["p"], row["second_p"] or 1.0) < row["level"]
    assert row["largest"][0]["expected"] != pytest.approx(row["largest"][0]["counted"], rel=0.1)


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_rules_are_bugs(name):
    llm = toy(SkewedDrafter(5))
    llm._rule = chain_rule("planted", **FAULTS[name], lossless=True)
    found = verify(llm, PROMPTS, replace(JOINT, samples=2000, batch=2000))
    assert found.data["verdict"] == "BUG"
    assert llm.rule.name == "planted"


def test_the_same_code_with_the_correct_rule_has_no_bug():
    llm = toy(SkewedDrafter(5))
    llm._rule = chain_rule("planted", lossless=True)
    found = verify(llm, PROMPTS, replace(JOINT, samples=2000, batch=2000))
    assert found.data["verdict"] == "ok"


def test_a_lossy_rule_differs_and_is_no_bug():
    found = verify(toy(rule="typical"), PROMPTS, SMALL)
    assert found.data["verdict"] == "lossy"
    assert "lossy" in found.warnings[0]


def test_a_wrong_greedy_is_a_bug(monkeypatch):
    """Accepts the second best token if it is drafted."""

    def second_best(draft, picks):
        if len(draft):
            return follow(draft, [(pick + 1) % 5 for pick in picks])
        return follow(draft, picks)

    monkeypatch.setattr(core_step, "follow", second_best)
    rows = verify(toy(), PROMPTS, replace(FEW, checks=("greedy",))).data["greedy"]
    assert {(row["draft_tokens"], row["batch"]) for row in rows if row["verdict"] == "BUG"} == {
        (3, 1), (1, 2), (2, 2), (3, 2), (3, 5),
    }  # fmt: skip
    assert rows[0]["divergence"]["margin"] > 2 * rows[0]["divergence"]["noise"]


class Shifty(ToyTarget):
    """A target whose logits depend on the other rows of the pass, by `size`."""

    size = 1e-9

    def run(self, seqs, draft, taps=()):
        out = super().run(seqs, draft, taps)
        if len(draft):
            out.logits.add_(self.size * torch.sin(torch.arange(out.logits.numel())).reshape(out.logits.shape))
        return out


class ShiftyState(Shifty):
    size = 3.0


def test_the_control_distinguishes_rounding_from_a_wrong_target():
    text = LLM(ToyTarget(vocab=5), draft_tokens=4).generate([[1, 2]], SamplingParams(max_tokens=6))[0].token_ids
    small, large = (control(kind(vocab=5), [1, 2], text, 3) for kind in (Shifty, ShiftyState))
    assert (small.verdict, small.positions, small.flips) == ("rounding", 6, 0)
    assert 0 < small.noise < 1e-8
    assert (large.verdict, large.noise > 1) == ("BUG", True)
    llm = LLM(ShiftyState(vocab=5), RandomDrafter(5), draft_tokens=2)
    assert verify(llm, PROMPTS, replace(FEW, checks=())).data["verdict"] == "BUG"


def test_plain_text_that_is_not_the_targets_best_is_a_bug(monkeypatch):
    """A fault of both plain and speculative decoding is found by no comparison of texts."""
    monkeypatch.setattr(core_step, "first_maxima", lambda logits: logits.topk(2).indices[:, 1].tolist())
    found = verify(toy(), PROMPTS, replace(FEW, checks=("greedy",)))
    assert {row["verdict"] for row in found.data["greedy"]} == {"identical"}
    assert "token 0 is id" in found.data["faults"][0]
    assert (found.data["control"]["verdict"], found.data["verdict"]) == ("BUG", "BUG")


def test_rounding_at_the_edge_of_a_filter_is_no_fault():
    """The text's token is one that the reference drops, and whether it does hangs on less than the noise."""
    llm = LLM(ToyTarget(vocab=5, sharpness=1.0), draft_tokens=4, rule="coupled")
    params = SamplingParams(temperature=1.0, top_k=2, seed=3, max_tokens=1)
    [text] = [done.token_ids for done in llm.generate([[1, 2]], params)]
    request = Request("x", [1, 2], params)
    kept = torch.topk(llm.target.logits([1, 2]), 2).indices.tolist()
    dropped = next(token for token in range(5) if token not in kept)
    assert wrong_token(llm, request, text, 0.0) is None
    assert "token 0 is id" in wrong_token(llm, request, [dropped], 0.0)
    assert wrong_token(llm, request, [dropped], 0.1) is None


def test_samples_of_two_seeds_share_no_random_numbers():
    made = [Checks(toy(), PROMPTS, VerifyConfig(seed=seed), {}, lambda: None) for seed in (0, 1)]
    drawn = [
        set(itertools.islice(check._seeds(purpose, look), 3000))
        for check in made
        for purpose in ("positions", "first tokens", "coupled")
        for look in (0, 1)
    ]
    assert len(set().union(*drawn)) == sum(map(len, drawn)) == 3000 * len(drawn)


def test_controls_add_up():
    both = Control(3, 10, 0.1, 1.0, 0.2, 1) + Control(3, 30, 0.3, 2.0, 0.1, 0)
    assert both == Control(3, 40, 0.3, 1.75, 0.2, 1)


def test_a_tie_is_no_bug():
    """All logits are equal up to this target's noise: texts differ, without a fault."""

    class Tied(ToyTarget):
        def run(self, seqs, draft, taps=()):
            out = super().run(seqs, draft, taps)
            out.logits.mul_(1e-12)
            if len(draft):
                out.logits.add_(1e-9 * torch.sin(torch.arange(out.logits.numel())).reshape(out.logits.shape))
            return out

    rows = verify(LLM(Tied(vocab=5), RandomDrafter(5), draft_tokens=3), PROMPTS, FEW).data["greedy"]
    assert "BUG" not in {row["verdict"] for row in rows}
    assert "tie within measured noise" in {row["verdict"] for row in rows}


def test_a_check_in_which_nothing_was_drafted_is_not_tested():
    class Silent(RandomDrafter):
        def propose(self, seqs, budget):
            return Draft.empty(len(seqs))

    result = verify(toy(Silent(5)), PROMPTS, replace(FEW, distribution_prompts=2))
    assert result.data["verdict"] == "not tested"
    assert [row["verdict"] for row in result.data["coverage"].values()] == ["not tested"] * 3
    assert [row["verdict"] for row in result.data["distribution"]] == ["not tested"] * 2
    assert "greedy: 0 draft tokens were verified" in result.warnings[0]
    with pytest.raises(ParameterError, match="no drafter to check"):
        verify(LLM(ToyTarget(vocab=5), draft_tokens=4), PROMPTS, FEW)


def test_penalties_and_filters_are_checked_too():
    params = SamplingParams(
        temperature=0.9, top_k=4, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=12
    )
    assert verify(toy(), PROMPTS, replace(SMALL, params=params)).data["verdict"] == "ok"


# --- the distribution check -------------------------------------------------------------------------------------------


def test_cells_are_the_exact_distribution_pooled():
    llm = LLM(ToyTarget(vocab=5, sharpness=1.5), draft_tokens=4)
    params = SamplingParams(temperature=1.0)
    made = cells(llm, [1, 2], params, 300)
    assert sum(made.mass.values()) == pytest.approx(1)
    assert all(300 * mass >= distribution.FEWEST for mass in made.mass.values())
    every = Counter()  # the joint distribution of three tokens by enumeration, in the same cells
    for a in range(5):
        for b in range(5):
            for c in range(5):
                p, text = 1.0, [1, 2]
                for token in (a, b, c):
                    p *= float(torch.softmax(llm.target.logits(text), -1)[token])
                    text.append(token)
                every[made.of([a, b, c])] += p
    assert every == pytest.approx(made.mass)


def test_ends_of_texts_and_filtered_tokens_are_handled():
    llm = LLM(ToyTarget(vocab=5, sharpness=1.0, eos_ids=(0,)), draft_tokens=4)
    params = SamplingParams(temperature=1.0, top_k=3)
    made = cells(llm, [1, 2], params, 100_000)
    assert made.of([0]) == (0,) or 0 in made.forbidden[()]
    out = [next(iter(made.forbidden[()])), 1, 1]
    assert made.of(out) is None
    [drawn] = sample(llm, [[1, 2]], params, 50, 3, 50, itertools.count(), [0])
    found = distribution_test([out, *drawn.outputs], made, 0.001, 0.9)
    assert (found.forbidden, found.p) == (1, 0.0)


def test_a_token_at_a_filters_edge_is_not_forbidden():
    llm = LLM(ToyTarget(vocab=5, sharpness=1.0), draft_tokens=4)
    params = SamplingParams(temperature=1.0, top_k=3)
    strict, loose = (cells(llm, [1, 2], params, 1000, noise=noise) for noise in (1e-9, 1e3))
    assert len(strict.forbidden[()]) == 2
    assert not loose.forbidden[()]


def test_a_point_mass_tests_nothing():
    llm = toy()
    config = replace(JOINT, params=SamplingParams(temperature=1e-6), samples=50)
    row = verify(llm, PROMPTS, config).data["distribution"][0]
    assert (row["verdict"], row["smallest_bias"]) == ("nothing could be seen", None)


def test_quantiles_and_power_are_right():
    assert noncentral_sf(30.0, 10, 12.5) == pytest.approx(ncx2.sf(30.0, 10, 12.5), rel=1e-9)
    shift = shift_seen(20, 0.001, 0.9)
    assert ncx2.sf(chi2.isf(0.001, 20), 20, shift) == pytest.approx(0.9, rel=1e-6)


def test_the_stated_bias_is_detected_as_often_as_stated():
    """Plant the hardest bias of the stated size (half against half) into a known distribution and count rejections."""
    length, n, probs = 12, 2000, [1 / 12] * 12
    made = Cells(2, {(i,): p for i, p in enumerate(probs)}, {()}, {(): frozenset()})
    exact = distribution_test([[i % length] for i in range(n)], made, 0.001, 0.9)
    bias = exact.smallest_bias
    shifted = torch.tensor([p * (1 + 2 * bias * (1 if i < 6 else -1)) for i, p in enumerate(probs)])
    rng = torch.Generator().manual_seed(0)
    seen = 0
    for _ in range(100):
        drawn = torch.multinomial(shifted, n, replacement=True, generator=rng)
        seen += distribution_test([[int(t)] for t in drawn], made, 0.001, 0.9).p < 0.001
    assert 0.8 <= seen / 100 <= 0.98
    assert math.isclose(exact.g, 0, abs_tol=0.1)


def test_interruption_keeps_what_was_checked(tmp_path):
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(toy(), PROMPTS, FEW, tmp_path / "r.json", stop)
    kept = read(tmp_path / "r.json", "verify")
    assert (kept.complete, kept.data["control"]["verdict"], kept.data["distribution"]) == (False, "identical", [])
    assert len(kept.data["greedy"]) > 6
    assert kept.data["coupled"] == []
    json.dumps(kept.as_dict())


def test_progress_is_counted_right():
    calls = []
    verify(toy(), PROMPTS, FEW, advance=lambda: calls.append(1))
    assert len(calls) == steps(PROMPTS, FEW, 3)


def test_bad_settings_are_refused():
    with pytest.raises(ParameterError, match="did you mean 'coupled'"):
        VerifyConfig(checks=("coupld",))
    with pytest.raises(ParameterError, match="length"):
        VerifyConfig(length=1)
