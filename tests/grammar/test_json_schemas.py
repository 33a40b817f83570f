"""Texts of the embedded model under JSON schemas, sampled at temperature 1, are valid with every drafter.

`jsonschema` is the oracle.
"""

import json
from typing import Any

import jsonschema
import pytest

from slipstream import LLM, SamplingParams, Structured
from slipstream.drafters.registry import DRAFTERS, Needs

WORD: dict[str, Any] = {"type": "string", "maxLength": 8}
POINT = {
    "type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"],
    "additionalProperties": False,
}  # fmt: skip


def record(required: bool = True, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer in a range": {"type": "integer", "minimum": -5, "maximum": 120},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "number in a range": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple of": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "enum of several types": {"enum": ["red", 5, None, True, {"a": [1]}, "\u00e9\U0001f600"]},
    "const object": {"const": {"kind": "fixed", "values": [1, 2.5, None]}},
    "string with bounds": {"type": "string", "minLength": 2, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,5}-[0-9]{3}$"},
    "unanchored pattern": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 8},
    "date": {"type": "string", "format": "date"},
    "a format that is an annotation": {"type": "string", "format": "color", "maxLength": 4},
    "names of a pattern": {"type": "object", "propertyNames": {"pattern": "^a[a-z]{1,2}$"}, "maxProperties": 2,
                           "additionalProperties": {"type": "boolean"}},
    "listed names": {"type": "object", "propertyNames": {"type": "string", "enum": ["a.b", "c"]}, "minProperties": 1,
                     "additionalProperties": {"enum": [1, 2]}},
    "any names": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"},
                  "maxProperties": 2},
    "unique or not": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False, "maxItems": 3},
    "array with bounds": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "array of arrays": {"type": "array", "items": {"type": "array", "items": WORD, "maxItems": 2}, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [WORD, {"enum": [1, None]}], "items": False, "minItems": 2},
    "closed object": POINT,
    "optional properties": record(False, a={"type": "boolean"}, b={"enum": [1, 2]}, c={"type": "null"}),
    "nested objects": record(user=record(name=WORD, at=POINT), active={"type": "boolean"}),
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "any of": {"anyOf": [{"type": "integer", "maximum": 50}, {"enum": ["a", "b"]}, POINT]},
    "one of with tags": {
        "oneOf": [record(kind={"const": "a"}, x={"type": "boolean"}), record(kind={"const": "b"}, y={"type": "null"})]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]},
    "references": {**record(start={"$ref": "#/$defs/p"}, end={"$ref": "#/$defs/p"}), "$defs": {"p": POINT}},
    "recursion": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"enum": [1]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    },
    "union of types": {"type": ["boolean", "null", "integer"], "maximum": 9},
    "unicode names": record(**{"na\u00efve \u2713": {"type": "boolean"}, 'q"uote\\': {"enum": ["\n", "\t"]}}),
}  # fmt: skip
"""In the manner of the JSON Schema Test Suite (draft 2020-12)."""

MADE = [
    name
    for name, spec in DRAFTERS.items()
    if spec.needs not in (Needs.EARLY_EXIT, Needs.MTP_LAYERS) and name not in ("eagle", "dflash")  # no such head ships
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded", draft_tokens=4)


@pytest.mark.parametrize("name", MADE)
def test_sampled_texts_are_valid_with_every_drafter(llm: LLM, name: str) -> None:
    needs = DRAFTERS[name].needs
    options = {"model": "embedded"} if needs is Needs.DRAFT_MODEL or name == "hybrid" else {}
    llm.use(name, **options)
    each = [
        SamplingParams(structured=Structured(json_schema=schema), temperature=1.0, seed=seed, max_tokens=96)
        for seed, schema in enumerate(SCHEMAS.values())
    ]
    done = llm.generate(["import json\n\nvalue = "] * len(each), each)
    for schema, completion in zip(SCHEMAS.values(), done, strict=True):
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
        assert not completion.stats.drafter_faults
    finished = sum(completion.finish_reason == "stop" for completion in done)
    assert finished >= len(SCHEMAS) / 2, "too few to be a test"


def test_any_object_and_a_value_after_a_free_part(llm: LLM) -> None:
    llm.use("suffix")
    for seed in range(5):
        how: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 96}
        completion = llm.generate("value = ", SamplingParams(structured=Structured(json_object=True), **how))[0]
        if completion.finish_reason == "stop":
            assert isinstance(json.loads(completion.text), dict)
        form = Structured(json_schema={"enum": [1, 2]}, after="=")
        completion = llm.generate("def f(x):\n", SamplingParams(structured=form, **how))[0]
        if "=" in completion.text and completion.finish_reason == "stop":
            assert json.loads(completion.text.partition("=")[2]) in (1, 2)
