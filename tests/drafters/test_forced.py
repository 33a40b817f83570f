"""Forced tokens are drafted before every other drafter, whatever is chosen for that one. Its lookups draft what follows
them."""

from collections.abc import Callable, Sequence as Seq

import pytest

from slipstream import LLM, SamplingParams, Structured
from slipstream.core.draft import Draft
from slipstream.core.drafter import Budget, Drafter, DrafterTraits
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.core.structured import Forced
from slipstream.drafters.acceptance_stats import SpellingStats
from slipstream.drafters.forced import MOST_FORCED, FormDrafter
from slipstream.drafters.hybrid import HybridDrafter
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.draft_trials import State
from slipstream.engine.engine import Engine
from slipstream.grammar.compiler import Grammars
from slipstream.grammar.text_constraint import TextConstraint
from tests.core.letter_tokenizer import constraint_of, letter_tokenizer
from tests.drafters.makers import V, maker, target

GUESSED = [SpellingStats.rule[at] for at in SpellingStats.classes(0, after_right=True)]
FORM = SamplingParams(structured=Structured(regex="(ab(cde){3}[de])+"), max_tokens=40)


def run(drafter: str | Drafter, lengths: DraftLengths | int, *seqs: Sequence, forced_tokens: int = MOST_FORCED) -> None:
    """Decode the sequences together, with this drafter or one of the registry."""
    toy = target()
    made = maker(drafter)(toy) if isinstance(drafter, str) else drafter
    for _ in Engine(toy, made, RULES["rejection"], lengths, max_batch=4, forced_tokens=forced_tokens).decode(seqs):
        pass


def request(params: SamplingParams = FORM) -> Sequence:
    """Make a request that knows no spellings of other tests."""
    grammars, form = Grammars(letter_tokenizer(V), V), params.structured
    return Sequence([0, 1, 2], params, constraint=form and grammars.make_constraint(form, frozenset()))


def test_forced_tokens_are_drafted_while_the_drafter_rests() -> None:
    lengths = DraftLengths(4)
    lengths.serve(prices_rows=True)
    trials = lengths.policy.trials
    trials.state, trials.rest, trials.saved = State.RESTING, 10**6, -10.0
    seq = request()
    run("suffix", lengths, seq)
    assert set(seq.proposers) == {None, "grammar"}
    assert trials.state is State.RESTING


@pytest.mark.parametrize("name", ["model", "suffix", "eagle3", "medusa"])
def test_lengths_are_learned_from_other_tokens_only(name: str) -> None:
    lengths = DraftLengths(4)
    seq, other = request(), Sequence([2, 1, 0], SamplingParams(max_tokens=40))
    learned = list[tuple[int, ...]]()
    learn = lengths.learn
    lengths.learn = lambda step: (learned.append((*step.ids, step.prompt_rows)), learn(step))  # type: ignore
    run(name, lengths, seq, other)
    assert "grammar" in seq.proposers
    assert "grammar" not in other.proposers
    rows = [step[-1] for step in learned if seq.id not in step[:-1] and other.id in step]
    assert rows, "steps with forced tokens teach what their rows cost"
    assert max(rows) > 1
    assert seq.stats.drafter_faults == other.stats.drafter_faults == 0


def test_a_forced_draft_is_as_long_as_its_text_whatever_is_chosen() -> None:
    seq = request()
    run("model", DraftLengths(4), seq)
    assert max(seq.stats.accepted_at) == 11, "abcdecdecde follows d or e"


def test_a_request_that_turns_speculation_off_has_no_forced_drafts() -> None:
    seq = request(SamplingParams(structured=FORM.structured, max_tokens=40, draft_tokens=0))
    run("suffix", DraftLengths(4), seq)
    assert not seq.stats.proposed


def test_a_seed_repeats_its_text_where_only_forced_tokens_are_drafted() -> None:
    llm = LLM(target(), tokenizer=letter_tokenizer(V))
    params = [SamplingParams(structured=FORM.structured, temperature=1.0, seed=7, max_tokens=n) for n in (40, 40)]
    alone, again = (llm.generate([[0, 1, 2]], each)[0] for each in params)
    among = llm.generate([[1, 1], [0, 1, 2], [3]], params[0])[1]
    assert alone.token_ids == again.token_ids == among.token_ids
    assert alone.stats.accepted


@pytest.mark.parametrize("lengths", [DraftLengths(4), 4])
def test_forced_text_is_drafted_as_others_wrote_it_only_if_lengths_are_chosen(
    monkeypatch: pytest.MonkeyPatch, lengths: DraftLengths | int
) -> None:
    """With fixed lengths a seed repeats its text, so drafts must not depend on other requests."""
    asked, find_forced = list[tuple[list[int], bool]](), TextConstraint.find_forced

    def spied(self: TextConstraint, output: list[int], as_before: bool = False) -> Forced:
        asked.append((list(output), as_before))
        return find_forced(self, output, as_before)

    monkeypatch.setattr(TextConstraint, "find_forced", spied)
    seq = request()
    run("suffix", lengths, seq)
    assert {as_before for _, as_before in asked} == {isinstance(lengths, DraftLengths)}
    assert asked[-1][0] == seq.output or isinstance(lengths, int), "the end of a text is learned, too"


