"""Options of commands, declared (`option`) in dataclasses that several commands share. `expand_groups` makes typer
options of them; the command receives the filled-in dataclasses. A subclass changes the default of an option by a plain
value: `rate: float | None = 8.0`.
"""

import inspect
import os
from collections.abc import Callable, Sequence as Seq
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from slipstream.checkpoints.load_settings import LoadSettings
from slipstream.core.declaration import OPTION, Option, argument as argument, option as option
from slipstream.core.strict import JsonMapping, JsonObject, check_text

METAVARS = ((bool, ""), (int, "N"), (float, "X"), (Path, "FILE"), (str, "TEXT"))
"""(type, placeholder of an option's value in `--help`); short, because long option names are cut at 60 columns."""


def unwrap(text: str | None) -> str:
    """Return a docstring with one line for each paragraph. typer keeps the line breaks of all paragraphs but the first,
    and the terminal would break these lines again."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of `command` that is annotated with a dataclass by the fields of that dataclass."""
    hints = get_type_hints(command, include_extras=True)
    groups: JsonObject = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters, annotations = [], {}
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            members = _members(groups[parameter.name])
        else:
            name, known = parameter.name, parameter.default
            members = [(name, _annotate(name, hints[name], known.metadata[OPTION], known.default), known.default)]
        for name, hint, default in members:
            annotations[name] = hint
            empty = inspect.Parameter.empty if default is MISSING else default
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=empty, annotation=hint))

    def run(**values: object) -> None:
        for name, value in values.items():
            for text in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(text, str) and not os.path.exists(text):  # the name of a file may be any bytes
                    check_text(f"the {name}", text)
        objects: JsonMapping = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group) if f.name in values})
            for name, group in groups.items()
        }
        command(**values, **objects)

    # Help shows panels in the order of their first options.
    parameters.sort(key=lambda each: each.annotation.__metadata__[0].rich_help_panel == LoadSettings.PANEL)
    run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, annotations
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _members(group: Any) -> list[tuple[str, Any, Any]]:
    """Return (name, annotation for typer, default) of each field of a group that is an option."""
    types, members = get_type_hints(group, include_extras=True), []
    for each in fields(group):
        declared, panel = _declaration(group, each.name)
        if declared.help:
            hint = _annotate(each.name, types[each.name], declared, each.default, panel)
            members.append((each.name, hint, each.default))
    return sorted(members, key=lambda member: member[0] not in ("target", "draft"))  # these two come first


def _declaration(group: type, name: str) -> tuple[Option, str | None]:
    """Return the declaration of a field, and its panel, from the class that declares it or else from the first derived
    class that has a panel."""
    for at, kind in enumerate(group.__mro__):
        known = kind.__dict__.get("__dataclass_fields__", {}).get(name)
        if known is not None and name in inspect.get_annotations(kind) and OPTION in known.metadata:
            panels = [owner.__dict__["PANEL"] for owner in group.__mro__[at::-1] if "PANEL" in owner.__dict__]
            return known.metadata[OPTION], panels[0] if panels else None
    return Option(), None


def _annotate(name: str, hint: object, declared: Option, default: object, panel: str | None = None) -> Any:
    """Make the annotation of an option: its type, and typer's declaration of it."""
    if repeated := [get_args(part)[0] for part in (hint, *get_args(hint)) if get_origin(part) is Seq]:
        hint = list[repeated[0]] | None  # type: ignore[valid-type]  # typer collects a list
    if declared.positional:
        return Annotated[hint, typer.Argument(help=declared.help, show_default=declared.shown)]
    kinds = {hint, *get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))}
    names = declared.names
    if hint is bool and default is False and not names:  # makes no useless --no-... option
        names = (f"--{name.replace('_', '-')}",)
    typed = typer.Option(
        *names,
        help=declared.help,
        show_default=declared.shown,
        metavar=declared.metavar or next((text for known, text in METAVARS if known in kinds), None),
        rich_help_panel=declared.panel or panel,
        **declared.more,
    )
    return Annotated[hint, typed]
