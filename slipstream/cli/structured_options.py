"""The options of structured output, and the `Structured` that they make. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from slipstream.cli.option_groups import option
from slipstream.core.structured import Structured
from slipstream.errors import ParameterError


@dataclass(frozen=True)
class StructuredOptions:
    """See `Structured`."""

    PANEL: ClassVar[str] = "Structured output"
    json_schema: str | None = option(None, "JSON schema that the text meets: a file, or JSON.", metavar="FILE|JSON")
    json_object: bool = option(False, "The text is a JSON object.")
    regex: str | None = option(None, "Regular expression that the text matches.")
    grammar: str | None = option(None, "File of a grammar, in Lark or EBNF.", metavar="FILE")
    choice: list[str] | None = option(None, "The text is one of these; repeatable.")
    after: str | None = option(None, "The form begins after this text, as in </think>.")

    def form(self) -> Structured | None:
        """The form asked for, or None. Raises ParameterError, also for files that cannot be read."""
        given: dict[str, Any] = {
            "json_schema": self.json_schema,
            "json_object": self.json_object or None,
            "regex": self.regex,
            "grammar": self.grammar,
            "choice": self.choice or None,
            "after": self.after,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if "grammar" in given:
            given["grammar"] = _read("--grammar", given["grammar"])
        schema = given.get("json_schema")
        if schema is not None and not schema.lstrip().startswith("{") and schema not in ("true", "false"):
            given["json_schema"] = _read("--json-schema", schema)
        if not given:
            return None
        form = Structured(**given)
        from slipstream.grammar.compiler import check_form

        check_form(form)
        return form


def _read(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ParameterError(f"{option} {path} cannot be read: {fault}", fix="check the file name") from fault