def test_drafts_get_shorter_until_one_is_accepted() -> None:
    class Guesses:
        """Claims that a text is forced, which is not."""

        def find_forced(self, output: list[int], as_before: bool) -> Forced:
            return Forced([9, 9, 9, 9] if len(output) < 3 else [5, 6, 7, 8])

    seq, drafter = Sequence([0]), FormDrafter()
    seq.constraint = Guesses()  # type: ignore[assignment]
    lengths = list[int]()
    for token in (1, 2, 3, 5, 6):
        lengths.append(len(drafter.propose([seq], [Budget(8)])))
        seq.tokens.append(token)
    assert lengths == [4, 2, 1, 1, 4]
    drafter.release(seq.id)
    assert not drafter._states


class Continuing(Drafter):
    """A lookup that drafts nothing but these tokens after those of another drafter."""

    name = "continuing"
    traits = DrafterTraits(lookup=True, prices_rows=True)

    def __init__(self, find: Callable[[Seq[int], Budget], list[int]]):
        self.find, self.match = find, 3
        self.calls = list[tuple[Sequence, int, list[int], Budget]]()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        return Draft.empty(len(seqs))

    def match_length(self, seq_id: int) -> int:
        return 0

    def continue_from(self, seq: Sequence, drafted: Seq[int], budget: Budget) -> tuple[list[int], int]:
        self.calls.append((seq, len(seq.tokens), list(drafted), budget))
        return self.find(drafted, budget), self.match


def looping(drafted: Seq[int], budget: Budget) -> list[int]:
    """The form goes on with d, and from the beginning."""
    return [3, 0, 1, 2, 3, 4][: budget.depth]


@pytest.mark.parametrize("name", ["ngram", "suffix", "hybrid"])
def test_lookups_draft_what_follows_forced_tokens_in_the_same_step(name: str) -> None:
    seq = request()
    run(name, 4, seq)
    proposers = "".join({None: ".", "grammar": "g"}.get(by, "l") for by in seq.proposers)
    assert "gl" in proposers
    assert max(seq.stats.accepted_at) > 11
    assert not seq.stats.drafter_faults


def test_a_short_match_does_not_continue_forced_tokens() -> None:
    lookup, seq = Continuing(looping), request()
    lookup.match = 2
    run(lookup, 4, seq)
    assert lookup.calls
    assert "continuing" not in seq.proposers


def test_draft_models_do_not_continue_forced_tokens() -> None:
    seq = request()
    run("model", 4, seq)
    runs = "".join({None: ".", "grammar": "g"}.get(by, "l") for by in seq.proposers)
    assert "gl" not in runs


def test_the_whole_draft_stays_within_its_limits() -> None:
    for most in (5, 12, 32):
        lookup, seq = Continuing(looping), request()
        run(lookup, 4, seq, forced_tokens=most)
        assert lookup.calls
        for _, at, drafted, budget in lookup.calls:
            assert 0 < budget.depth <= 4
            assert len(drafted) + budget.depth <= min(most, 3 + 40 - at - 1)
        assert not seq.stats.drafter_faults


def test_a_request_has_its_own_limit_of_draft_tokens() -> None:
    lookup = Continuing(looping)
    seq = request(SamplingParams(structured=FORM.structured, max_tokens=40, draft_tokens=12))
    run(lookup, 4, seq)
    assert max(len(drafted) + budget.depth for _, _, drafted, budget in lookup.calls) == 12


def test_lookups_are_asked_only_once_all_forced_text_is_drafted_and_before_the_form_ends() -> None:
    lookup, seq = Continuing(looping), request()
    run(lookup, 4, seq, forced_tokens=6)
    assert {tuple(drafted) for _, _, drafted, _ in lookup.calls} <= {(2, 3, 4)[-n:] for n in (1, 2, 3)} | {
        (4, 2, 3, 4),
        (3, 4, 2, 3, 4),
    }
    lookup = Continuing(looping)
    run(lookup, 4, request(SamplingParams(structured=Structured(regex="ab[cd]eab"), max_tokens=40)))
    assert [drafted for _, _, drafted, _ in lookup.calls] == [[1]], "e a b ends the text"


