"""`step` on a toy target: for any drafter, the output is that of plain decoding.

The toy target checks at every run that its KV holds exactly the sequence, so each test here also tests rollback.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count, product

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, Drafter, NoDrafter
from slipstream.core.params import SamplingParams
from slipstream.core.rules import RULES, verify
from slipstream.core.sequence import Sequence
from slipstream.core.stats import PHASES
from slipstream.core.step import budget, decide, dice, step
from slipstream.core.target import Target
from slipstream.core.warp import distributions
from slipstream.errors import TargetError
from tests.core.fake_drafters import (
    Bushy,
    Sampling,
    Scripted,
    continuation,
    decode,
    depths,
    finish,
    run_steps,
    sequence,
)
from tests.end_to_end.sampling import Sampled
from tests.enumeration import Branch, enumerate_runs
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

TARGET = ToyTarget(vocab=7, order=2, seed=3)
PROMPT = [1, 2, 3]


def decoded(
    target: ToyTarget = TARGET, drafter: Drafter | None = None, draft_tokens: int = 4, rule: str = "rejection", **params
) -> Sequence:
    """A request after its last step."""
    seq = sequence(target, PROMPT, **params)
    finish([seq], target, drafter, draft_tokens=draft_tokens, rule=rule)
    return seq


def same(seq: Sequence, wanted: Sequence) -> None:
    """Ids, text, reason, counts and log-probabilities agree."""
    assert seq.output == wanted.output
    assert decode(seq.output) == decode(wanted.output)
    assert (seq.finish, seq.stop_cause) == (wanted.finish, wanted.stop_cause)
    assert seq.stats.tokens == wanted.stats.tokens == len(seq.output) == len(seq.was_drafted())
    assert seq.logprobs == wanted.logprobs
    assert seq.stats.accepted == sum(seq.was_drafted())


SCRIPTS = {
    "right": lambda _: None,
    "wrong": lambda _: 0,
    "wrong at 1": lambda _: 1,
    "wrong at the last": lambda _: 3,
    "alternating": lambda i: (3, 0, None, 2, 1)[i % 5],  # rollbacks of differing depth, one after another
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 5, 8])
def test_the_text_does_not_depend_on_the_drafter(script: str, draft_tokens: int) -> None:
    drafter = Scripted(TARGET, SCRIPTS[script])
    how = {"max_tokens": 1 + 3 * (draft_tokens + 1) if script == "right" else 23, "logprobs": 2}
    seq = decoded(TARGET, drafter, draft_tokens, **how)
    same(seq, decoded(**how))
    if script == "right":
        assert seq.stats.histogram == {0: 1, draft_tokens: 3}, "the prefill, then three full steps"


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "block"])  # which takes chains only
def test_trees_with_duplicates_leave_the_text_unchanged(rule: str) -> None:
    seq = decoded(TARGET, Bushy(TARGET), rule=rule, max_tokens=40, logprobs=2)
    same(seq, decoded(max_tokens=40, logprobs=2))
    assert 0 < seq.stats.accepted < seq.stats.proposed


@pytest.mark.parametrize("wrong_at", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rejection_at_any_place_is_followed_by_the_right_token(wrong_at: int, temperature: float) -> None:
    """The token after the rejection comes from the row of the last accepted draft token. Sampled: with a target so
    sharp that its sample is its argmax."""
    target = ToyTarget(vocab=7, order=2, seed=3, sharpness=300.0)
    for draft_tokens in (wrong_at + 1, wrong_at + 3):
        drafter = Scripted(target, lambda _: wrong_at)
        seq = decoded(target, drafter, draft_tokens, temperature=temperature, max_tokens=20)
        assert seq.output == continuation(target, PROMPT, 20)
        assert seq.stats.position_rates[wrong_at] == 0
        assert all(rate == 1 for rate in seq.stats.position_rates[:wrong_at])


@pytest.mark.parametrize("script", SCRIPTS)
def test_eos_ends_the_text_at_every_position_of_a_run(script: str) -> None:
    text = continuation(TARGET, PROMPT, 14)
    for eos in {*text}:
        target = ToyTarget(vocab=7, order=2, seed=3, eos_ids={eos})
        wanted = decoded(target, max_tokens=14)
        assert wanted.output == text[: text.index(eos) + 1]
        seq = decoded(target, Scripted(target, SCRIPTS[script]), max_tokens=14)
        same(seq, wanted)
        assert (seq.finish, seq.stop_cause) == ("stop", eos)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stop_string_and_cap_in_one_step_agree_with_plain_decoding(script: str) -> None:
    text = decode(continuation(TARGET, PROMPT, 14))
    for at, cap in product(range(1, 10), (3, 5, 9)):
        params: dict = {"stop": (text[at : at + 2], "zz"), "max_tokens": cap, "logprobs": 1}
        seq = decoded(TARGET, Scripted(TARGET, SCRIPTS[script]), **params)
        same(seq, decoded(**params))
        assert len(seq.logprobs) == len(seq.output)


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 1.1}, {"presence_penalty": 1.7, "repetition_penalty": 1.2}, {"repetition_penalty": 0.8},
        {"bad_words": ((3,), (6, 2), (5, 5, 1))}, {"logit_bias": {4: -100, 1: 2.0}},
        {"min_tokens": 9, "stop_token_ids": (0, 1, 2, 3)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("script", SCRIPTS)
def test_parameters_that_need_history_count_tokens_and_not_steps(script: str, params: dict) -> None:
    wanted = decoded(max_tokens=24, **params)
    seq = sequence(TARGET, PROMPT, max_tokens=24, **params)

    class Informed(Scripted):
        """Drafts this request's own text, so draft tokens are accepted although a penalty changed the text."""

        def propose(self, seqs, budgets):
            full = PROMPT + wanted.output
            chains = [full[len(s.tokens) : len(s.tokens) + d] for s, d in zip(seqs, depths(budgets), strict=True)]
            at, self.steps = self.wrong_at(self.steps), self.steps + 1
            return Draft.chains([self.spoil(chain, at) for chain in chains])

    finish([seq], TARGET, Informed(TARGET, SCRIPTS[script]))
    same(seq, wanted)
    if script == "right":
        assert seq.stats.acceptance_rate == 1
    if "min_tokens" in params:
        assert len(seq.output) >= 10


