"""Forced tokens are drafted before every other drafter, whatever is chosen for that one."""

import pytest

from slipstream import LLM, SamplingParams, Structured
from slipstream.core.drafter import Budget
from slipstream.core.rules import RULES
from slipstream.core.sequence import Sequence
from slipstream.drafters.forced import FormDrafter
from slipstream.engine.draft_lengths import DraftLengths
from slipstream.engine.draft_trials import State
from slipstream.engine.engine import Engine
from tests.core.letter_tokenizer import constraint_of, letter_tokenizer
from tests.drafters.makers import V, maker, target

FORM = SamplingParams(structured=Structured(regex="(ab(cde){3}[de])+"), max_tokens=40)


def run(name: str, lengths: DraftLengths, *seqs: Sequence) -> None:
    """Decode the sequences together, with a drafter of the registry."""
    toy = target()
    for _ in Engine(toy, maker(name)(toy), RULES["rejection"], lengths, max_batch=4).decode(seqs):
        pass


def request(params: SamplingParams = FORM) -> Sequence:
    return Sequence([0, 1, 2], params, constraint=constraint_of(params, V))


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
    run("suffix", DraftLengths(4), seq)
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


def test_drafts_get_shorter_until_one_is_accepted() -> None:
    class Guesses:
        """Claims that a text is forced, which is not."""

        def find_forced(self, output: list[int]) -> list[int]:
            return [9, 9, 9, 9] if len(output) < 3 else [5, 6, 7, 8]

    seq, drafter = Sequence([0]), FormDrafter()
    seq.constraint = Guesses()  # type: ignore[assignment]
    lengths = list[int]()
    for token in (1, 2, 3, 5, 6):
        lengths.append(len(drafter.propose([seq], [Budget(8)])))
        seq.tokens.append(token)
    assert lengths == [4, 2, 1, 1, 4]
    drafter.release(seq.id)
    assert not drafter._last
