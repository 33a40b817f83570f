"""`TextConstraint` against brute force over finite languages: masks at every node, in any order of asking; stop ids;
complete texts; a free part before the form."""

import random
from collections.abc import Iterable, Sequence as Seq
from itertools import product
from typing import Any

import pytest

from slipstream import LLM, SamplingParams, Structured, Trigger
from slipstream.errors import ParameterError, TargetError
from slipstream.grammar.compiler import Grammars
from slipstream.grammar.text_constraint import GivenTokens, TextConstraint
from tests.tokens.tokenizer_kinds import letters

PIECES = ("a", "b", "c", "d", "ab", "bc", "abc", "cd", "dd")
V, EOS, PADDING = len(PIECES) + 2, len(PIECES), len(PIECES) + 1
GRAMMARS = Grammars(letters(PIECES, (("a", "b"), ("b", "c"), ("ab", "c"), ("c", "d"), ("d", "d"))), V)


def constraint(form: Structured, stops: Iterable[int] = (EOS,)) -> TextConstraint:
    return GRAMMARS.make_constraint(form, frozenset(stops))


def text(tokens: Iterable[int]) -> str:
    return "".join(PIECES[t] for t in tokens)


def allowed(tested: TextConstraint, output: Seq[int], *tails: Seq[int]) -> list[set[int]]:
    return [{t for t, may in enumerate(row) if may} for row in tested.find_allowed(output, tails)]


LANGUAGES: dict[str, tuple[Structured, set[str]]] = {
    "regex": (Structured(regex="a(bc?d{0,2}|cd)"), {"ab", "abd", "abdd", "abc", "abcd", "abcdd", "acd"}),
    "choice": (Structured(choice=["ab", "abcd", "dd", "dab"]), {"ab", "abcd", "dd", "dab"}),
    "lark": (Structured(grammar='start: x "d" | "c"\nx: "a" "b" | "b" "c"'), {"abd", "bcd", "c"}),
    "ebnf": (Structured(grammar='root ::= ("ab" | "c") "d"?'), {"ab", "abd", "c", "cd"}),
}


def expected(language: set[str], tokens: Seq[int], stops: Seq[int] = (EOS,)) -> set[int]:
    """By brute force. All tokens where the text has ended or is no beginning of one in the language."""
    said = ""
    for token in tokens:
        if token in stops or not (can := expected_to_follow(language, said)) or token not in can:
            return set(range(V))
        said += PIECES[token]
    goes_on = expected_to_follow(language, said)
    if not goes_on:
        return set(range(V))
    return goes_on - set(stops) | (set(stops) if said in language else set())


def expected_to_follow(language: set[str], said: str) -> set[int]:
    return {t for t, piece in enumerate(PIECES) if any(word.startswith(said + piece) for word in language)}


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("stops", [(EOS,), (), (EOS, PIECES.index("d"))], ids=str)
def test_masks_are_those_of_brute_force_in_any_order_of_asking(name: str, stops: tuple[int, ...]) -> None:
    """Tails of up to three tokens below outputs that grow, and jump to other texts."""
    form, language = LANGUAGES[name]
    tested, rng = constraint(form, stops), random.Random(1)
    outputs = [()] + [out for n in (1, 2) for out in product(range(EOS), repeat=n) if _goes_on(language, out, stops)]
    tails = [tail for n in range(3) for tail in product(range(V), repeat=n)]
    for _ in range(60):
        output, some = rng.choice(outputs), rng.choices(tails, k=6)
        assert allowed(tested, output, *some) == [expected(language, (*output, *tail), stops) for tail in some]


def _goes_on(language: set[str], tokens: Seq[int], stops: Seq[int]) -> bool:
    """Whether plain decoding can arrive at a next token after this output."""
    return all(t in expected(language, tokens[:i], stops) for i, t in enumerate(tokens)) and (
        expected(language, tokens, stops) != set(range(V))
    )


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_text_is_complete_exactly_if_it_is_in_the_language_and_no_longer_one_is(name: str) -> None:
    form, language = LANGUAGES[name]
    tested = constraint(form)
    for n in range(4):
        for tokens in product(range(EOS), repeat=n):
            said = text(tokens)
            whole = said in language and not any(word != said and word.startswith(said) for word in language)
            assert tested.complete((), tokens) == whole, said


