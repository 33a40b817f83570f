"""The bandit with known acceptance rates and fixed costs: its speed, its loss where no drafter helps, and how it adapts
to a text that changes. Costs are counted, not timed; seeds are fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import cache

import pytest
import torch

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.random import DRAFT
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.step import budget, decide, step
from slipstream.core.stop import stop
from slipstream.core.target import TargetOut
from slipstream.drafters.bandit import BanditConfig, BanditDrafter
from slipstream.drafters.registry import make_drafter
from slipstream.drafters.scripted import Script, ScriptedDrafter, right, wrong
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.theory.closed_forms import expected_tokens
from slipstream.theory.cost_curve import CostCurve
from tests.oracle import Oracle
from tests.targets.toy import ToyTarget

V, ROW, BUDGET = 16, 0.04, 10
COSTS = CostCurve.flat(ROW)
PROMPT = (1, 2, 3)


def target() -> ToyTarget:
    return ToyTarget(V, order=3, seed=5)


@cache
def truth(n: int) -> list[int]:
    return Oracle(target()).greedy(PROMPT, n)


def planted(rate: float, salt: int = 0) -> Script:
    """Right with that probability at each position, independently; another `salt` gives other positions."""
    return lambda seq, position, place: bool(seq.random.uniforms(DRAFT, position + salt, 1)[0] < rate)


def linear(each: float) -> tuple[CostCurve, CostCurve]:
    """Draft costs of `each` decode steps per draft token."""
    return (CostCurve((1, 2), (each, 2 * each)),) * 2


class Priced:
    """A scripted member that adds up its drafting costs and records the draft lengths it was asked for."""

    name = "priced"
    taps: tuple[int, ...] = ()

    def __init__(self, script: Script, each: float, length: int = 1100):
        self.inner = ScriptedDrafter({PROMPT: truth(length)}, V, script)
        self.each, self.spent, self.asked = each, 0.0, list[tuple[int, int]]()

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        self.asked.append((len(seqs[0].tokens), max(budget)))
        self.spent += self.each * max(budget)
        return self.inner.propose(seqs, budget)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


class Finding(Priced):
    """The same as a lookup, for which drafting is free; its match is `rests` long."""

    def __init__(self, script: Script, rests: Callable[[int], int] = lambda position: 4):
        super().__init__(script, 0.0)
        self.rests, self.at = rests, 0

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        self.at = len(seqs[0].tokens)
        return super().propose(seqs, budget)

    def match_length(self, seq_id: int) -> int:
        return self.rests(self.at)

    def continue_from(self, seq: Sequence, drafted: Seq[int], depth: int) -> tuple[list[int], int]:
        return [], 0


class Always:
    """One member at one length."""

    name = "always"
    taps: tuple[int, ...] = ()

    def __init__(self, member: Priced, length: int):
        self.member, self.length = member, length

    def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
        return self.member.propose(seqs, [min(d, self.length) for d in budget])

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOut, verdict: Verdict) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


def bandit(*members: Priced, **options: object) -> BanditDrafter:
    costs = [None if isinstance(m, Finding) else linear(m.each) for m in members]
    return BanditDrafter(members, V, COSTS, costs, BanditConfig(**options))


def speed(drafter: Drafter, members: Seq[Priced], tokens: int, seed: int = 0) -> float:
    """Tokens per time of a decode step, with the given costs of drafting and verification."""
    toy, spent = target(), 0.0
    seq = Sequence(list(PROMPT), SamplingParams(max_tokens=tokens, seed=seed))
    step([seq], toy, drafter, RULES["greedy"], 0)
    start = len(seq.tokens)
    while not seq.finish:
        before = seq.stats.proposed
        step([seq], toy, drafter, RULES["greedy"], BUDGET)
        spent += COSTS(1 + seq.stats.proposed - before)
    return (len(seq.tokens) - start) / (spent + sum(m.spent for m in members))


def mean_speed(make: Callable[[], tuple[Drafter, list[Priced]]], tokens: int, seeds: int = 6) -> float:
    """Of several texts together: their tokens over their time."""
    return seeds / sum(1 / speed(*make(), tokens, seed) for seed in range(seeds))


def best_fixed(rates: Seq[float], each: Seq[float], tokens: int) -> float:
    """The best member at its best length, or plain decoding, on the same texts."""
    best = 1.0
    for i, (rate, cost) in enumerate(zip(rates, each, strict=True)):

        def expected_speed(k: int, rate: float = rate, cost: float = cost) -> float:
            return expected_tokens(rate, k) / (COSTS(1 + k) + cost * k)

        def make(i: int = i, rate: float = rate, cost: float = cost) -> tuple[Drafter, list[Priced]]:
            member = Priced(planted(rate, 5000 * i), cost)
            return Always(member, max(range(1, BUDGET + 1), key=expected_speed)), [member]

        best = max(best, mean_speed(make, tokens))
    return best


def regret(rates: Seq[float], each: Seq[float], tokens: int) -> float:
    """By which share the bandit is slower than the best fixed choice."""

    def make() -> tuple[Drafter, list[Priced]]:
        members = [Priced(planted(r, 5000 * i), c) for i, (r, c) in enumerate(zip(rates, each, strict=True))]
        return bandit(*members), list(members)

    return 1 - mean_speed(make, tokens) / best_fixed(rates, each, tokens)


@pytest.mark.parametrize(
    ("rate", "each"), [(0.0, 0.1), (0.0, 0.3), (0.3, 0.1), (0.5, 0.1), (0.7, 0.1), (0.8, 0.05), (0.9, 0.1), (0.6, 0.3)]
)
def test_one_member_is_nearly_as_fast_as_at_its_best_length(rate: float, each: float) -> None:
    assert regret([rate], [each], 256) < 0.05


@pytest.mark.parametrize(
    ("rates", "each"),
    [((0.9, 0.4), (0.1, 0.1)), ((0.4, 0.9), (0.1, 0.1)), ((0.8, 0.6), (0.25, 0.04)), ((0.9, 0.5), (0.3, 0.1))],
)
def test_of_two_members_the_better_one_is_found_at_their_costs(
    rates: tuple[float, ...], each: tuple[float, ...]
) -> None:
    assert regret(rates, each, 512) < 0.08


@pytest.mark.parametrize(("members", "tokens", "most"), [(1, 64, 0.05), (1, 1000, 0.01), (2, 256, 0.03)])
@pytest.mark.parametrize("each", [0.05, 0.25])
def test_if_no_drafter_helps_it_loses_a_few_percent_at_most(
    members: int, tokens: int, most: float, each: float
) -> None:
    drafters = [Priced(wrong, each) for _ in range(members)]
    assert speed(bandit(*drafters), drafters, tokens) > 1 - most


def test_a_useless_member_is_tried_ever_less_often() -> None:
    member = Priced(wrong, 0.1)
    speed(bandit(member), [member], 1000)
    at = [position for position, depth in member.asked if depth]
    gaps = [b - a for a, b in zip(at[-5:], at[-4:], strict=False)]
    assert all(gap >= 60 for gap in gaps)
    assert len(at) < 30
    assert all(depth <= 1 for _, depth in member.asked[-5:]), "a probe is short"


def test_it_adapts_to_a_text_that_changes() -> None:
    """Right in the first and the last third, wrong between: off within some steps, and on again."""

    def thirds(seq: Sequence, position: int, place: int) -> bool:
        return not 300 <= position < 600

    member = Priced(thirds, 0.1)
    speed(bandit(member), [member], 900)
    deep = {third: [d for p, d in member.asked if 300 * third + 40 <= p < 300 * (third + 1)] for third in range(3)}
    assert sum(deep[0]) / len(deep[0]) > 6
    assert len(deep[1]) < 20, "it is hardly asked"
    wrong_steps = [d for p, d in member.asked if 300 <= p < 600]
    assert sum(wrong_steps) * (0.1 + ROW) < 0.1 * 300, "the change costs less than 10 % of the plain time"
    later = [d for p, d in member.asked if p >= 720]
    assert sum(later) / len(later) > 4


def test_it_switches_between_members_when_the_text_does() -> None:
    first = Priced(lambda seq, position, place: position < 400, 0.1)
    second = Priced(lambda seq, position, place: position >= 400, 0.1)
    earned = speed(bandit(first, second), [first, second], 800)
    alone = Priced(lambda seq, position, place: position < 400, 0.1)
    assert earned > 1.5 * speed(bandit(alone), [alone], 800)


def test_lookups_are_scored_even_if_never_verified() -> None:
    """A match that is always wrong is tried a few times and then ignored, while one that is right is used. They differ
    only in length."""
    lookup = Finding(
        lambda seq, position, place: position % 2 == 0 or place > 0, lambda position: 8 if position % 2 == 0 else 1
    )
    drafter = bandit(lookup)
    toy, used = target(), {0: 0, 1: 0}
    seq = Sequence(list(PROMPT), SamplingParams(max_tokens=300))
    while not seq.finish:
        before, parity = seq.stats.proposed, len(seq.tokens) % 2
        step([seq], toy, drafter, RULES["greedy"], 3)
        if len(seq.tokens) > 150:
            used[parity] += seq.stats.proposed > before
    assert used[0] > 10
    assert used[1] == 0


def test_a_lookup_with_a_neural_member_is_faster_than_either() -> None:
    """The lookup is right in stretches, the neural member evenly: the mix of prompts that a hybrid is for."""

    def stretches(seq: Sequence, position: int, place: int) -> bool:
        return position % 120 >= 60

    def rests(position: int) -> int:
        return 16 if position % 120 >= 62 else 1

    def both() -> tuple[Drafter, list[Priced]]:
        members = [Finding(stretches, rests), Priced(planted(0.7), 0.1)]
        return bandit(*members), members

    def one(i: int) -> Callable[[], tuple[Drafter, list[Priced]]]:
        def make() -> tuple[Drafter, list[Priced]]:
            member = both()[1][i]
            return bandit(member), [member]

        return make

    singles = [mean_speed(one(i), 480) for i in range(2)]
    assert mean_speed(both, 480) > 1.1 * max(singles)


def test_a_draft_is_cut_where_the_next_depth_would_be_slower() -> None:
    """The first two draft tokens are accepted, never more."""
    lookup = Finding(lambda seq, position, place: place < 2)
    drafter = bandit(lookup)
    toy, seq = target(), Sequence(list(PROMPT), SamplingParams(max_tokens=300))
    depths = []
    while not seq.finish:
        before = seq.stats.proposed
        step([seq], toy, drafter, RULES["greedy"], BUDGET)
        depths.append(seq.stats.proposed - before)
    assert set(depths[-20:-5]) == {2}


def test_a_lookup_draft_becomes_a_branch_of_the_neural_draft_until_it_is_rejected() -> None:
    class Short(Finding):
        """One draft token, which differs from the neural member's."""

        def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
            return super().propose(seqs, [min(depth, 1) for depth in budget])

    def roots(**options: object) -> list[int]:
        lookup, neural = Short(wrong), Priced(right, 0.01)
        drafter, toy = bandit(lookup, neural, **options), target()
        seq, counts = Sequence(list(PROMPT), SamplingParams(max_tokens=400)), []
        step([seq], toy, drafter, RULES["greedy"], 0)
        while not seq.finish:
            draft = drafter.propose([seq], [budget(seq, 4)])
            counts.append(list(draft.parents).count(-1))
            out = toy.run([seq], draft)
            verdict = stop([seq], draft, decide([seq], draft, out.logits, RULES["greedy"]))
            toy.commit([seq], verdict.path)
            seq.advance(verdict, draft, 0)
            drafter.observe([seq], draft, out, verdict)
        return counts

    assert roots(branch_tokens=3)[0] == 2
    assert set(roots(branch_tokens=3)[-20:-1]) == {1}
    assert set(roots()[:-1]) == {1}


