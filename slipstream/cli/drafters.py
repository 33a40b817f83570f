"""`slipstream drafters`: lists the drafters, what each one needs, and its options, all read from the code."""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli import render
from slipstream.cli.option_groups import argument, expand_groups, option
from slipstream.cli.table_forms import render_terminal
from slipstream.core.strict import JsonObject
from slipstream.drafters.draft_plan import find_options
from slipstream.drafters.registry import DRAFTERS, limit_chosen
from slipstream.errors import ParameterError, did_you_mean
from slipstream.measure.tables import Column, Table, words

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@expand_groups
def drafters(
    name: str | None = argument("Show the options of this drafter.", default=None),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """List the drafters, or the options of one drafter.

    Other commands take these options as `-o NAME=VALUE`."""
    if name is None:
        rows = {
            each: {"is": summary(each), "needs": spec.needs.value, "length": spec.length, "longest": limit_chosen(each)}
            for each, spec in DRAFTERS.items()
        }
        if as_json:
            print(json.dumps(rows))
            return
        cells = [
            [each, row["needs"], f"up to {row['longest']}" if row["longest"] else "0", row["is"]]
            for each, row in rows.items()
        ]
        columns = [words("drafter"), words("needs"), Column("K"), words("how it drafts")]
        render.out().print(render_terminal(Table("", columns, cells)))
        render.out().print(
            "K: draft tokens per step, chosen in each step. All drafters are lossless with every rule. "
            "`slipstream drafters NAME` shows the options of a drafter."
        )
        return
    if name not in DRAFTERS:
        raise ParameterError(f"there is no drafter {name!r}", fix=did_you_mean(name, DRAFTERS))
    config = find_options(name)
    known = defaults(config)
    if as_json:
        print(json.dumps(known))
        return
    console = render.out()
    console.print(f"{name}: {summary(name)}")
    spec = DRAFTERS[name]
    if spec.length:
        console.print(
            f"Draft tokens: chosen in each step, up to {limit_chosen(name)}; {spec.length} if a command needs a number."
        )
    if spec.trained_by is not None:
        console.print(f"Train it with `slipstream train {spec.trained_by}`.")
    if spec.across is not None:
        console.print(f"It uses text of earlier requests only with the option {spec.across!r}.")
    if not known:
        console.print("It has no options.")
        return
    cells = [[key, repr(known[key]), meaning] for key, meaning in meanings(config).items()]
    console.print(render_terminal(Table("", list(map(words, ("option", "default", "meaning"))), cells)))


def summary(name: str) -> str:
    """Return the first paragraph of the docstring of the drafter's module, or of the function that makes the drafter
    if the module has several drafters. The module is parsed, not imported."""
    spec = DRAFTERS[name]
    tree = ast.parse(Path(find_spec(spec.path).origin).read_text(encoding="utf-8"))  # type: ignore[union-attr, arg-type]
    makers = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == spec.maker != "make"]
    text = ast.get_docstring(makers[0] if makers else tree) or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(".")


def meanings(config: object) -> dict[str, str]:
    """Return option -> explanation, from the configuration's docstring, whose paragraphs begin with option names."""
    texts: dict[str, str] = {}
    names = [""]
    for line in inspect.cleandoc(config.__doc__ or "").splitlines():
        if begun := re.match(r"(\w+(?:, \w+)*)  +", line):
            names = begun[1].split(", ")
            texts |= dict.fromkeys(names, f"see {names[0]}") | {names[0]: ""}
            line = line[begun.end() :]
        texts[names[0]] = f"{texts.get(names[0], '')} {line.strip()}".strip()
    return texts


def defaults(config: type[DataclassInstance]) -> JsonObject:
    """Return option -> default."""
    values = {}
    for field in fields(config):
        value = field.default_factory() if field.default_factory is not MISSING else field.default
        values[field.name] = value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
    return values
