"""`ConfidentDrafts`: chains that end where a draft token is not worth its row keep the target's distribution."""

import math
from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np
import pytest

from slipstream.core.draft import Draft, Verdict
from slipstream.core.drafter import Budget, Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.drafters.acceptance_stats import CONFIDENCES
from slipstream.drafters.confidence import GOES_ON, ConfidentDrafts
from slipstream.drafters.guard import Guard
from slipstream.drafters.hybrid import HybridDrafter
from slipstream.drafters.model import ModelDrafter
from slipstream.errors import DraftError
from slipstream.llm import LLM
from tests.drafters.conformance import Case, Conformance, Proposal, Recorder
from tests.drafters.makers import V, other, several_steps, target
from tests.enumeration import enumerate_texts
from tests.heads.tiny_heads import eagle_drafter
from tests.oracle import Oracle


def priced(drafter: Drafter, costs: Seq[float]) -> Drafter:
    """The drafter, for sequences whose rows have these costs."""
    propose = drafter.propose

    def with_costs(seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return propose(seqs, [Budget(budget.depth, costs) for budget in budgets])

    drafter.propose = with_costs  # type: ignore[method-assign]
    return drafter


DRAFTERS: dict[str, tuple[Callable[[], Drafter], Seq[float]]] = {
    "eagle3": (lambda: eagle_drafter(V, 3), (0.6, 0.4, 0.35)),
    "model": (lambda: ModelDrafter(several_steps(), V), (0.45, 0.2, 0.1)),
    "model, token by token": (lambda: ModelDrafter(other(), V), (0.45, 0.2, 0.1)),
}
"""With costs that about half of the draft tokens are worth."""


def priced_drafter(name: str) -> Drafter:
    make, costs = DRAFTERS[name]
    return priced(make(), costs)


class TestPriced(
    Conformance,
    exempt={
        "test_does_not_depend_on_other_sequences_of_the_batch": "other requests teach how far drafts go; texts do not "
        "depend on that: see the other tests",
        "test_sampled_text_has_the_targets_distribution": "numbers are those of any draft model and head",
    },
):
    @pytest.fixture(params=DRAFTERS)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return Case(target, lambda target: priced_drafter(request.param), enumerated=[(1, {}), (1, {"top_k": 3})])


def error_of_drafting(**sampling: Any) -> float:
    """Largest error of the probability of a text, of a first token and a drafting step."""
    prompt, params = [0, 1, 2, 0], SamplingParams(temperature=1.0, max_tokens=4, **sampling)
    (texts,) = enumerate_texts(lambda: LLM(target(), priced_drafter("eagle3"), draft_tokens=2), prompt, params)
    assert 0.1 < texts.proposed < 1.9, "some drafts end early"
    return texts.error(Oracle(target()), prompt, params)


@pytest.mark.parametrize("sampling", [{"top_k": 4}, {"repetition_penalty": 1.5}])
def test_chains_drawn_token_by_token_keep_the_distribution(sampling: dict[str, Any]) -> None:
    assert error_of_drafting(**sampling) < 1e-9


def test_control_a_draft_that_ends_by_the_token_that_was_drawn_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(confident: ConfidentDrafts, seq: Sequence, tokens: Seq[int], tops: Seq[float], budget: Budget) -> int:
        return len(tokens) - (tokens[-1] > 2)

    monkeypatch.setattr(ConfidentDrafts, "count_worth", kept)
    assert error_of_drafting(top_k=4) > 1e-3


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 3}])
def test_a_draft_is_the_beginning_of_the_one_without_costs_and_has_its_q(drafter: str, params: dict[str, Any]) -> None:
    kept = list[int]()
    for seed in range(12):
        drafts = list[Proposal]()
        for each in (DRAFTERS[drafter][0](), priced_drafter(drafter)):
            recorder = Recorder(each, V)
            llm = LLM(target(), recorder, draft_tokens=3)
            llm.generate([0, seed % V, 2, seed % 3], SamplingParams(max_tokens=9, seed=seed, **params))
            drafts.append(next(one for one in next(iter(recorder.proposed.values())) if len(one.text) == 5))
        (_, ids, _, q), (_, shorter, _, shorter_q) = drafts
        kept.append(len(shorter))
        assert (shorter, shorter_q) == (ids[: kept[-1]], q[: kept[-1]])
    assert len(ids) == 3
    assert len(set(kept)) > 2