def test_what_was_emitted_against_the_form_is_an_error() -> None:
    with pytest.raises(TargetError, match="after 1 tokens: token 3 is not allowed after 0 tokens"):
        constraint(Structured(regex="ab")).find_allowed([3], [()])


AFTER = Structured(choice=["ab", "cd", "d"], after="bb")
FREE = set(range(V))


def test_before_the_end_of_the_free_part_every_token_may_follow_unless_it_goes_on_against_the_form() -> None:
    """No token of this vocabulary holds both "bb" and more, but "b" before "bc" and "bcd" does."""
    tested = constraint(AFTER)
    assert allowed(tested, (), (), (0,), (EOS, 1), (3, 3)) == [FREE] * 4
    b, ab, bc = 1, PIECES.index("ab"), PIECES.index("bc")
    assert bc in allowed(tested, [b], ())[0], "bc ends the free part, and c begins cd"
    assert allowed(constraint(Structured(choice=["ab"], after="bb")), [b], ()) == [FREE - {bc}]
    assert allowed(tested, [], (ab, b))[0] == expected({"ab", "cd", "d"}, ())
    assert allowed(tested, [ab, b], (), (0,)) == [expected({"ab", "cd", "d"}, t) for t in ((), (0,))]
    assert allowed(tested, [b, bc], ()) == [{3}], "the form begins with the c of the token before"


def test_the_end_of_the_free_part_is_found_across_tokens_and_only_its_first_occurrence_counts() -> None:
    tested = constraint(Structured(regex="(abd|d)+", after="abd"))
    a, b, d, ab, abc = 0, 1, 3, PIECES.index("ab"), PIECES.index("abc")
    for before in ([a, b, d], [ab, d], [a, ab, d], [abc, a, b, d], [ab, ab, d]):
        assert allowed(tested, before, ())[0] == {a, d, ab, PIECES.index("dd")}, before
    for before in ([a, b], [abc, d], [b, d]):
        assert allowed(tested, before, ())[0] == FREE, before
    assert allowed(tested, [ab, d, ab, d], ())[0] == {a, d, ab, PIECES.index("dd"), EOS}


def test_a_text_is_not_complete_before_its_free_part_ends() -> None:
    tested = constraint(AFTER)
    b = 1
    assert not tested.complete((), (0, 1))
    assert not tested.complete((b,), (b,))
    assert tested.complete((b, b), (0, 1))
    assert tested.complete((b,), (b, 3))
    assert not constraint(Structured(choice=["c", "cd"], after="bb")).complete((b,), (PIECES.index("bc"),))
    assert constraint(Structured(choice=["c"], after="bb")).complete((b,), (PIECES.index("bc"),)), "by the rest of bc"


TRIGGERED = Structured(choice=["dab", "dcd"], trigger=Trigger(["d"], repeats=True))


def follow(said: str, repeats: bool = True) -> set[str] | None:
    """What may follow a text, by brute force: None for anything, else the texts that it must go on with or begin."""
    place = 0
    while (place := said.find("d", place)) >= 0:
        open_ = {word for word in ("dab", "dcd") if word.startswith(said[place:]) and word != said[place:]}
        if open_:
            return {word[len(said) - place :] for word in open_}
        place += 3
        if not repeats:
            return set()
    return None


def may(said: str, piece: str) -> bool:
    """A piece may go on with a form, or write the beginning of the next one, but not both."""
    rest = follow(said)
    if rest is not None:
        return any(word.startswith(piece) for word in rest)
    first = piece.find("d")
    return first < 0 or any(word.startswith(piece[first:]) for word in ("dab", "dcd"))