def test_the_cost_of_a_trees_rows_is_counted() -> None:
    """A member that adds a dozen siblings to each draft token costs more rows, and is dropped where a chain of the same
    acceptance would be faster."""

    class Bushy(Priced):
        def propose(self, seqs: Seq[Sequence], budget: Seq[int]) -> Draft:
            chain = super().propose(seqs, budget)
            tokens, parents = [], []
            for i, token in enumerate(chain.ids):
                first = len(tokens)
                tokens += [token, *((token + j) % V for j in range(2, 14))]
                parents += [-1 if i == 0 else first - 13] * 13
            return Draft(torch.tensor(tokens, dtype=torch.int64), parents, (0, len(tokens)))

    chain, tree = Priced(planted(0.4), 0.02), Bushy(planted(0.4), 0.02)
    assert speed(bandit(chain), [chain], 300) > 1.15
    assert speed(bandit(tree), [tree], 300) > 0.95
    assert sum(1 for _, depth in tree.asked if depth) < sum(1 for _, depth in chain.asked if depth) / 3


def test_a_member_that_proposes_nothing_is_not_asked_forever() -> None:
    silent = Priced(right, 0.2, length=1)  # proposes nothing after the first token
    assert speed(bandit(silent), [silent], 200) > 0.95


def test_requests_are_independent_unless_experience_is_carried() -> None:
    def first_chance(carry: float, script: Script) -> tuple[int, int]:
        """Of the third request: tokens before the member's first step, and the depth of that step."""
        member = Priced(script, 0.1)
        llm = LLM(target(), bandit(member, carry=carry), draft_tokens=BUDGET)
        for _ in range(2):
            llm.generate(list(PROMPT), SamplingParams(max_tokens=60))
        before = len(member.asked)
        llm.generate(list(PROMPT), SamplingParams(max_tokens=60))
        return member.asked[before]

    at, depth = first_chance(0.0, right)
    assert first_chance(0.0, wrong) == (at, depth)
    later, shallow = first_chance(30.0, wrong)
    assert later > at + 10, "it keeps the waiting time it had reached"
    assert shallow < depth
    assert first_chance(30.0, right)[1] > depth