def test_a_chain_ends_before_the_first_token_that_is_not_worth_its_row() -> None:
    """Rates start at the middle of each class: 0.97, 0.53 and 0.97 of these three tokens."""
    confident, seq = ConfidentDrafts(), Sequence([1])
    for costs, kept in (((0.9, 0.5, 0.49), 3), ((0.9, 0.5, 0.51), 2), ((0.5,), 2), ((0.9, 0.6, 0.0), 1), ((0.98,), 0)):
        assert confident.count_worth(seq, [7, 8, 9], [1.0, 0.5, 0.99], Budget(3, costs)) == kept
        assert len(confident.drawn[seq.id][0]) == 3
    assert confident.count_worth(seq, [7, 8], [1.0, math.nan], Budget(2, (0.98,))) == 0
    assert confident.count_worth(seq, [7, 8], [1.0, math.nan], Budget(2, (0.1,))) == 1, "no number has the lowest class"


def test_a_call_goes_on_while_a_further_token_may_be_worth_its_row() -> None:
    confident, seqs = ConfidentDrafts(), [Sequence([1]), Sequence([1], SamplingParams(temperature=1.0))]
    assert confident.worth(seqs, [Budget(4), Budget(2)]) is None
    worth = confident.worth(seqs, [Budget(4, (0.5, 0.1), 0.2), Budget(2)])
    np.testing.assert_allclose(worth.least, [[0.5, 0.3 / GOES_ON, 0.3 / GOES_ON, math.inf], [0, *3 * [math.inf]]])
    np.testing.assert_allclose(worth.rates, [[(at + 0.5) / CONFIDENCES for at in range(CONFIDENCES)]] * 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rates_are_learned_from_what_was_compared(temperature: float) -> None:
    """Of a sampled request, a token that was left out tells nothing: it may be accepted where another is emitted."""
    confident, seq = ConfidentDrafts(), Sequence([1], SamplingParams(temperature=temperature))
    budget = Budget(4, (0.1, 0.1, 0.6))
    before = ConfidentDrafts().worth([seq], [budget])
    assert confident.count_worth(seq, [7, 8, 9, 6], [0.99, 0.8, 0.2, 0.3], budget) == 2
    draft = Draft.chains([[7, 8]])
    confident.learn([seq], draft, Verdict([[0, 1]], [5], [None], [False]))
    after = confident.worth([seq], [budget])
    changed = {at: after.rates[0, at] > rate for at, rate in enumerate(before.rates[0]) if rate != after.rates[0, at]}
    assert changed == ({15: True, 12: True} if temperature else {15: True, 12: True, 3: False})
    confident.learn([seq], draft, Verdict([[]], [5], [None], [False]))
    assert (confident.worth([seq], [budget]).rates == after.rates).all(), "a draft counts once"
    assert confident.count_worth(seq, [7, 8], [0.99, 0.5], budget) == 2
    confident.learn([seq], Draft.chains([[4, 8]]), Verdict([[0, 1]], [5], [None], [False]))  # another drafter's draft
    last = confident.worth([seq], [budget])
    assert (last.rates != after.rates)[0].nonzero()[0].tolist() == [15], "after another token, nothing is compared"


def test_greedy_and_sampled_requests_are_learned_apart() -> None:
    one, other = (Sequence([1], SamplingParams(temperature=temperature)) for temperature in (0.0, 1.0))
    mixed, alone, priced = ConfidentDrafts(), ConfidentDrafts(), Budget(1, (0.1,))
    for confident, seq in ((mixed, one), (mixed, other), (alone, other)):
        confident.count_worth(seq, [7], [0.99], priced)
        confident.learn([seq], Draft.chains([[7]]), Verdict([[0]], [5], [None], [False]))
    assert (mixed.worth([other], [priced]).rates == alone.worth([other], [priced]).rates).all()


@pytest.mark.parametrize("cost", [1.1, 0.0])
def test_a_draft_says_how_many_tokens_were_drawn_for_each_sequence(cost: float) -> None:
    """With tokens that were not worth their rows, through a hybrid, the guard, and a batch that is cut or padded."""
    hybrid = HybridDrafter((ModelDrafter(several_steps(), V),), V)
    budgets = [Budget(3, (cost,)), Budget(0), Budget(3, (cost,))]
    draft = Guard(hybrid, target()).propose([Sequence([n, 1, 2, 0]) for n in range(3)], budgets)
    assert draft.drawn is not None
    assert [n > 0 for n in draft.drawn] == [True, False, True]
    assert (len(draft) == 0) == (cost > 1)
    assert draft.pad(1).drawn == [*draft.drawn, 0]
    assert draft.part([2]).drawn == draft.drawn[2:]
    with pytest.raises(DraftError, match="drawn has 2 entries, but the draft has 3"):
        draft.with_drawn([1, 1]).check([3, 0, 3], V, 64)