def test_logprobs_are_those_of_the_target_alone() -> None:
    for temperature in (0.0, 1.0):
        params = {"temperature": temperature, "max_tokens": 15, "logprobs": 3, "top_k": 4}
        batch = [sequence(TARGET, prompt, **params) for prompt in (PROMPT, [4, 4, 1], [6, 2, 5])]
        finish(batch, TARGET, Sampling(TARGET))
        for seq, i in product(batch, range(15)):
            entry, logs = seq.logprobs[i], torch.log_softmax(TARGET.logits(seq.tokens[: 3 + i]), -1)
            assert entry.id == seq.output[i]
            assert entry.logprob == pytest.approx(float(logs[entry.id]))
            assert [t for t, _ in entry.top] == logs.topk(3).indices.tolist()
            assert [x for _, x in entry.top] == pytest.approx(logs.topk(3).values.tolist())


def test_the_budget_leaves_room_for_the_targets_own_token() -> None:
    seq = sequence(TARGET, PROMPT, max_tokens=6)
    assert budget(seq, 4) == Budget(0), "nothing is drafted while the prompt is pending"
    seq.kv_len = 3
    seq.tokens += [1]
    assert [budget(seq, n).depth for n in (0, 2, 9)] == [0, 2, 4]
    seq.tokens += [1, 1, 1, 1]
    assert budget(seq, 9) == Budget(0)


@pytest.mark.parametrize("own", [0, 2, 9])
def test_a_request_may_ask_for_fewer_draft_tokens(own: int) -> None:
    seq = sequence(TARGET, PROMPT, max_tokens=20, draft_tokens=own)
    finish([seq], TARGET, Scripted(TARGET), draft_tokens=4)
    assert seq.output == continuation(TARGET, PROMPT, 20)
    assert max(seq.stats.histogram) == min(own, 4)


def test_all_the_time_is_counted_by_phase_and_shared_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = count()
    monkeypatch.setattr("slipstream.core.step.perf_counter", lambda: float(next(readings)))
    seqs = [sequence(TARGET, PROMPT, max_tokens=6) for _ in range(3)]
    for _ in run_steps(seqs, TARGET, Scripted(TARGET)):
        pass
    passed = next(readings) - seqs[0].stats.steps  # from the first reading of each step to its last
    for seq in seqs:
        assert set(seq.stats.seconds) == set(PHASES)
        assert all(seconds > 0 for seconds in seq.stats.seconds.values())
        assert seq.stats.first_token_seconds > 0
        assert seq.stats.seconds == seqs[0].stats.seconds
        assert sum(seq.stats.seconds.values()) == pytest.approx(passed / 3)


DEAD = 2
"""Nothing can follow this token."""


class DeadEnd(ToyTarget):
    """Its logits after DEAD are NaN."""

    def _row(self, tokens: tuple[int, ...]) -> int:
        row = super()._row(tokens)
        if tokens[-1] == DEAD:
            self._table[row] = float("nan")
        return row


