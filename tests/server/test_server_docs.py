"""docs/server.md lists every field and every metric, as the code has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.server.fields import BOTH, FIELDS
from slipstream.server.server_metrics import ServerMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def fields() -> list[str]:
    rows = ["| field | where | |", "|---|---|---|"]
    for each in FIELDS:
        where = "both" if each.where == BOTH else each.where[0]
        rows.append(f"| `{each.name}` | {where} | {'refused: ' if each.refused else ''}{each.text} |")
    return rows


def metrics() -> list[str]:
    rows = ["| metric | kind | |", "|---|---|---|"]
    for each in ServerMetrics("m", 1024).registry.collect():
        name = each.name.removeprefix("slipstream:") + ("_total" if each.type == "counter" else "")
        rows.append(f"| `{name}` | {each.type} | {each.documentation} |")
    return rows


@pytest.mark.parametrize(("name", "rows"), [("fields", fields()), ("metrics", metrics())])
def test_the_page_lists_what_the_code_has(name: str, rows: list[str]) -> None:
    shown = PAGE.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]
    assert shown.strip().splitlines() == rows
