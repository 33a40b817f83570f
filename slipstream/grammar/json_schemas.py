"""Reads JSON schemas without compiling them: their parts, and the types that a value may have."""

import re
from collections.abc import Callable, Collection, Mapping

from slipstream.core.strict import JsonObject

DEFINITIONS = ("$defs", "definitions")
KINDS: dict[str, tuple[type, ...]] = {
    "null": (type(None),), "boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,),
    "array": (list,), "object": (dict,),
}  # fmt: skip
_VALUES = {"const", "enum", "default", "examples"}
"""Keywords whose content is JSON values, not schemas."""
_NAMED = {"properties", "patternProperties", "dependentSchemas", *DEFINITIONS}
"""Keywords that map names to schemas."""
_IN_PLACE = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas"}
"""Keywords whose schemas constrain the same value."""
_MORE = {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
"""Keywords that allow or restrict properties that are not listed in `properties`."""
_MOST_REFERENCES = 20


def rebuild(schema: object, change: Callable[[JsonObject], JsonObject | None]) -> object:
    """Return the schema with `change` applied to each part. If `change` returns None, the part is kept unchanged."""
    if isinstance(schema, list):
        return [rebuild(each, change) for each in schema]
    if not isinstance(schema, dict) or (changed := change(schema)) is None:
        return schema
    inner: JsonObject = {}
    for key, each in changed.items():
        if key in _NAMED and isinstance(each, dict):
            inner[key] = {name: rebuild(one, change) for name, one in each.items()}
        else:
            inner[key] = each if key in _VALUES else rebuild(each, change)
    return inner


def add_pattern_of_names(part: JsonObject) -> JsonObject:
    """Express `propertyNames` by other keywords, if it requires only strings, a pattern, or one of several names."""
    names = {} if part.get("propertyNames") is True else part.get("propertyNames")
    if not isinstance(names, dict):
        return part
    asked = names.keys() - {"type", "title", "description"}
    others = {key: value for key, value in part.items() if key != "propertyNames"}
    if not asked and names.get("type", "string") == "string":
        return others
    listed = names.get("enum", [names.get("const")])
    one_of = "|".join(re.escape(str(name)) for name in listed) if isinstance(listed, list) else ""
    pattern = names.get("pattern", f"^({one_of})$")
    known = asked in ({"pattern"}, {"enum"}, {"const"}) and isinstance(pattern, str) and isinstance(listed, list)
    if not known or "properties" in part or "patternProperties" in part:
        return part
    values = others.pop("additionalProperties", True)
    return {**others, "patternProperties": {pattern: values}, "additionalProperties": False}


def close_objects(schema: object) -> object:
    """Forbid unlisted properties in each object that lists properties and has no keyword about unlisted ones, as
    OpenAI's strict mode and xgrammar do. A schema that describes one object in several parts is not changed, because
    each closed part would forbid the properties of the other parts."""
    combined = False

    def look(part: JsonObject) -> JsonObject:
        nonlocal combined
        places = _IN_PLACE & part.keys()
        combined |= "allOf" in places or "if" in places or bool(places and "properties" in part)
        return part

    def close(part: JsonObject) -> JsonObject:
        named, required = part.get("properties"), part.get("required", [])
        if not isinstance(named, dict) or not isinstance(required, list) or _MORE & part.keys():
            return part
        return {**part, "additionalProperties": False} if all(str(name) in named for name in required) else part

    rebuild(schema, look)
    return schema if combined else rebuild(schema, close)


def is_kind(value: object, kinds: Collection[str]) -> bool:
    """Return whether a JSON value has one of these types. A boolean does not count as a number."""
    return any(isinstance(value, KINDS[kind]) for kind in kinds if isinstance(value, bool) == (kind == "boolean"))


def find_kinds(schema: object, key: str | None) -> set[str]:
    """Return the types that a member of an object may have. key: None for a member that the schema does not name."""
    named = follow(schema, schema)
    named = named if isinstance(named, Mapping) else {}
    properties, more = named.get("properties"), named.get("additionalProperties")
    return _find_kinds(properties.get(key, more) if isinstance(properties, Mapping) else more, schema, {})


def _find_kinds(part: object, root: object, known: dict[int, set[str]]) -> set[str]:
    """Return the types of a part. known: types of parts by `id(part)`, so that each part is read once."""
    part = follow(part, root)
    if not isinstance(part, Mapping):
        return set(KINDS)
    if id(part) not in known:
        kinds = known[id(part)] = set(KINDS)  # the result for a part that refers to itself
        if isinstance(given := part.get("type"), (str, list)):
            kinds = kinds & ({given} if isinstance(given, str) else {each for each in given if isinstance(each, str)})
        if isinstance(values := [part["const"]] if "const" in part else part.get("enum"), list):
            kinds = {kind for kind in kinds if any(is_kind(value, (kind,)) for value in values)}
        for several in ("anyOf", "oneOf", "allOf"):
            if isinstance(choices := part.get(several), list) and choices:
                each = [_find_kinds(choice, root, known) for choice in choices]
                kinds = kinds & (each[0].intersection(*each) if several == "allOf" else each[0].union(*each))
        known[id(part)] = kinds or set(KINDS)
    return known[id(part)]


def follow(part: object, root: object) -> object:
    """Follow `$ref` of a part within the document `root`, repeatedly, and return the part at the end."""
    for _ in range(_MOST_REFERENCES):
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        part = root
        for name in reference[1:].split("/")[1:]:
            part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
