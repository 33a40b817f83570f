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
"""An object of a JSON file or request: its values are of any kind, and are checked where they are read."""
JsonMapping = Mapping[str, Any]
"""The same where it is only read."""


class Strict:
    """Mixin for configuration dataclasses: an unknown keyword is a `ParameterError` that says what was meant, and so is
    a value that the check of its field refuses, or of another type for a field that is True or False. None is allowed
    where it is the default. `prefix`: stands before the name of a field that is True or False in errors."""

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
    """As json.loads, but bad JSON of every kind is a JSONDecodeError: deep nesting, endless numbers, no UTF-8, too."""
    try:
        return json.loads(text, **more)
    except (RecursionError, ValueError) as fault:
        raise fault if isinstance(fault, json.JSONDecodeError) else json.JSONDecodeError(str(fault), "", 0) from fault


def check_text(name: str, text: str, error: type[RequestError] = ParameterError) -> None:
    """Raise `error` for text with halves of surrogate pairs; as such Python reads bytes that are not UTF-8."""
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