def test_what_the_form_forbids_after_forced_tokens_is_cut_before_the_step_is_timed() -> None:
    rows = list[list[int]]()
    for find in (lambda drafted, budget: [], lambda drafted, budget: [0, 3], looping):
        lengths, seq, other = DraftLengths(4), request(), Sequence([2, 1, 0], SamplingParams(max_tokens=40))
        learn, seen = lengths.learn, list[int]()
        lengths.learn = lambda step, learn=learn, seen=seen: (seen.append(step.prompt_rows), learn(step))  # type: ignore
        run(Continuing(find), lengths, seq, other)
        rows.append(seen)
    assert rows[0] == rows[1]
    assert max(rows[2]) > max(rows[0])


def test_rows_after_forced_tokens_are_priced_by_the_chance_that_these_are_accepted() -> None:
    lookup, lengths = Continuing(lambda drafted, budget: []), DraftLengths(4)
    costs = tuple(0.1 + 0.01 * n for n in range(16))
    lengths.serve(prices_rows=True)
    lengths.policy.costs.price = Budget(0, costs, 0.05)
    run(lookup, lengths, request())
    first = lookup.calls[0][-1]
    assert first.reached == pytest.approx(GUESSED[0] * GUESSED[1] ** (len(lookup.calls[0][2]) - 1))
    assert first.row_costs == costs[len(lookup.calls[0][2]) :]
    assert lookup.calls[-1][-1].reached > first.reached, "forced tokens were accepted"


@pytest.mark.parametrize("wrong", [[99], [3] * 50, [-1]])
def test_a_faulty_continuation_changes_no_text(wrong: list[int]) -> None:
    def fail(drafted: Seq[int], budget: Budget) -> list[int]:
        raise ValueError("found nothing")

    plain = request()
    run("none", 4, plain)
    for find in (lambda drafted, budget: wrong, fail):
        seq = request()
        run(Continuing(find), 4, seq)
        assert seq.tokens == plain.tokens
        assert seq.stats.drafter_faults
        assert "grammar" in seq.proposers


def test_a_lookup_for_predictions_continues_forced_tokens_of_requests_with_a_prediction_only() -> None:
    lookup = Continuing(looping)
    stack = HybridDrafter((lookup, maker("model")(target())), V, predicted=True)
    seq, predicted = request(), Sequence([0, 1, 2], FORM, constraint=constraint_of(FORM, V), prediction=[1, 2])
    run(stack, 4, seq, predicted)
    assert {each.id for each, *_ in lookup.calls} == {predicted.id}
    assert "continuing" in predicted.proposers
    assert "continuing" not in seq.proposers


class Guesses:
    """Claims that these tokens are forced."""

    def __init__(self, *tokens: int, confidence: int = 0):
        self.forced = Forced(tokens, confidence)

    def find_forced(self, output: list[int], as_before: bool) -> Forced:
        return self.forced


def test_the_chance_of_a_forced_draft_is_learned_and_is_none_where_it_is_cut() -> None:
    chances = dict[str, float]()
    for case, token in (("wrong", 1), ("right", 9)):
        seq, drafter = Sequence([0]), FormDrafter()
        seq.constraint = Guesses(9, 9)  # type: ignore[assignment]
        drafter.propose([seq], [Budget(8)])
        assert drafter.chance(seq.id) == GUESSED[0] * GUESSED[1]
        seq.tokens += [token] * 2
        drafter.propose([seq], [Budget(8)])
        chances[case] = drafter.chance(seq.id)
    assert chances["wrong"] == 0, "the second draft is shorter than the text"
    assert chances["right"] > GUESSED[0] * GUESSED[1]
    drafter.release(seq.id)
    assert not drafter.chance(seq.id)


@pytest.mark.parametrize(("row_cost", "guessed", "known"), [(0.1, 8, 8), (0.5, 7, 8), (0.7, 2, 8), (0.9, 0, 5)])
def test_a_forced_draft_ends_where_a_token_costs_more_than_it_gains(row_cost: float, guessed: int, known: int) -> None:
    for confidence, length in ((0, guessed), (3, known)):
        seq, drafter = Sequence([0]), FormDrafter()
        seq.constraint = Guesses(*range(8), confidence=confidence)  # type: ignore[assignment]
        assert len(drafter.propose([seq], [Budget(8, row_costs=(row_cost,))])) == length


def test_guesses_that_are_not_drafted_are_learned_from_in_other_requests_too() -> None:
    """Otherwise a drafter whose guesses do not pay for one model would never see that they do."""
    drafter, budget = FormDrafter(), Budget(8, row_costs=(0.85,))
    lengths = list[int]()
    for _ in range(8):
        seq = Sequence([0])
        seq.constraint = Guesses(5, 6, 7)  # type: ignore[assignment]
        lengths.append(len(drafter.propose([seq], [budget])))
        seq.tokens += [5, 6, 7]
        drafter.propose([seq], [budget])
        drafter.release(seq.id)
    assert lengths[0] == 0
    assert lengths[-1] == 3
