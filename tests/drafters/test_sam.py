"""The suffix automaton and its drafter: what it matches, what it copies, how far, what it remembers."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch

from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.drafters.guard import MAX_NODES
from slipstream.drafters.hybrid import Lookup
from slipstream.drafters.sam import Automaton, History, SamConfig, SamDrafter
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from slipstream.targets.toy import ToyTarget
from tests.drafters.soak import PIECE, held, stream
from tests.end_to_end.exact import Oracle


def draft(tokens: Iterable[int], depth: int = 8, **options: object) -> Draft:
    options = {"row_cost": 0.0, "spec_factor": 100.0, **options}
    return SamDrafter(SamConfig(**options)).propose([Sequence(list(tokens))], [depth])  # type: ignore[arg-type]


def chain(tokens: Iterable[int], depth: int = 8, **options: object) -> list[int]:
    made = draft(tokens, depth, **options)
    assert made.is_chain
    assert made.q is None
    return made.ids


def places(text: list[int], string: list[int]) -> list[int]:
    return [i for i in range(len(text) - len(string) + 1) if text[i : i + len(string)] == string]


def longest(text: list[int], tail: list[int]) -> int:
    return max((m for m in range(1, len(tail) + 1) if places(text, tail[-m:])), default=0)


def test_the_match_and_its_latest_place_equal_a_search_of_the_text() -> None:
    """Texts over few tokens, grown in pieces: after each, the longest end that occurred before, and where the text went
    on behind its latest occurrence."""
    rng = random.Random(0)
    for _ in range(150):
        size = rng.choice([1, 2, 3, 8])
        text = [rng.randrange(size) for _ in range(rng.randrange(1, 80))]
        automaton, done = Automaton(), 0
        while done < len(text):
            piece = text[done : done + rng.randrange(1, 5)]
            automaton.extend(piece)
            done += len(piece)
            so_far = text[:done]
            match = longest(so_far[:-1], so_far[1:]) if done > 1 else 0
            assert automaton.match == match
            if match:
                assert automaton.place == places(so_far[:-1], so_far[-match:])[-1] + match
        assert len(automaton) == len(text)
        assert len(automaton.link) <= 2 * len(text)


def test_another_text_is_followed_through_an_automaton() -> None:
    rng = random.Random(1)
    for _ in range(100):
        text = [rng.randrange(3) for _ in range(40)]
        automaton = Automaton()
        automaton.extend(text)
        state, match, other = 0, 0, list[int]()
        for _ in range(40):
            other.append(rng.randrange(4))
            state, match = automaton.advance(state, match, other[-1:])
            assert match == longest(text, other)
            if match:
                place = automaton.follow[state]
                assert text[place - match : place] == other[-match:]


def test_the_example_of_the_docstring() -> None:
    x, a, b, c, y, z = range(6)
    assert chain([x, a, b, c, y, z, a, b, c], 3) == [y, z, a]


def test_the_longest_match_wins_then_the_latest() -> None:
    assert chain([2, 3, 4, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], 1) == [5]
    assert chain([1, 5, 1, 6, 1], 1) == [6]


def test_a_match_below_min_match_is_let_go() -> None:
    assert chain([1, 2, 3, 9, 3], 2) == [9, 3]
    assert chain([1, 2, 3, 9, 3], min_match=2) == []
    assert chain([1, 2, 3, 4]) == []
    assert chain([7]) == []


def test_the_draft_grows_with_the_match() -> None:
    text = list(range(10, 60))
    for match in range(1, 8):
        for factor in (0.5, 1.0, 3.0):
            ids = chain([*text, 5, *text[20 - match : 20]], 64, spec_factor=factor)
            assert ids == text[20 : 20 + max(1, min(16, int(factor * match)))]
    assert chain([*text, 5, *text[10:20]], 64, max_draft=3) == text[20:23]
    assert chain([*text, 5, *text[10:20]], 2) == text[20:22]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_is_followed_round_and_round(period: int) -> None:
    loop = list(range(period))
    for rounds in (1, 2, 20):
        assert chain([9, *loop * rounds, *loop[:1]], 7) == [loop[(1 + i) % period] for i in range(7)]


def test_drafting_stops_where_guesses_are_never_right() -> None:
    rows = []
    for cost in (0.0, 0.1):
        target = ToyTarget(64, order=1, seed=1, sharpness=0.1)
        options = {"row_cost": cost, "spec_factor": 8.0}
        llm = LLM(target, "sam", draft_tokens=8, draft_options=options)
        done = llm.generate([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=400, seed=1))[0]
        rows.append(done.stats.proposed / done.stats.rounds)
    assert rows[0] > 4
    assert rows[1] < 1


def test_the_older_half_is_still_searched_and_then_forgotten() -> None:
    config, text = SamConfig(max_tokens=40), [1000, 1001, 1002, *range(25)]
    history = History(config, None)
    history.extend(text)
    text += [1000, 1001]
    history.extend(text)
    assert history.longest() == (2, 2)
    text += [*range(100, 115), 1000, 1001]
    history.extend(text)
    assert history.longest() == (2, 30), "the occurrence that is not yet forgotten"
    text += [*range(200, 250), 1000, 1001]
    history.extend(text)
    assert history.longest()[0] == 0
    assert len(history) <= 40


def test_the_halves_together_match_what_either_holds() -> None:
    """However the text is split between them: the longest end that lies wholly in one half, and a place of it."""
    rng = random.Random(2)
    for _ in range(100):
        half = rng.choice([5, 8, 13])
        text = [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        history, done = History(SamConfig(max_tokens=2 * half), None), 0
        while done < len(text):
            done = min(len(text), done + rng.randrange(1, 6))
            history.extend(text[:done])
            so_far = text[:done]
            begin = (done - 1) // half * half
            young, old = so_far[begin:], so_far[max(0, begin - half) : begin]
            expected = max(longest(young[:-1], young[1:]), longest(old, so_far[1:]))
            match, place = history.longest()
            assert match == expected
            assert not match or (so_far[place - match : place] == so_far[-match:] and place < done)


def test_a_corpus_is_copied_from_where_its_match_is_longer() -> None:
    corpus = [[50, 51, 52, 53, 54], [1, 2, 60, 61]]
    assert chain([9, 50, 51], 8, corpus=corpus) == [52, 53, 54], "a document ends, and another begins"
    assert chain([51, 7, 50, 51], 1, corpus=corpus) == [52], "a match of two against one of one"
    assert chain([51, 7, 50, 51], 1, corpus=corpus, bias=1) == [7]
    assert chain([2, 8, 54, 2], 1, corpus=corpus) == [8], "as long: the own text is nearer"
    assert chain([9, 54], 4, corpus=corpus) == [], "nothing follows the end of a document"


def test_a_corpus_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"id 8.*0\.\.7"):
        LLM(ToyTarget(8), "sam", draft_options={"corpus": [[1, 2], [8]]})


def test_it_is_a_lookup_that_tells_its_match() -> None:
    drafter, seq = SamDrafter(), Sequence([1, 2, 3, 9, 1, 2, 3])
    assert isinstance(drafter, Lookup)
    drafter.propose([seq], [4])
    assert drafter.match_length(seq.id) == 3
    assert drafter.match_length(10**9) == 0


@pytest.mark.parametrize("options", [{}, {"max_tokens": 6}, {"corpus": [[0, 1, 2, 3] * 2]}], ids=str)
def test_every_output_length_up_to_and_beyond_the_draft_length(options: dict[str, object]) -> None:
    """transformers 46993: lookup overran max_new_tokens. Greedy text, exactly that long, for 1..K + 2."""
    truth, prompt = Oracle(ToyTarget(4, order=2, seed=3)), [0, 1, 2, 0, 1, 2, 0]
    for n in range(1, 10):
        llm = LLM(ToyTarget(4, order=2, seed=3), "sam", draft_tokens=7, draft_options=options)
        done = llm.generate([prompt] * 2, SamplingParams(max_tokens=n))
        assert [d.token_ids for d in done] == [truth.greedy(prompt, n)] * 2


def test_memory_is_bounded_over_a_million_tokens() -> None:
    """Tokens and bytes held do not grow once the bound is reached. A piece fills the younger automaton to the brim."""
    history, sizes, text = History(SamConfig(max_tokens=PIECE // 4), None), list[int](), list[int]()
    for piece in stream():
        text += piece
        history.extend(text)
        assert len(history) <= PIECE // 4
        sizes.append(held(history))
    assert max(sizes) < 700 * len(history)
    assert max(sizes[2:]) < 1.05 * max(sizes[:2])


@pytest.mark.parametrize(
    "options",
    [
        {"min_match": 0},
        {"max_draft": 0},
        {"max_draft": MAX_NODES + 1},
        {"spec_factor": float("inf")},
        {"row_cost": -0.1},
        {"max_tokens": 1},
        {"bias": -1},
    ],
    ids=str,
)
def test_impossible_values_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ParameterError) as caught:
        SamConfig(**options)  # type: ignore[arg-type]
    assert any(name in str(caught.value) for name in options)


def test_guesses_lie_where_the_target_wants_them() -> None:
    drafter = SamDrafter(SamConfig(min_match=1), device="meta")
    assert drafter.propose([Sequence([1, 2, 1])], [2]).tokens.device == torch.device("meta")