class Unaware(Sampling):
    """Samples from a distribution that knows no dead ends."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        before = [seq.params for seq in seqs]
        free = {id(one): replace(one, bad_words=()) for one in {id(params): params for params in before}.values()}
        for seq in seqs:
            seq.params = free[id(seq.params)]
        draft = super().propose(seqs, budgets)
        for seq, params in zip(seqs, before, strict=True):
            seq.params = params
        return draft


def dead_ends(kind: str) -> tuple[ToyTarget, dict[str, object]]:
    """A target, and parameters under which nothing can follow DEAD."""
    if kind == "NaN":
        return DeadEnd(vocab=4, order=2, seed=5, sharpness=1.0), {}
    return ToyTarget(vocab=4, order=2, seed=5, sharpness=1.0), {"bad_words": tuple((DEAD, t) for t in range(4))}


def up_to_a_dead_end(seqs: Seq[Sequence], target: Target, drafter: Drafter, rule: str) -> None:
    """Step until every sequence has ended or cannot go on."""
    for seq in seqs:
        seq.rule = RULES[rule]
    while active := [seq for seq in seqs if not seq.finish and seq.output[-1:] != [DEAD]]:
        step(active, target, drafter, RULES[rule], 3)


DRAFTERS_OF_DEAD_ENDS = {
    "chains": lambda target: Unaware(ToyTarget(vocab=4, order=2, seed=6, sharpness=1.0)),
    "point masses": lambda target: Scripted(ToyTarget(vocab=4, order=2, seed=6, sharpness=1.0)),
    "trees": lambda target: Bushy(ToyTarget(vocab=4, order=2, seed=6, sharpness=1.0)),
}


@pytest.mark.parametrize("kind", ["NaN", "forbidden"])
@pytest.mark.parametrize("drafter", DRAFTERS_OF_DEAD_ENDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_dead_end_ends_the_request_where_plain_decoding_does_and_nowhere_else(kind, drafter, rule):
    """A draft may well hold nodes that nothing can follow. Greedy, and under the rule `coupled`, the very text is
    that of plain decoding; and the step after it fails, as in plain decoding."""
    if rule == "block" and drafter == "trees":
        return
    target, params = dead_ends(kind)
    for seed in range(40 if rule == "coupled" else 20):
        for temperature in (0.0, 1.0) if rule == "coupled" else (0.0,):
            how = {"seed": seed, "temperature": temperature, "max_tokens": 9, **params}
            prompt = [seed % 2, seed % 3 % 2, 3]
            wanted, actual = (sequence(target, prompt, **how) for _ in range(2))  # type: ignore[arg-type]
            up_to_a_dead_end([wanted], target, NoDrafter(), rule)
            up_to_a_dead_end([actual], target, DRAFTERS_OF_DEAD_ENDS[drafter](target), rule)
            assert (actual.output, actual.finish) == (wanted.output, wanted.finish)
            if not actual.finish:
                with pytest.raises(TargetError, match=r"are NaN|forbid every token"):
                    step([actual], target, NoDrafter(), RULES[rule], 3)


def dead_end_error(kind: str, drafter: str, rule: str) -> float:
    """Largest error of the probability of a text, by enumeration of the steps up to the third token or a dead end."""
    target, params = dead_ends(kind)
    shared = SamplingParams(temperature=1.0, max_tokens=4, **params)  # type: ignore[arg-type]

    def run(branches: list[Branch]) -> list[Sequence]:
        seqs = [Sampled(PROMPT, shared, stream=branch) for branch in branches]
        up_to_a_dead_end(seqs, target, DRAFTERS_OF_DEAD_ENDS[drafter](target), rule)
        return seqs

    (texts,) = enumerate_runs(run, Branch())
    assert sum(p for text, p in texts.probs.items() if text[-1] == DEAD) > 0.1
    assert texts.accepted > 0.1
    return texts.error(Oracle(target), PROMPT, SamplingParams(temperature=1.0), frozenset({DEAD}))


@pytest.mark.parametrize("kind", ["NaN", "forbidden"])
@pytest.mark.parametrize("drafter", DRAFTERS_OF_DEAD_ENDS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_dead_ends_in_a_draft_do_not_change_the_distribution(kind: str, drafter: str, rule: str) -> None:
    if rule != "block" or drafter != "trees":
        assert dead_end_error(kind, drafter, rule) < 1e-9


@pytest.mark.parametrize("drafter", ["chains", "trees"])
def test_control_a_drawn_dead_end_that_is_passed_over_is_found(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.core.step.end_at", lambda verdict, draft, dead: verdict)
    assert dead_end_error("NaN", drafter, "rejection") > 0.01


@pytest.mark.parametrize("rule", ["greedy", "rejection", "coupled"])
def test_greedy_decisions_equal_those_of_the_full_distribution(rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    seqs = [Sequence([1, 2], SamplingParams(seed=b)) for b in range(3)]
    for _ in range(50):
        tokens = torch.randint(3, (7,), generator=generator)
        draft = Draft(tokens, [-1, -1, 0, 1, -1, 0, 1], [0, 4, 4, 7])
        logits = torch.randint(3, (10, 3), generator=generator).float()  # ties abound
        dense = verify(draft, distributions(logits, seqs, draft), RULES[rule], dice(seqs, draft))
        assert decide(seqs, draft, logits, RULES[rule]) == dense
