"""JSON schemas in the manner of the JSON Schema Test Suite (draft 2020-12)."""

from typing import Any

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
