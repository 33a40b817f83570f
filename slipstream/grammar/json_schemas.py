"""What JSON schemas say, without compiling them: their parts, and of which kinds a value may be."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

DEFINITIONS = ("$defs", "definitions")
KINDS: dict[str, tuple[type, ...]] = {
    "null": (type(None),), "boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,),
    "array": (list,), "object": (dict,),
}  # fmt: skip
_VALUES = {"const", "enum", "default", "examples"}
"""Keywords that hold values and no schemas."""
_NAMED = {"properties", "patternProperties", "dependentSchemas", *DEFINITIONS}
"""Keywords that hold schemas by names."""
_MOST_REFERENCES = 20


def rebuilt(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Any:
    """The schema with each of its parts as `change` returns it; None leaves a part as it is, with all within it."""
    if isinstance(schema, list):
        return [rebuilt(each, change) for each in schema]
    if not isinstance(schema, dict) or (changed := change(schema)) is None:
        return schema
    inner: dict[str, Any] = {}
    for key, each in changed.items():
        if key in _NAMED and isinstance(each, dict):
            inner[key] = {name: rebuilt(one, change) for name, one in each.items()}
        else:
            inner[key] = each if key in _VALUES else rebuilt(each, change)
    return inner


def with_pattern_of_names(part: dict[str, Any]) -> dict[str, Any]:
    """A part without `propertyNames`, if that asks for no more than text, a pattern, or one of several names."""
    names = part.get("propertyNames")
    names = {} if names is True else names
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return part
    asked = names.keys() - {"type", "title", "description"}
    others = {key: value for key, value in part.items() if key not in ("propertyNames", "additionalProperties")}
    if not asked:
        return {key: value for key, value in part.items() if key != "propertyNames"}
    if asked <= {"pattern", "enum", "const"} and len(asked) == 1 and not others.keys() & _NAMED - set(DEFINITIONS):
        listed = [names["const"]] if "const" in asked else names.get("enum", [])
        pattern = names.get("pattern", f"^({'|'.join(re.escape(str(name)) for name in listed)})$")
        values = part.get("additionalProperties", True)
        return others | {"patternProperties": {pattern: values}, "additionalProperties": False}
    return part


def is_kind(value: Any, kinds: Collection[str]) -> bool:
    """Whether a JSON value is of one of these kinds. A boolean is no number."""
    return any(isinstance(value, KINDS[kind]) for kind in kinds if isinstance(value, bool) == (kind == "boolean"))


def value_kinds(schema: Any, key: str | None) -> set[str]:
    """The kinds that a member of an object may have; key None: a member that the schema does not name."""
    root, schema = schema, _followed(schema, schema)
    if not isinstance(schema, Mapping):
        return set(KINDS)
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return _kinds(known.get(key, schema.get("additionalProperties")), root, 0)


def _kinds(schema: Any, root: Any, depth: int) -> set[str]:
    schema = _followed(schema, root)
    if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
        return set(KINDS)
    kinds = set(KINDS)
    if isinstance(given := schema.get("type"), (str, list)):
        kinds &= {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
    if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
        kinds &= {kind for kind in KINDS if any(is_kind(value, (kind,)) for value in values)}
    for several in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(several), list):
            kinds &= set().union(*(_kinds(each, root, depth + 1) for each in choices))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        kinds &= _kinds(each, root, depth + 1)
    return kinds or set(KINDS)


def _followed(schema: Any, root: Any) -> Any:
    """What the references of a schema lead to within the document."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = root
        for name in reference[1:].split("/")[1:]:
            schema = schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema
