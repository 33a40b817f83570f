"""The suffix automaton and its drafter: what it matches, what it copies, how far, what it remembers."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.drafters.sam import Automaton, History, SamConfig, SamDrafter
from slipstream.errors import ParameterError
from slipstream.llm import LLM
from tests.targets.toy import ToyTarget


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
    """Texts over few tokens, extended in pieces: after each, the longest suffix that occurred before, and the position
    after its latest occurrence."""
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


def test_a_match_shorter_than_min_match_is_not_used() -> None:
    assert chain([1, 2, 3, 9, 3], min_match=2) == []


def test_the_older_half_is_still_searched_and_then_forgotten() -> None:
    config, text = SamConfig(max_tokens=40), [1000, 1001, 1002, *range(25)]
    history = History(config, None)
    history.extend(text)
    history.extend([1000, 1001])
    assert history.longest() == (2, 2)
    history.extend([*range(100, 115), 1000, 1001])
    assert history.longest() == (2, 30), "the occurrence that is not yet forgotten"
    history.extend([*range(200, 250), 1000, 1001])
    assert history.longest()[0] == 0
    assert len(history) <= 40


def test_the_two_halves_together_match_what_either_holds() -> None:
    """For any split of the text: the longest suffix that lies completely in one half, and a position of it."""
    rng = random.Random(2)
    for _ in range(100):
        half = rng.choice([5, 8, 13])
        text = [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        history, done = History(SamConfig(max_tokens=2 * half), None), 0
        while done < len(text):
            before, done = done, min(len(text), done + rng.randrange(1, 6))
            history.extend(text[before:done])
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
        LLM(ToyTarget(8), "sam", draft_options={"corpus": [[1, 2], [8]]}, draft_tokens=4)
