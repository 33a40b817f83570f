"""Where a JSON schema is at fault, and what it must not hold because its compilation would take minutes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from slipstream.errors import ParameterError

LARGEST_MULTIPLE = 100_000
"""Compiling `multipleOf` takes one state for each remainder: about a second here, and 15 at 700,000, where llguidance's
fuel is not yet used up."""

DEFINITIONS = ("$defs", "definitions")
MOST_PARTS = 1000
"""How many parts of a schema are compiled one by one to find the one at fault."""


def check_multiples(schema: Any) -> None:
    """Raise ParameterError if all `multipleOf` together have more remainders than `LARGEST_MULTIPLE`. Several that
    apply to one number become one of their least common multiple, and `$ref` can join any two."""
    found = [(place, value) for place, value in _keywords(schema, "multipleOf", "#") if _is_positive(value)]
    values = [Decimal(repr(value)) for _, value in found]
    digits = max((-int(value.as_tuple().exponent) for value in values), default=0)
    if max((value.adjusted() for value in values), default=0) + max(digits, 0) > 20:
        multiple: float = math.inf
    else:
        multiple = math.lcm(*(int(value.scaleb(max(digits, 0))) for value in values))
    if multiple > LARGEST_MULTIPLE:
        raise ParameterError(
            f"structured.json_schema has multipleOf with a least common multiple of {multiple:g} units of the last "
            f"digit, at {', '.join(place for place, _ in found)}; at most {LARGEST_MULTIPLE} are compiled",
            why="each remainder is a state of the automaton",
            fix="choose a smaller multipleOf, or leave it out",
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _keywords(part: Any, keyword: str, place: str) -> Iterator[tuple[str, Any]]:
    """Place and value of every entry of that name, also where it is no keyword: it is not worth telling apart."""
    if isinstance(part, dict) and keyword in part:
        yield place, part[keyword]
    for name, child in _children(part):
        yield from _keywords(child, keyword, f"{place}/{name}")


def _children(part: Any) -> Iterator[tuple[str, Any]]:
    """Entries of a mapping or a list, by the names that a JSON pointer has for them (RFC 6901)."""
    if isinstance(part, dict):
        for name, child in part.items():
            yield name.replace("~", "~0").replace("/", "~1"), child
    elif isinstance(part, list):
        for index, child in enumerate(part):
            yield str(index), child


def place_of(schema: Any, found: str, fault: Callable[[Any], str]) -> str:
    """JSON pointer of the innermost part of `schema` that has the fault `found` by itself; "#" if none has, or if it is
    not among the first `MOST_PARTS`.

    fault  compiles a schema; returns what is wrong with it, or "".
    """
    shared = {name: schema[name] for name in DEFINITIONS if isinstance(schema, dict) and name in schema}
    left = MOST_PARTS

    def inside(part: Any, place: str) -> str:
        nonlocal left
        children = sorted(_children(part), key=lambda child: child[0] not in DEFINITIONS)  # rather there than at a $ref
        for name, child in children:
            here, left = f"{place}/{name}", left - 1
            if left > 0 and isinstance(child, (dict, list)):
                if isinstance(child, dict) and fault({**shared, **child}) == found:
                    return inside(child, here)
                deeper = inside(child, here)
                if deeper != here:
                    return deeper
        return place

    return inside(schema, "#")
