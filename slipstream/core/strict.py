"""`Strict`: configurations that refuse what they do not know, and values that their fields' checks refuse (`option`);
`check_text`: refuses text that no tokenizer reads; `parse_json`: refuses bad JSON of every kind."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from slipstream.core.declaration import OPTION, Option
from slipstream.errors import ParameterError, RequestError, did_you_mean

S = TypeVar("S", bound="Strict")
JsonObject = dict[str, Any]
"""A JSON object from a file or request. Its values may have any type, and are checked where they are used."""
JsonMapping = Mapping[str, Any]
"""A JSON object that is only read."""


class Strict:
    """Mixin for configuration dataclasses. Raises ParameterError for an unknown keyword (with the nearest known name),
    for a value that its field's check refuses, and for a value other than True or False in a boolean field. None is
    allowed where it is the default. prefix: put before the name of a boolean field in errors."""

    prefix: ClassVar[str] = ""

    def __new__(cls: type[S], *args: object, **kwargs: object) -> S:
        known = {f.name: f.type for f in fields(cls)}  # type: ignore[arg-type]
        for name in kwargs:
            if name not in known:
                raise ParameterError(
                    f"{cls.__name__} has no parameter {name!r}",
                    why="ignoring it silently could change the output",
                    fix=did_you_mean(name, known) if known else "leave it out: there are no parameters",
                )
            if known[name] in (bool, "bool") and not isinstance(kwargs[name], bool):
                raise ParameterError(
                    f"{cls.prefix}{name} is {kwargs[name]!r}, but must be True or False", fix=f"write {name}=True"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            check, value = each.metadata.get(OPTION, Option()).check, getattr(self, each.name)
            if check is not None and not (value is None and each.default is None):
                object.__setattr__(self, each.name, check(each.name, value))


def parse_json(text: str | bytes, **more: Any) -> Any:
    """Like json.loads, but every kind of bad JSON raises JSONDecodeError, including deep nesting, numbers with too many
    digits and bytes that are not UTF-8."""
    try:
        return json.loads(text, **more)
    except (RecursionError, ValueError) as fault:
        raise fault if isinstance(fault, json.JSONDecodeError) else json.JSONDecodeError(str(fault), "", 0) from fault


def check_text(name: str, text: str, error: type[RequestError] = ParameterError) -> None:
    """Raise `error` for text that has half of a surrogate pair, as Python represents bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        at = fault.start
        byte = ord(text[at]) - 0xDC00
        problem = f"half of a surrogate pair, {text[at]!r}," if byte not in range(0x80, 0x100) else f"byte {byte:#x}"
        raise error(
            f"{name} is not UTF-8 text: it has {problem} at character {at}",
            why="tokenizers read only valid Unicode",
            fix="give UTF-8 text",
        ) from fault
