"""`Structured`: one form, stored as text, or refused by name."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from slipstream import SamplingParams, Structured
from slipstream.core.structured import KINDS
from slipstream.errors import ParameterError

GIVEN: dict[str, Any] = {
    "json_schema": {"type": "object", "properties": {"b": {}, "a": {}}}, "json_object": True, "regex": "[0-9]+",
    "grammar": 'start: "a"', "choice": ["yes", "no"], "tokens": [3, 1, 2],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone_is_a_form(kind: str) -> None:
    form = Structured(**{kind: GIVEN[kind]})
    assert form.kind == kind
    assert form == Structured(**{kind: GIVEN[kind]})
    assert hash(form) == hash(Structured(**{kind: GIVEN[kind]}))
    assert json.loads(json.dumps(asdict(SamplingParams(structured=form))))


def test_a_schema_is_stored_as_text_and_its_properties_keep_their_order() -> None:
    as_mapping, as_text = Structured(json_schema={"b": 1, "a": 2}), Structured(json_schema='{"b":1,"a":2}')
    assert as_mapping == as_text
    assert as_mapping.json_schema == '{"b": 1, "a": 2}'
    assert Structured(json_schema=False).kind == "json_schema"
    assert Structured(json_schema="true").json_schema == "true"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "sets no form"), ({"regex": "a", "choice": ["b"]}, "sets regex and choice"),
        ({"json_schema": False, "regex": "a"}, "sets json_schema and regex"), ({"after": "</think>"}, "sets no form"),
        ({"rgex": "a"}, "did you mean 'regex'"), ({"regex": ""}, "structured.regex"),
        ({"regex": 5}, "structured.regex"), ({"grammar": b"a"}, "structured.grammar"),
        ({"regex": "a", "after": ""}, "structured.after"), ({"json_object": 1}, "structured.json_object is 1"),
        ({"json_schema": 5}, "structured.json_schema is 5"),
        ({"json_schema": "[1]"}, r"structured.json_schema is \[1\]"),
        ({"json_schema": '{"a": }'}, "not JSON: Expecting value: line 1 column 7"),
        ({"json_schema": {"a": float("nan")}}, "not JSON"), ({"json_schema": {"a": {1}}}, "not JSON"),
        ({"json_schema": "[" * 100_000}, "not JSON"), ({"choice": "yes"}, "structured.choice"),
        ({"tokens": []}, "structured.tokens"), ({"tokens": "ab"}, "structured.tokens"),
        ({"tokens": [1, -1]}, "structured.tokens is -1"), ({"tokens": [1], "after": "</think>"}, "structured.after"),
        ({"choice": []}, "structured.choice"), ({"choice": ["a", ""]}, "structured.choice"),
        ({"choice": ["a", 1]}, "structured.choice"),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        Structured(**given)


def test_the_parameter_takes_a_form_and_nothing_else() -> None:
    for wrong in ({"regex": "a"}, "a", True):
        with pytest.raises(ParameterError, match=r"structured is .*, but must be a Structured or None"):
            SamplingParams(structured=wrong)  # type: ignore[arg-type]
