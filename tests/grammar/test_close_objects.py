"""Objects of a JSON schema have the named properties only, unless the schema says otherwise."""

from typing import Any

import pytest

from slipstream.grammar.json_schemas import close_objects

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
REFERENCE = {"$ref": "#/$defs/n"}
CLOSED = {**NAMED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (NAMED, CLOSED),
        ({"properties": {"properties": NAMED}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"items": REFERENCE, "$defs": {"n": NAMED}}, {"items": REFERENCE, "$defs": {"n": CLOSED}}),
        ({"enum": [NAMED]}, {"enum": [NAMED]}),
    ],
)  # fmt: skip
def test_objects_are_closed_where_they_name_their_properties(schema: object, closed: object) -> None:
    assert close_objects(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**NAMED, "additionalProperties": True},
        {**NAMED, "additionalProperties": {"type": "string"}},
        {**NAMED, "patternProperties": {"^x": True}},
        {**NAMED, "required": ["a", "b"]},
        {**NAMED, "minProperties": 2},
        {"allOf": [NAMED, {"properties": {"b": True}}]},
        {**NAMED, "anyOf": [{"properties": {"b": True}}, {"properties": {"c": True}}]},
        {"$ref": "#/$defs/n", "properties": {"b": True}, "$defs": {"n": NAMED}},
        {"if": NAMED, "then": {"properties": {"b": True}}},
    ],
)
def test_objects_stay_open_where_the_schema_says_so_or_describes_them_in_several_places(schema: object) -> None:
    assert close_objects(schema) == schema
