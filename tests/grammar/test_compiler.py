"""Forms that cannot be compiled are refused, with the place of the fault; grammar bombs end within their limits."""

import sys
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams, Structured
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.core.warp import distributions
from slipstream.errors import ParameterError, TargetError
from slipstream.grammar.compiler import Grammars, compile_form
from slipstream.grammar.vocabulary import Vocabulary
from slipstream.tokens.text import load_tokenizer
from tests.core.letter_tokenizer import letter_tokenizer
from tests.targets.toy import ToyTarget

V = 4096


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer("embedded"), V)


def refused(grammars: Grammars, **form: Any) -> str:
    with pytest.raises(ParameterError) as fault:
        grammars.make_constraint(Structured(**form), frozenset())
    said = str(fault.value)
    assert "\n" not in said
    return said


def written(grammars: Grammars, **form: Any) -> bytes:
    """A text of this form, or its first 30 tokens: the lowest id that is allowed at each place."""
    constraint, output = grammars.make_constraint(Structured(**form), frozenset()), list[int]()
    while len(output) < 30 and not constraint.complete(output, ()):
        row = constraint.find_allowed(output, [()])[0]
        assert row.any()
        output.append(int(row.argmax()))
    return b"".join(grammars._vocabulary().written[token] for token in output)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "strin"}, "Invalid type: strin, at #."),
        ({"properties": {"a": {}, "q": {"type": "strin"}}}, "Invalid type: strin, at #/properties/q."),
        ({"type": "array", "items": {"type": "strin"}}, "Invalid type: strin, at #/items."),
        ({"propertyNames": {"minLength": 2}}, "propertyNames"),
        ({"anyOf": [{"type": "string"}, {"not": {}}]}, 'Unimplemented keys: ["not"], at #/anyOf/1.'),
        ({"properties": {"a/b~c": {"uniqueItems": True}}}, "at #/properties/a~1b~0c."),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "Pointer '/$defs/x' does not exist, at #/properties/a."),
        (
            {"properties": {"a": {"items": {"$ref": "#/$defs/x"}}}, "$defs": {"x": {"anyOf": [{"not": {}}]}}},
            'Unimplemented keys: ["not"], at #/$defs/x/anyOf/0.',
        ),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3), at #."),
        ({"properties": {"p": {"pattern": "a(b"}}}, "unclosed group, at #/properties/p."),
        (False, "schema is false, at #."),
        ({"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
        (nested(200), "recursion limit exceeded at line 1 column"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_a_pointer_to_the_fault(grammars, schema, said) -> None:
    assert said in refused(grammars, json_schema=schema)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"regex": "a(b"}, "cannot be compiled: at '(b': unclosed group."),
        ({"regex": "a\n/[z-a]"}, "cannot be compiled: at 'z-a]': invalid character class range"),
        ({"regex": "a(?=b)"}, "at '(?=b)': look-around"),
        ({"grammar": "start: /a(/"}, "at 1(8): at '(': unclosed group."),
        ({"regex": "()"}, "it allows only the empty text"),
        ({"grammar": 'start: "a" | foo'}, 'at 1(8): unknown name: "foo"'),
        ({"grammar": 'start: "a" (\n | "b"'}, "2(7): Expected token"),
        ({"grammar": 'root ::= "a" ('}, "Expected ')' at line 1"),
    ],
)
def test_a_regex_or_grammar_that_cannot_be_compiled_is_refused_with_the_place(grammars, form, said) -> None:
    assert said in refused(grammars, **form)


