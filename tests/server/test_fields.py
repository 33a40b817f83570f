"""Every sampling parameter can be asked for, and arrives as it was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.core.parameter_declaration import declared
from slipstream.core.params import SamplingParams
from slipstream.core.structured import Structured
from slipstream.server.fields import BOTH, CHAT, COMPLETIONS, FIELDS, fields_of, given_fields, sampling_params
from tests.core.changed_parameters import CHANGED

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}


def params(where: str, **body: Any) -> SamplingParams:
    return sampling_params(given_fields(json.loads(json.dumps(body)), fields_of(where)), where, 100)


@pytest.mark.parametrize("where", BOTH)
@pytest.mark.parametrize("name", sorted(declared(SamplingParams)))
def test_every_sampling_parameter_arrives_as_it_was_sent(name: str, where: str) -> None:
    value = CHANGED[name]
    sent: dict[str, Any] = {name: value}
    if name == "structured":
        sent = {"structured_outputs": {"regex": value.regex}}
    elif name == "draft_tokens":
        sent = {"speculation": {"draft_tokens": value}}
    elif name == "logprobs" and where == CHAT:
        sent = {"logprobs": True, "top_logprobs": value}
    assert getattr(params(where, **sent), name) == value


def test_what_is_not_given_is_the_apis_default() -> None:
    assert params(COMPLETIONS) == SamplingParams(temperature=1.0, max_tokens=16)
    assert params(CHAT) == SamplingParams(temperature=1.0, max_tokens=100)
    assert sampling_params({}, COMPLETIONS, 5).max_tokens == 5


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structured(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Structured(json_schema=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Structured(json_schema=SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Structured(json_object=True)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structured(json_schema=SCHEMA)),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structured(choice=["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Structured(grammar='start: "a"')),
    ],
)
def test_forms_are_understood_in_each_way_of_writing_them(body: dict[str, Any], form: Structured | None) -> None:
    assert params(CHAT, **body).structured == form


def test_the_newer_name_of_max_tokens_is_the_same_field() -> None:
    assert params(CHAT, max_completion_tokens=7).max_tokens == 7
    assert params(CHAT, max_completion_tokens=7, max_tokens=7).max_tokens == 7


def test_no_field_is_listed_twice_and_each_is_explained() -> None:
    names = [(where, each.name) for each in FIELDS for where in each.where]
    assert len(names) == len(set(names))
    assert all(each.text for each in FIELDS)
