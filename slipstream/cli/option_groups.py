"""Options of commands, declared as values (`option`), in dataclasses that several commands share. `grouped` makes typer
options of them; the command receives the filled-in dataclasses. A subclass changes the default of an option by a plain
value: `rate: float | None = 8.0`.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence as Seq
from copy import copy
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from slipstream.core.strict import check_text

METAVARS = ((bool, ""), (int, "N"), (float, "X"), (Path, "FILE"), (str, "TEXT"))
"""What stands for the value of an option in `--help`: short, because long names of options are cut at 60 columns."""
_DECLARED = "typer"  # key of the metadata of a field


def option(
    default: Any, help: str, *names: str, shown: str | bool = True, panel: str | None = None, **more: Any
) -> Any:
    """An option. names: as typed, if they do not follow from the name; shown: what `--help` shows as the default;
    panel: in `--help`, if not the group's `PANEL`; more: `metavar`, `min`, `max` and others of `typer.Option`."""
    declared = typer.Option(*names, help=help, show_default=shown, rich_help_panel=panel, **more)
    return field(default=default, metadata={_DECLARED: declared})


def argument(help: str, default: Any = MISSING, shown: str | bool = True) -> Any:
    """An argument; one without a default must be given. shown: as for `option`."""
    return field(default=default, metadata={_DECLARED: typer.Argument(help=help, show_default=shown)})


def unwrapped(text: str | None) -> str:
    """A docstring with one line for each paragraph: typer keeps the line breaks of all but the first, and the terminal
    breaks these lines again."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of `command` that is annotated with a dataclass by the fields of that dataclass."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters, annotations = [], {}
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            members = _members(groups[parameter.name])
        else:
            name, known = parameter.name, parameter.default
            members = [(name, _annotated(name, hints[name], known.metadata[_DECLARED], known.default), known.default)]
        for name, hint, default in members:
            annotations[name] = hint
            empty = inspect.Parameter.empty if default is MISSING else default
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=empty, annotation=hint))

    def run(**values: Any) -> None:
        for name, value in values.items():
            for text in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(text, str) and not os.path.exists(text):  # the name of a file may be any bytes
                    check_text(f"the {name}", text)
        objects: Mapping[str, Any] = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group) if f.name in values})
            for name, group in groups.items()
        }
        command(**values, **objects)

    run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, annotations
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _members(group: Any) -> list[tuple[str, Any, Any]]:
    """(name, annotation for typer, default) of each field of a group that is an option."""
    types, members = get_type_hints(group, include_extras=True), []
    for each in fields(group):
        declared, panel = _declaration(group, each.name)
        if declared is not None:
            hint = _annotated(each.name, types[each.name], declared, each.default, panel)
            members.append((each.name, hint, each.default))
    return sorted(members, key=lambda member: member[0] not in ("target", "draft"))  # those of loading follow


def _declaration(group: Any, name: str) -> tuple[Any, str | None]:
    """What declares a field, `option`, `argument` or a `setting`, and its panel: that of the class, or of
    the first one that is derived from it and has one. None for a field that is no option."""
    for at, kind in enumerate(group.__mro__):
        known = kind.__dict__.get("__dataclass_fields__", {}).get(name)
        if known is None or name not in inspect.get_annotations(kind) or not known.metadata:
            continue
        panels = [owner.__dict__["PANEL"] for owner in group.__mro__[at::-1] if "PANEL" in owner.__dict__]
        declared = known.metadata.get(_DECLARED)
        if declared is None and known.metadata.get("help"):  # a setting of loading, or of a method of training
            names, shown = known.metadata.get("names", ()), known.metadata["shown"] or True
            declared = typer.Option(*names, help=known.metadata["help"], show_default=shown)
        return declared, panels[0] if panels else None
    return None, None


def _annotated(name: str, hint: Any, declared: Any, default: Any, panel: str | None = None) -> Any:
    """The annotation of an option: its type, and what `option` declared, with what follows from name and type."""
    if hint is Any:  # a setting of loading, which takes more than text in Python
        hint = str if default is not None else str | None
    if repeated := [get_args(part)[0] for part in (hint, *get_args(hint)) if get_origin(part) is Seq]:
        hint = list[repeated[0]] | None  # type: ignore[valid-type]  # typer collects a list
    copied = copy(declared)
    if isinstance(copied, typer.models.OptionInfo):
        if copied.metavar is None:
            kinds = {hint, *get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))}
            copied.metavar = next((text for known, text in METAVARS if known in kinds), None)
        if hint is bool and default is False and copied.default is ...:  # no --no-... that says nothing
            copied.param_decls = (f"--{name.replace('_', '-')}",)
        copied.rich_help_panel = copied.rich_help_panel or panel
    return Annotated[hint, copied]
