"""`verify` passes correct programs and finds planted faults."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2, ncx2

from slipstream.core import rules as core_rules, step as core_step
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT
from slipstream.core.rules import follow
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.measure.prompts import Prompt, PromptSet
from slipstream.measure.results import read
from slipstream.targets.huggingface.huggingface_target import of_module
from slipstream.verify import outcomes
from slipstream.verify.outcomes import noncentral_sf, shift_seen
from slipstream.verify.panel_requests import PanelRequest
from slipstream.verify.texts import ROUNDING, control, wrong_token
from slipstream.verify.verification import Checks, VerifyConfig, steps, verify
from tests.core.fake_drafters import depths
from tests.core.wrong import FAULTS, chain_rule
from tests.drafters.scripted_drafters import RandomDrafter, Silent
from tests.targets.huggingface.encoder_decoders import random_encoder_decoder
from tests.targets.toy import ToyTarget

PROMPTS = PromptSet("made up", [Prompt([1, 2], "a", "one"), Prompt([3, 4, 0], "a", "two")], "0")
FEW = VerifyConfig(params=SamplingParams(max_tokens=12), texts=3)
SAMPLED = VerifyConfig(SamplingParams(max_tokens=24), ("distribution",), texts=20, reach=0)
STRONG = replace(SAMPLED, texts=6)
"""For faults that shift some test by 7 standard deviations or more in so many texts: a power above 0.999."""


def toy(drafter=None, rule="rejection", **target) -> LLM:
    toy_target = ToyTarget(vocab=5, sharpness=1.0, **target)
    return LLM(toy_target, drafter or RandomDrafter(5), draft_tokens=3, rule=rule)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_rules_pass_and_progress_is_counted_right(rule):
    calls = []
    result = verify(toy(rule=rule), PROMPTS, FEW, advance=lambda: calls.append(1))
    assert len(calls) == steps(PROMPTS, FEW, 3)
    data = result.data
    assert data.verdict == "ok"
    assert data.control.verdict == "identical"
    assert {row.verdict for row in (*data.greedy, *data.coupled)} == {"identical"}
    tested = {row.place: row for row in data.distribution}
    assert tested["all positions"].verdict == "no difference seen"
    assert 0 < tested["all positions"].smallest_bias < 0.2
    assert "joint" in tested["all positions"].outcomes
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
    config = replace(FEW, checks=("greedy", "coupled"), params=SamplingParams(max_tokens=6))
    if planted:
        config = replace(config, checks=("greedy",))
        run = target.run

        def confused(seqs, draft, taps=()):
            for seq in seqs if len(draft) and target.sources._sources else ():
                target.sources._sources[seq.id] = next(iter(target.sources._sources.values()))
            return run(seqs, draft, taps)

        monkeypatch.setattr(target, "run", confused)
    data = verify(encoder_decoder, prompts, config).data
    assert data.control.verdict in ("identical", "rounding")
    assert data.verdict == ("BUG" if planted else "ok")


class SkewedDrafter(RandomDrafter):
    """Samples from one distribution after every text, and reports it. (With a uniform one, fault A would cause no
    bias.)"""

    probs = torch.tensor([0.5, 0.25, 0.15, 0.05, 0.05], dtype=torch.float64)

    def propose(self, seqs, budgets):
        rows = [
            torch.bucketize(torch.from_numpy(seq.random.uniforms(DRAFT, len(seq.tokens), n)), self.probs.cumsum(0)[:-1])
            for seq, n in zip(seqs, depths(budgets), strict=True)
        ]
        return Draft.chains([row.tolist() for row in rows], self.probs.expand(sum(depths(budgets)), 5).contiguous())


class LyingDrafter(RandomDrafter):
    """Samples uniformly and reports another distribution."""

    def propose(self, seqs, budgets):
        draft = super().propose(seqs, budgets)
        lie = torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64).expand(len(draft), 5)
        return Draft(draft.tokens, draft.parents, draft.splits, lie.contiguous())


def test_a_q_that_is_not_what_was_sampled_from_is_a_bug():
    """It shifts the draft tokens that are favoured by 7 standard deviations."""
    assert verify(toy(LyingDrafter(5)), PROMPTS, STRONG).data.verdict == "BUG"


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_rules_are_bugs(name):
    """A shifts some test by 7 standard deviations in 20 texts; B, C and D by 8, 7 and 15 in 6."""
    llm = toy(SkewedDrafter(5))
    llm._rule = chain_rule("planted", **FAULTS[name])
    outcome = verify(llm, PROMPTS, SAMPLED if name[0] == "A" else STRONG)
    assert outcome.data.verdict == "BUG"
    assert llm.rule.name == "planted"


def test_a_wrong_block_is_a_bug(monkeypatch):
    """The residual of a rejected prefix without its weight, so that neighbouring tokens depend on each other: that
    shifts a test by over 30 standard deviations."""
    right = core_rules._block_residual
    assert verify(toy(SkewedDrafter(5), "block"), PROMPTS, STRONG).data.verdict == "ok"

    def unweighted(draft, w, P, node, more):
        return right(draft, torch.ones_like(w), P, node, more)

    monkeypatch.setattr(core_rules, "_block_residual", unweighted)
    assert verify(toy(SkewedDrafter(5), "block"), PROMPTS, STRONG).data.verdict == "BUG"


def test_tokens_that_depend_on_the_one_before_are_seen():
    """Each rank is uniform, and so is the product of two; only the pairs of neighbours show it."""
    rng, row = np.random.default_rng(0), outcomes.Evidence()
    for u in rng.random(400):
        after = (rng.random() + int(4 * u) // 2 % 2) / 2
        row.token(after, rng.random(), [])
        row.neighbours(u, after)
    test = outcomes.judge("all positions", row)
    assert test.ranks > 0.01
    assert test.outcomes[outcomes.JOINT] < 1e-9


def test_a_wrong_greedy_is_a_bug(monkeypatch):
    """Accepts the second best token if it is drafted."""

    def second_best(draft, picks):
        if len(draft):
            return follow(draft, [(pick + 1) % 5 for pick in picks])
        return follow(draft, picks)

    monkeypatch.setattr(core_step, "follow", second_best)
    rows = verify(toy(), PROMPTS, replace(FEW, checks=("greedy",))).data.greedy
    assert {(row.draft_tokens, row.batch) for row in rows if row.verdict == "BUG"} == {
        (3, 1), (1, 2), (2, 2), (3, 2), (3, 5),
    }  # fmt: skip
    assert rows[0].divergence.margin > 2 * rows[0].divergence.noise


class Shifty(ToyTarget):
    """A target whose logits depend on the other rows of the pass, by `size`."""

    scale, size = 1.0, 1e-9

    def run(self, seqs, draft, taps=()):
        out = super().run(seqs, draft, taps)
        out.logits.mul_(self.scale)
        if len(draft):
            out.logits.add_(self.size * torch.sin(torch.arange(out.logits.numel())).reshape(out.logits.shape))
        return out


class ShiftyState(Shifty):
    size = 3.0


def test_the_control_distinguishes_rounding_from_a_wrong_target():
    one = PanelRequest("one", [1, 2], SamplingParams(max_tokens=6))
    text = LLM(ToyTarget(vocab=5), draft_tokens=4).generate([one.ids], one.params)[0].token_ids
    small, large = (control(LLM(kind(vocab=5), draft_tokens=4), [one], [text], 3) for kind in (Shifty, ShiftyState))
    assert (small.verdict, small.positions, small.flips) == ("rounding", 6, 0)
    assert 0 < small.noise < 1e-8
    assert small.limit == small.scale * ROUNDING[torch.float64]  # of its logits: it declares no dtype
    assert (large.verdict, large.noise > 1) == ("BUG", True)
    llm = LLM(ShiftyState(vocab=5), RandomDrafter(5), draft_tokens=2)
    assert verify(llm, PROMPTS, replace(FEW, checks=())).data.verdict == "BUG"


def test_plain_text_that_is_not_the_targets_best_is_a_bug(monkeypatch):
    """A fault of both plain and speculative decoding is found by no comparison of texts."""
    monkeypatch.setattr(core_step, "first_maxima", lambda logits: logits.topk(2).indices[:, 1].tolist())
    outcome = verify(toy(), PROMPTS, replace(FEW, checks=("greedy",)))
    assert {row.verdict for row in outcome.data.greedy} == {"identical"}
    assert "token 0 is id" in outcome.data.faults[0]
    assert (outcome.data.control.verdict, outcome.data.verdict) == ("BUG", "BUG")


def test_rounding_at_the_edge_of_a_filter_is_no_fault():
    """The text's token is one that the reference drops, and whether it does hangs on less than the noise."""
    llm = LLM(ToyTarget(vocab=5, sharpness=1.0), draft_tokens=4, rule="coupled")
    params = SamplingParams(temperature=1.0, top_k=2, seed=3, max_tokens=1)
    [text] = [done.token_ids for done in llm.generate([[1, 2]], params)]
    request = PanelRequest("x", [1, 2], params)
    kept = torch.topk(llm.target.logits([1, 2]), 2).indices.tolist()
    dropped = next(token for token in range(5) if token not in kept)
    assert wrong_token(llm, request, text, 0.0) is None
    assert "token 0 is id" in wrong_token(llm, request, [dropped], 0.0)
    assert wrong_token(llm, request, [dropped], 0.1) is None