def test_a_form_that_the_tokens_cannot_write_is_refused() -> None:
    assert "cannot be compiled" in refused(Grammars(letter_tokenizer(5), 5), regex="é")


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}},
        {"json_schema": {"type": "integer", "allOf": [{"multipleOf": n} for n in (97, 89, 83)]}},
        {"json_schema": {"type": "integer", "multipleOf": 10**30}},
        {"json_schema": {"enum": [f"value {i} " * 9 for i in range(20_000)]}},
        {"json_schema": {"allOf": [{"anyOf": [{"required": [a + str(i)]} for a in "pq"]} for i in range(14)]}},
    ],
    ids=lambda form: str(form)[:60],
)
def test_a_bomb_is_refused_when_it_is_compiled(grammars: Grammars, form: dict[str, Any]) -> None:
    assert refused(grammars, **form)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(a{1000}){1000}"},
        {"regex": "(a|b)*a(a|b){25}c"},
        {"grammar": 'start: "x" a{100}\na: b{100}\nb: c{100}\nc: d{100}\nd: "y"'},
        {"grammar": 'start: start start | "a" | ""'},
        {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "string"}}},
    ],
    ids=lambda form: str(form)[:60],
)
def test_a_huge_form_that_compiles_is_followed(grammars: Grammars, form: dict[str, Any]) -> None:
    assert written(grammars, **form)


@pytest.mark.parametrize(
    "choice",
    [[f"label {i}" for i in range(5000)], ["a\x7fb"], ["\x00", "\n"], ["// a", "/* b"], ['"\\', "é\u2028🎈"]],
    ids=lambda choice: repr(choice[0]),
)
def test_thousands_of_choices_and_any_character_in_them_are_compiled(grammars: Grammars, choice: list[str]) -> None:
    assert written(grammars, choice=choice).decode() in choice


def test_a_bomb_that_explodes_in_the_middle_of_a_text_ends_with_an_error_that_says_so() -> None:
    llm = LLM(ToyTarget(5), tokenizer=letter_tokenizer(5), draft_tokens=4)
    bomb = SamplingParams(structured=Structured(regex="(((a{1,50}){1,50}){1,50}){1,50}"), max_tokens=1000)
    with pytest.raises(TargetError, match=r"cannot be followed after \d+ tokens: .*too many expressions"):
        llm.generate([1], bomb)
    assert llm.generate([1], SamplingParams(structured=Structured(regex="ab")))[0].text == "ab"


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"json_object": True}, 64),
        ({"json_schema": {"type": "object"}}, 64),
        ({"json_schema": True}, 64),
        ({"grammar": 'start: "<" json ">"\njson: %json {"type": "object"}'}, 64),
        ({"json_schema": {"x-guidance": {"whitespace_flexible": False}}}, 0),
        ({"json_schema": {"x-guidance": {"whitespace_pattern": r"\x20{1,70}"}}}, 70),
    ],
)
def test_white_space_between_parts_of_json_ends(form: dict[str, Any], allowed: int) -> None:
    """Otherwise a small model writes it until its tokens are used up."""
    text = b"<{" if "grammar" in form else b"{"
    matcher, _ = compile_form(Vocabulary.of_bytes(), Structured(**form))
    assert matcher.try_consume_tokens(list(text + b" " * 99)) == len(text) + allowed


def test_a_form_is_compiled_once_for_many_requests(grammars: Grammars) -> None:
    one, other = (grammars.make_constraint(Structured(json_schema={"type": "null"}), frozenset()) for _ in "ab")
    assert one._free is other._free
    assert one._walk is not other._walk


def test_without_a_tokenizer_of_transformers_a_form_is_refused() -> None:
    params = SamplingParams(structured=Structured(regex="a"))
    with pytest.raises(ParameterError, match="the target has no tokenizer"):
        LLM(ToyTarget(5), draft_tokens=4).generate([1], params)
    with pytest.raises(ParameterError, match="the class of its tokenizer is Own"):
        LLM(ToyTarget(5), tokenizer=Own(), draft_tokens=4).generate([1], params)


class Own:
    chat_template = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install 'slipstream[grammar]'" in refused(Grammars(letter_tokenizer(5), 5), regex="a")


def test_a_sequence_without_its_constraint_is_not_decoded_unconstrained() -> None:
    seq = Sequence([0], SamplingParams(structured=Structured(regex="a")))
    with pytest.raises(AssertionError, match=r"LLM\.sequence"):
        distributions(torch.zeros(1, 5), [seq], Draft.empty(1))
