"""`TextConstraint` against brute force over finite languages: masks at every node, in any order of asking; stop ids;
complete texts; a free part before the form."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence as Seq
from itertools import product

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from slipstream import Structured
from slipstream.errors import TargetError
from slipstream.grammar.compiler import Grammars
from slipstream.grammar.text_constraint import TextConstraint

PIECES = ["a", "b", "c", "d", "ab", "bc", "abc", "cd", "dd"]
V, EOS, PADDING = len(PIECES) + 2, len(PIECES), len(PIECES) + 1


def tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of one to three letters."""
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "d"), ("d", "d")]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, merges))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


GRAMMARS = Grammars(tokenizer(), V)


def constraint(form: Structured, stops: Iterable[int] = (EOS,)) -> TextConstraint:
    return GRAMMARS.constraint(form, frozenset(stops))


def text(tokens: Iterable[int]) -> str:
    return "".join(PIECES[t] for t in tokens)


def allowed(found: TextConstraint, output: Seq[int], *tails: Seq[int]) -> list[set[int]]:
    return [{t for t, may in enumerate(row) if may} for row in found.allowed(output, tails)]


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
    found, rng = constraint(form, stops), random.Random(1)
    outputs = [()] + [
        tokens for n in (1, 2) for tokens in product(range(EOS), repeat=n) if _goes_on(language, tokens, stops)
    ]
    tails = [tail for n in range(3) for tail in product(range(V), repeat=n)]
    for _ in range(60):
        output, some = rng.choice(outputs), rng.choices(tails, k=6)
        assert allowed(found, output, *some) == [expected(language, (*output, *tail), stops) for tail in some]


def _goes_on(language: set[str], tokens: Seq[int], stops: Seq[int]) -> bool:
    """Whether plain decoding can arrive at a next token after this output."""
    return all(t in expected(language, tokens[:i], stops) for i, t in enumerate(tokens)) and (
        expected(language, tokens, stops) != set(range(V))
    )


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_text_is_complete_exactly_if_it_is_in_the_language_and_no_longer_one_is(name: str) -> None:
    form, language = LANGUAGES[name]
    found = constraint(form)
    for n in range(4):
        for tokens in product(range(EOS), repeat=n):
            said = text(tokens)
            whole = said in language and not any(word != said and word.startswith(said) for word in language)
            assert found.complete((), tokens) == whole, said


def test_what_was_emitted_against_the_form_is_an_error() -> None:
    with pytest.raises(TargetError, match="after 1 tokens: token 3 is not allowed after 0 tokens"):
        constraint(Structured(regex="ab")).allowed([3], [()])


# --- after a free part ----------------------------------------------------------------------------------------------

AFTER = Structured(choice=["ab", "cd", "d"], after="bb")
FREE = set(range(V))


def test_before_the_end_of_the_free_part_every_token_may_follow_unless_it_goes_on_against_the_form() -> None:
    """No token of this vocabulary holds both "bb" and more, but "b" before "bc" and "bcd" does."""
    found = constraint(AFTER)
    assert allowed(found, (), (), (0,), (EOS, 1), (3, 3)) == [FREE] * 4
    b, ab, bc = 1, PIECES.index("ab"), PIECES.index("bc")
    assert bc in allowed(found, [b], ())[0], "bc ends the free part, and c begins cd"
    assert allowed(constraint(Structured(choice=["ab"], after="bb")), [b], ()) == [FREE - {bc}]
    assert allowed(found, [], (ab, b))[0] == expected({"ab", "cd", "d"}, ())
    assert allowed(found, [ab, b], (), (0,)) == [expected({"ab", "cd", "d"}, t) for t in ((), (0,))]
    assert allowed(found, [b, bc], ()) == [{3}], "the form begins with the c of the token before"


def test_the_end_of_the_free_part_is_found_across_tokens_and_only_its_first_occurrence_counts() -> None:
    found = constraint(Structured(regex="(abd|d)+", after="abd"))
    a, b, d, ab, abc = 0, 1, 3, PIECES.index("ab"), PIECES.index("abc")
    for before in ([a, b, d], [ab, d], [a, ab, d], [abc, a, b, d], [ab, ab, d]):
        assert allowed(found, before, ())[0] == {a, d, ab, PIECES.index("dd")}, before
    for before in ([a, b], [abc, d], [b, d]):
        assert allowed(found, before, ())[0] == FREE, before
    assert allowed(found, [ab, d, ab, d], ())[0] == {a, d, ab, PIECES.index("dd"), EOS}


def test_a_text_is_not_complete_before_its_free_part_ends() -> None:
    found = constraint(AFTER)
    b = 1
    assert not found.complete((), (0, 1))
    assert not found.complete((b,), (b,))
    assert found.complete((b, b), (0, 1))
    assert found.complete((b,), (b, 3))
    assert not constraint(Structured(choice=["c", "cd"], after="bb")).complete((b,), (PIECES.index("bc"),))
    assert constraint(Structured(choice=["c"], after="bb")).complete((b,), (PIECES.index("bc"),)), "by the rest of bc"