@pytest.mark.parametrize("salt", [0, 2000, 7000])
def test_a_member_with_good_acceptance_that_is_too_slow_is_tried_ever_less_often(salt: int) -> None:
    """Six draft tokens in ten are accepted, but every draft costs three decode steps: about 2.4 tokens for 4.4 steps. A
    step that accepted one or two draft tokens was too slow, and the next pause is twice as long."""
    curve, member = CostCurve((1, 8), (3.0, 3.1)), Priced(planted(0.6, salt), 0.0)
    speed(BanditDrafter([member], V, COSTS, [(curve, curve)]), [member], 600)
    assert len(member.asked) <= 14


def test_costs_of_a_batch_are_shared() -> None:
    """If rows are expensive in a large batch, a draft that is faster for one sequence is slower for eight."""
    curve = CostCurve((1, 8, 64), (1.0, 1.1, 8.8))
    asked = []
    for batch in (1, 8):
        member = Priced(planted(0.5), 0.02)
        drafter = BanditDrafter([member], V, curve, [linear(0.02)], BanditConfig(batch=batch))
        speed(drafter, [member], 200)
        asked.append(sum(depth for _, depth in member.asked))
    assert asked[1] < asked[0] / 4


def test_the_choice_depends_only_on_earlier_steps() -> None:
    """Two sequences with the same history, whose next draft tokens would differ, get the same depth: the draft length
    must not depend on the tokens drawn."""
    depths = []
    for script in (right, lambda seq, position, place: position < 100):
        member = Priced(script, 0.1)
        speed(bandit(member), [member], 200)
        depths.append([depth for position, depth in member.asked if position <= 93])
    assert depths[0] == depths[1]
    assert len(depths[0]) > 5


