"""What a form forces is drafted in the model's own tokens: as far as only one text can follow, and no further."""

import json
import logging
from typing import Any

import pytest

from slipstream import LLM, SamplingParams, Structured, Trigger
from slipstream.errors import ParameterError
from slipstream.grammar.compiler import Grammars
from slipstream.tokens.text import load_tokenizer
from slipstream.zoo import checkpoint_of
from tests.core.letter_tokenizer import letter_tokenizer
from tests.targets.toy import ToyTarget
from tests.tokens.tokenizer_kinds import letters

V = 4096


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(checkpoint_of("embedded", "target"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, V)


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


WEATHER = record(
    city={"type": "string"}, unit={"enum": ["celsius", "fahrenheit"]}, days={"type": "integer"},
    at=record(lat={"type": "number"}, names={"type": "array", "items": {"type": "string"}}),
)  # fmt: skip
VALUE = {"city": 'Paris, "the" city', "unit": "celsius", "days": 3, "at": {"lat": 2.5, "names": ["a", "b c"]}}


def followed(
    grammars: Grammars, ids: list[int], form: Structured, as_before: bool = False
) -> tuple[list[int], list[int]]:
    """The forced tokens that were right, and those that were wrong, along a text."""
    constraint, output = grammars.make_constraint(form, frozenset()), list[int]()
    right, wrong = list[int](), list[int]()
    while len(output) < len(ids):
        forced, rest = list(constraint.find_forced(output, as_before).tokens), ids[len(output) :]
        same = next(
            (n for n, (a, b) in enumerate(zip(forced, rest, strict=False)) if a != b), min(len(forced), len(rest))
        )
        right += forced[:same]
        wrong += forced[same : same + 1]
        output += rest[: same + 1]
    constraint.find_forced(output, as_before)
    return right, wrong


@pytest.mark.parametrize(
    ("layout", "most_wrong"), [({}, 0), ({"indent": 2}, 4), ({"separators": (",", ":")}, 2)], ids=str
)
def test_names_and_marks_of_a_schema_are_forced_in_the_layout_that_the_text_has(
    grammars: Grammars, tokenizer: Any, layout: dict[str, Any], most_wrong: int
) -> None:
    ids = tokenizer.encode(json.dumps(VALUE, **layout))
    right, wrong = followed(grammars, ids, Structured(json_schema=WEATHER))
    assert len(right) > len(ids) / 3
    assert len(wrong) <= most_wrong


def test_a_text_is_never_forced_where_the_form_leaves_a_choice(grammars: Grammars, tokenizer: Any) -> None:
    constraint = grammars.make_constraint(Structured(regex="(red|green|blue)!"), frozenset())
    assert not constraint.find_forced([]).tokens
    assert tokenizer.decode(constraint.find_forced(tokenizer.encode("gr")).tokens) == "een!"
    assert not grammars.make_constraint(Structured(regex="[a-z]+"), frozenset()).find_forced([]).tokens


def test_the_last_token_is_left_out_where_it_depends_on_what_follows(grammars: Grammars, tokenizer: Any) -> None:
    for text, form in (("true", "tru(e|th)"), ("return x", "retu(rn x|n)")):
        forced = list(grammars.make_constraint(Structured(regex=form), frozenset()).find_forced([]).tokens)
        ids = tokenizer.encode(text)
        assert forced == ids[: len(forced)]


def test_a_form_after_free_text_is_forced_from_its_trigger_on(grammars: Grammars, tokenizer: Any) -> None:
    form = Structured(grammar='start: "CALL" " weather" (" now" | " later")', trigger=Trigger(["CALL"], repeats=True))
    constraint = grammars.make_constraint(form, frozenset())
    output = tokenizer.encode("the CAL")
    assert not constraint.find_forced(output).tokens
    output = tokenizer.encode("the CALL")
    assert tokenizer.decode([*output, *constraint.find_forced(output).tokens]).startswith("the CALL weather")
    output = tokenizer.encode("the CALL weather now and CALL")
    assert tokenizer.decode(constraint.find_forced(output).tokens).startswith(" weather")


def test_a_given_text_is_forced_token_by_token(grammars: Grammars) -> None:
    constraint = grammars.make_constraint(Structured(tokens=[5, 6, 7]), frozenset())
    assert list(constraint.find_forced([]).tokens) == [5, 6, 7]
    assert list(constraint.find_forced([5, 6]).tokens) == [7]


def test_forced_text_does_not_depend_on_how_the_text_was_read(grammars: Grammars, tokenizer: Any) -> None:
    """A constraint that is asked for other texts in between, as after a preemption, says the same."""
    ids, form = tokenizer.encode(json.dumps(VALUE, indent=1)), Structured(json_schema=WEATHER)
    one = grammars.make_constraint(form, frozenset())
    step_by_step = [list(one.find_forced(ids[:n]).tokens) for n in range(len(ids))]
    assert [list(one.find_forced(ids[:n]).tokens) for n in reversed(range(len(ids)))] == step_by_step[::-1]
    assert [
        list(grammars.make_constraint(form, frozenset()).find_forced(ids[:n]).tokens) for n in range(len(ids))
    ] == step_by_step


SPELLED = ("a", "b", "c", "d", "ab", "bc", "cd")
A, B, C, D, AB, BC, CD = range(7)


@pytest.fixture
def spelled() -> Grammars:
    return Grammars(letters(SPELLED), len(SPELLED))


def write(grammars: Grammars, form: str, *ids: int) -> list[list[int]]:
    """Write a text token by token. Returns what was forced before each token, in the tokens of earlier texts."""
    constraint = grammars.make_constraint(Structured(regex=form), frozenset())
    return [list(constraint.find_forced(list(ids[:n]), as_before=True).tokens) for n in range(1 + len(ids))][:-1]


def test_forced_text_is_drafted_in_the_tokens_in_which_the_target_wrote_it_before(spelled: Grammars) -> None:
    text = (D, A, BC, D, A)
    assert write(spelled, "d(abcd|ddd)a", *text)[2] == [B, C, D, A], "the tokenizer's tokens"
    assert write(spelled, "d(abcd|ddd)a", *text)[2] == [BC, D, A], "learned, with the end of the text"
    assert write(spelled, "(da|b)bcda", *text)[2] == [BC, D, A], "under another form, too"
    alone = spelled.make_constraint(Structured(regex="d(abcd|ddd)a"), frozenset())
    assert list(alone.find_forced([D, A]).tokens) == [B, C, D, A], "not where seeds must repeat their texts"


def test_a_spelling_is_replaced_when_it_was_wrong_more_often_than_right(spelled: Grammars) -> None:
    for _ in range(3):
        write(spelled, "abcd", A, BC, D)
    drafts = [write(spelled, "abcd", A, B, CD)[1] for _ in range(5)]
    assert drafts == [[BC, D], [BC, D], [BC, D], [B, CD], [B, CD]]


def test_a_text_that_ends_within_forced_text_teaches_nothing(spelled: Grammars) -> None:
    write(spelled, "abcd", A, BC)
    assert write(spelled, "abcd", A)[0] == [A, B, C, D]
    assert list(write(spelled, "abcd", A, B)[1]) == [B, C, D]


def test_a_token_that_reaches_beyond_the_forced_text_is_not_drafted(spelled: Grammars) -> None:
    write(spelled, "ab(c|d)", A, BC)
    assert write(spelled, "ab(c|d)", A, BC)[1] == []
    for _ in range(2):
        write(spelled, "ab(c|d)", A, B, D)
    assert write(spelled, "ab(c|d)", A, B, D)[1] == [B]


def test_unusual_white_space_is_drafted_the_next_time(grammars: Grammars, tokenizer: Any) -> None:
    text = json.dumps(VALUE, separators=(" , ", "  :\t"))
    ids = tokenizer.encode(text.replace("{", "{  "))
    first, second = (followed(grammars, ids, Structured(json_schema=WEATHER), as_before=True) for _ in range(2))
    assert len(second[1]) < len(first[1])
    assert len(second[0]) > len(first[0])


def test_the_number_of_spellings_is_bounded(spelled: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.grammar.forced_text.MOST_SPELLINGS", 8)
    for n in range(3, 30):
        write(spelled, "a" * n, A, A)
    _, _, form = spelled._compiled(Structured(regex="aaa"))
    assert len(form.spellings) == 8
    assert max(len(ahead) for _, ahead in form.spellings) == 29, "the newest are kept"


ENDLESS = {"grammar": 'start: "a" start'}


@pytest.mark.parametrize("form", [ENDLESS, {"regex": "a{3000}"}, {"regex": "(ab|c)*d{40}"}], ids=str)
def test_a_form_that_forces_an_endless_text_is_drafted_in_parts_or_not_at_all(form: dict[str, Any]) -> None:
    llm = LLM(ToyTarget(5), tokenizer=letter_tokenizer(5))
    params = SamplingParams(structured=Structured(**form), max_tokens=300)
    plain = LLM(ToyTarget(5), tokenizer=letter_tokenizer(5), draft_tokens=0)
    done, alone = (each.generate([[1]], params)[0] for each in (llm, plain))
    assert done.token_ids == alone.token_ids
    assert alone.stats.steps == 300 or form is not ENDLESS
    assert done.stats.steps < alone.stats.steps or form is ENDLESS


def test_a_forced_text_that_cannot_be_followed_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(ToyTarget(5), tokenizer=letter_tokenizer(5))
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        for _ in range(2):
            llm.generate([[1]], SamplingParams(structured=Structured(**ENDLESS), max_tokens=20))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "is no longer drafted" in told
    assert "\n" not in told


def test_forced_text_that_the_tokens_cannot_write_is_drafted_up_to_there() -> None:
    llm = LLM(ToyTarget(5), tokenizer=letter_tokenizer(5))
    form = Structured(grammar='start: "abc" (/[d]/ | "é") "ab"')
    done = llm.generate([[1]], SamplingParams(structured=form))[0]
    assert done.text == "abcdab"
    assert done.stats.accepted
    assert done.stats.drafter_faults == 0


def test_a_form_that_the_tokens_cannot_write_is_refused_in_one_line_that_says_so() -> None:
    llm = LLM(ToyTarget(5), tokenizer=letter_tokenizer(5))
    with pytest.raises(
        ParameterError, match="no token can write the text that must come next, after 2 tokens"
    ) as refused:
        llm.generate([[1]], SamplingParams(structured=Structured(grammar='start: "abé"')))
    assert "\n" not in str(refused.value)


AWKWARD: list[dict[str, Any]] = [
    {"regex": "retur"}, {"regex": "(retur|impor)"}, {"choice": ["de", "def", "defa"]}, {"regex": "(🙂|🙁)x"},
    {"json_schema": record(**{"日本": {"const": "\x00🙂"}, '"\\': {"const": "<|endoftext|>"}})},
]  # fmt: skip


def test_forms_that_end_inside_a_token_or_a_character_have_the_text_of_plain_decoding() -> None:
    drafts, plain = LLM("embedded"), LLM("embedded", draft_tokens=0)
    accepted = 0
    for form in AWKWARD:
        params = SamplingParams(structured=Structured(**form), max_tokens=60)
        done, alone = (llm.generate(["x = "], params)[0] for llm in (drafts, plain))
        assert (done.token_ids, done.finish_reason) == (alone.token_ids, alone.finish_reason), form
        assert not done.stats.drafter_faults
        accepted += done.stats.accepted
    assert accepted > 20


def test_a_text_that_ends_with_its_form_is_drafted_to_its_end(tokenizer: Any) -> None:
    llm = LLM("embedded")
    done = llm.generate(
        ["The answer:"], SamplingParams(structured=Structured(regex=" (no|yes) or return"), max_tokens=40)
    )
    assert done[0].finish_reason == "stop"
    assert done[0].stats.steps < len(done[0].token_ids)


def test_forced_drafts_are_on_without_a_drafter_and_off_with_no_draft_tokens() -> None:
    form = Structured(json_schema=WEATHER)
    base = {"structured": form, "max_tokens": 60}
    llm = LLM("embedded")
    on, off = (llm.generate(["x"], SamplingParams(**base, **more))[0] for more in ({}, {"draft_tokens": 0}))
    assert on.token_ids == off.token_ids
    assert on.stats.accepted
    assert not off.stats.proposed
    none = LLM("embedded", draft_tokens=0).generate(["x"], SamplingParams(**base))[0]
    assert not none.stats.proposed
    few = LLM("embedded", draft_tokens=2).generate(["x"], SamplingParams(**base))[0]
    assert max(few.stats.drafted_at) == 2


@pytest.mark.parametrize("draft", [None, "suffix", "embedded"])
def test_statistics_name_the_drafter_of_each_token(draft: str | None) -> None:
    llm = LLM("embedded", draft)
    seq = llm.sequence("x = ", SamplingParams(structured=Structured(json_schema=WEATHER), max_tokens=60))
    for _ in llm.decode([seq]):
        pass
    named = [name for name in seq.proposers if name is not None]
    assert "grammar" in named
    assert set(named) <= {"grammar", llm.drafter.name}
    assert len(named) == seq.stats.accepted