def test_masks_of_triggered_forms_are_those_of_brute_force_in_any_order_of_asking() -> None:
    tested, rng = constraint(TRIGGERED), random.Random(2)
    for _ in range(300):
        tokens: list[int] = []
        for _ in range(rng.randrange(9)):
            tokens.append(rng.choice([t for t, piece in enumerate(PIECES) if may(text(tokens), piece)]))
        at = rng.randrange(len(tokens) + 1)
        wanted = {t for t, piece in enumerate(PIECES) if may(text(tokens), piece)}
        if follow(text(tokens)) is None:
            wanted |= {EOS, PADDING}
        assert allowed(tested, tokens[:at], tokens[at:]) == [wanted], text(tokens)
        assert not tested.complete(tokens[:at], tokens[at:])


def test_a_trigger_that_does_not_repeat_ends_the_text_and_one_at_the_beginning_leaves_others_free() -> None:
    once = constraint(Structured(choice=["dab", "dcd"], trigger=Trigger(["d"])))
    a, d, ab = 0, 3, PIECES.index("ab")
    assert not once.complete((), (a, d))
    assert once.complete((a,), (d, ab))
    assert constraint(TRIGGERED).complete((a,), (d, ab)) is False
    first = constraint(Structured(choice=["dab"], trigger=Trigger(["d"], first=True)))
    a, d, cd = 0, 3, PIECES.index("cd")
    assert allowed(first, [], (d,), (a, d), (cd,)) == [{a, PIECES.index("ab")}, FREE, FREE]
    assert allowed(first, [], ()) == [FREE - {PIECES.index("dd")}]


def test_triggers_within_the_reasoning_do_not_count() -> None:
    a, b, c, d = range(4)
    form = Structured(choice=["dab"], trigger=Trigger(["d"], reasoning=("ab", "bc")))
    tested, after = constraint(form), {a, PIECES.index("ab")}
    masks = [FREE, FREE - {PIECES.index("dd")}, after]
    assert allowed(tested, [], (a, b, d), (a, b, d, b, c), (a, b, d, b, c, d)) == masks
    assert allowed(tested, [], (a, d), (b, d)) == [after, after], "no reasoning"
    begun = constraint(Structured(choice=["dab"], trigger=Trigger(["d"], reasoning=("", "bc"))))
    assert allowed(begun, [], (d,), (d, b, c, d)) == [FREE, after]


@pytest.mark.parametrize(
    "wrong",
    [{"texts": []}, {"texts": "d"}, {"texts": [""]}, {"texts": ["d"], "reasoning": ("a", "")},
     {"texts": ["d"], "reasoning": ("a",)}, {"texts": ["d"], "first": 1}],
)  # fmt: skip
def test_triggers_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"trigger\."):
        Trigger(**wrong)
    with pytest.raises(ParameterError, match="trigger"):
        Structured(choice=["a"], trigger=Trigger(["a"]), after="b")


def test_only_the_next_token_is_allowed_after_what_is_right() -> None:
    form = GivenTokens([3, 1, 2], 5)
    rows = form.find_allowed([3], [(), (1,), (2,), (1, 2)])
    assert [row.nonzero()[0].tolist() for row in rows] == [[1], [2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert [form.complete([3], tail) for tail in ((), (1,), (1, 2))] == [False, False, True]
    with pytest.raises(ParameterError, match="contains id 5"):
        GivenTokens([5], 5)


@pytest.mark.parametrize("draft", [None, "embedded", "suffix"])
def test_log_probabilities_of_a_given_text_are_those_of_the_text_that_the_target_wrote(draft: str | None) -> None:
    llm = LLM("embedded", draft=draft, draft_tokens=3)
    wrote = llm.generate(["def add(a, b):"], SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=2))[0]
    params = SamplingParams(max_tokens=50, logprobs=2, ignore_eos=True, structured=Structured(tokens=wrote.token_ids))
    given = llm.generate(["def add(a, b):"], params)[0]
    assert (given.token_ids, given.finish_reason) == (wrote.token_ids, "stop")
    for scored, sampled in zip(given.logprobs, wrote.logprobs, strict=True):
        assert scored.logprob == pytest.approx(sampled.logprob, abs=1e-4)  # sums of other numbers of rows
        assert [token for token, _ in scored.top] == [token for token, _ in sampled.top]