def test_samples_of_two_seeds_share_no_random_numbers():
    runs = [Checks(toy(), PROMPTS, VerifyConfig(seed=seed)) for seed in (0, 1)]
    drawn = [
        set(itertools.islice(check._seeds(purpose, look), 3000))
        for check in runs
        for purpose in ("positions", "coupled")
        for look in (0, 1)
    ]
    assert len(set().union(*drawn)) == sum(map(len, drawn)) == 3000 * len(drawn)


def test_a_tie_is_no_bug():
    """All logits are equal up to this target's noise: texts differ, without a fault."""

    class Tied(Shifty):
        scale = 1e-12

    llm = LLM(Tied(vocab=5), RandomDrafter(5), draft_tokens=3)
    rows = verify(llm, PROMPTS, replace(FEW, checks=("greedy",))).data.greedy
    assert "BUG" not in {row.verdict for row in rows}
    assert "tie within measured noise" in {row.verdict for row in rows}


def test_a_check_in_which_nothing_was_drafted_is_not_tested():
    result = verify(toy(Silent()), PROMPTS, FEW)
    assert result.data.verdict == "not tested"
    assert [row.verdict for row in result.data.coverage.values()] == ["not tested"] * 3
    assert "greedy: 0 draft tokens were verified" in result.warnings[0]
    with pytest.raises(ParameterError, match="no drafter was given"):
        verify(LLM(ToyTarget(vocab=5), draft_tokens=4), PROMPTS, FEW)


def test_quantiles_and_power_are_right():
    assert noncentral_sf(30.0, 10, 12.5) == pytest.approx(ncx2.sf(30.0, 10, 12.5), rel=1e-9)
    shift = shift_seen(20, 0.001, 0.9)
    assert ncx2.sf(chi2.isf(0.001, 20), 20, shift) == pytest.approx(0.9, rel=1e-6)


def test_interruption_keeps_what_was_checked(tmp_path):
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(toy(), PROMPTS, FEW, tmp_path / "r.json", stop)
    kept = read(tmp_path / "r.json")
    assert (kept.complete, kept.data["control"]["noise"], kept.data["distribution"]) == (False, 0.0, [])
    assert len(kept.data["greedy"]) > 6
    assert kept.data["coupled"] == []


def test_bad_settings_are_refused():
    with pytest.raises(ParameterError, match="did you mean 'coupled'"):
        VerifyConfig(checks=("coupld",))
    with pytest.raises(ParameterError, match="texts"):
        VerifyConfig(texts=0)