def test_sampled_draft_tokens_are_scored_by_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `rejection` at temperature 1 the records hold the share of draft tokens that verification accepted, unless
    a streak is mistaken for a change of the text."""
    monkeypatch.setattr("slipstream.drafters.bandit.RESTART_BELOW", 0.0)
    toy = ToyTarget(V, order=2, seed=3, sharpness=1.0)
    drafter = make_drafter(
        "bandit", toy, members=[("model", {"model": ToyTarget(V, order=1, seed=4, sharpness=0.5)})],
        costs=CostCurve.flat(0.001), draft_costs=[linear(0.0001)], lengths=(1, 3), memory=10**6,
    )  # fmt: skip
    assert isinstance(drafter, BanditDrafter)
    seq = Sequence([1], SamplingParams(temperature=1.0, max_tokens=400, seed=1))
    while not seq.finish:
        step([seq], toy, drafter, RULES["rejection"], 3)
    stats = drafter._states[seq.id].records[0].depth_stats[0]
    counted = [round(count) for count in stats.accepted[:3]]
    assert sum(counted) == pytest.approx(seq.stats.accepted, abs=3)
    assert seq.stats.accepted > 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (2, 4)}, "lengths"),
        ({"lengths": (1, 1)}, "lengths"),
        ({"prior": 0.0}, "prior"),
        ({"weight": 0}, "weight"),
        ({"memory": 0}, "memory"),
        ({"longest_rest": 1}, "longest_rest"),
        ({"batch": 0}, "batch"),
        ({"carry": -1}, "carry"),
        ({"length": (1,)}, "did you mean 'lengths'"),
        ({"members": ()}, "0 members"),
        ({"draft_costs": ()}, "1 members and the draft costs of 0"),
        ({"members": ["none"], "draft_costs": [None]}, "draft costs of none are missing"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_drafter("bandit", target(), **{"members": ["ngram"], "costs": COSTS} | options)


def test_the_former_option_name_still_works() -> None:
    made = make_drafter("bandit", target(), members="ngram", costs=COSTS, beside=3)
    assert isinstance(made, BanditDrafter)
    assert made.config == BanditConfig(branch_tokens=3)


def test_what_is_not_given_is_measured_once() -> None:
    model = ToyTarget(V, order=1, seed=1)
    made = make_drafter("bandit", target(), members=["ngram", ("model", {"model": model})])
    assert isinstance(made, BanditDrafter)
    assert made.costs(1) > 0
    assert made.draft_costs[0] is None, "a lookup counts as free"
    assert made.draft_costs[1] is not None
    assert all(curve.rows == (1, 3, 5, 8) for curve in made.draft_costs[1])
    runs = model.runs
    before = made.costs, made.draft_costs
    LLM(target(), made, draft_tokens=4).generate([1, 2, 1, 2], SamplingParams(max_tokens=20))
    assert (made.costs, made.draft_costs) == before
    assert runs > 20
